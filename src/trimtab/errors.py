"""What can go wrong with a user's input: each message says what was asked, what is true and what to try."""

import re
from collections.abc import Sequence
from types import UnionType
from typing import get_args

MAX_SHOWN = 60  # characters of a value that a user's file holds
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class TrimtabError(ValueError):
    """What all errors for wrong input have in common.

    Use it in `except` for wrong input of any kind. The message is one sentence: what was asked, what is true, what to
    try. The command line prints it alone and exits with code 2.

    >>> import trimtab
    >>> try:
    ...     trimtab.describe("no-such-model")
    ... except trimtab.TrimtabError as error:
    ...     print(type(error).__name__)
    ConfigError
    """

    is_said: bool | None = None  # by another rank of a run, so that this one need not; None: it ran alone


class ConfigError(TrimtabError):
    """A model's config.json or preprocessor_config.json lacks or contradicts a field.

    Raised by `describe`, `find_device`, `parse_cluster`: look at the fields that the message names.
    """


class UnknownModelError(ConfigError):
    """No family describes this `model_type`.

    Raised by `describe`: install Transformers, so that it can be asked, or give a description file
    (`save_description`).
    """


class ImageError(TrimtabError):
    """An image's header or size cannot be used.

    Raised by image rules and readers of headers: the message names the file, or the size.
    """


class SampleError(TrimtabError):
    """A data set cannot be read, or holds samples that cannot be planned.

    Raised by `size_samples`: `on_bad="skip"` leaves bad samples out.
    """


class PackingError(TrimtabError):
    """Samples cannot be packed under the limits that were asked for.

    Raised by `pack_samples` and `make_plan`: raise the limits, or say what becomes of oversize samples.
    """


class PartitionError(TrimtabError):
    """Layers cannot be cut into the stages, or do not fit the memory, that were asked for.

    Raised by `split_stages`, `make_plan` and `place`: the message says how many bytes are missing.
    """


class PlanError(TrimtabError):
    """A plan cannot be made with these options, is not readable, or no longer fits its inputs.

    Raised by `make_plan`, `load_plan` and `check_plan`: the message names the option or the file.
    """


class UnsupportedPlanError(PlanError):
    """A framework cannot express what the plan decides.

    Raised by exports and `build_pipeline`: plan with `--for FRAMEWORK`, or take the plan that `--fit` writes.
    """


def refuse_type(name: str, value: object, kind: type | UnionType, made_by: str) -> None:
    """Raise one sentence in place of an AttributeError deep inside: `value` was given as `name` and is no `kind`.

    >>> refuse_type("cluster", "32xH100", dict, 'parse_cluster("32xH100")')
    Traceback (most recent call last):
    trimtab.errors.TrimtabError: cluster was given as str, and a dict is wanted: give parse_cluster("32xH100")
    """
    if not isinstance(value, kind):
        wanted = " or ".join(one.__name__ for one in get_args(kind) or (kind,))
        raise TrimtabError(f"{name} was given as {type(value).__name__}, and a {wanted} is wanted: give {made_by}")


def join_problems(problems: Sequence[str]) -> str:
    """Return all problems of one input as one message, a line each; past the first twenty only their number."""
    lines = list(problems[:20])
    if len(problems) > 20:
        lines.append(f"... and {len(problems) - 20} more of the same input")
    return "\n".join(lines)


def quote(value: object) -> str:
    """Return `value` as Python writes it, cut to 60 characters; of a long list only the head is written at all."""
    head = value[: MAX_SHOWN + 1] if isinstance(value, (str, list, tuple)) else value
    shown = repr(head)
    return shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."


def shorten(text: str, limit: int = 80) -> str:
    """Make text of a stranger's file fit for one line of a terminal: no control characters, at most `limit` others."""
    text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 3] + "..."
