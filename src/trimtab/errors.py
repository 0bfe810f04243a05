"""What can go wrong with a user's input: each message says what was asked, what is true and what to try."""

from __future__ import annotations

from collections.abc import Sequence


class TrimtabError(ValueError):
    """Bad input. The command line prints the message alone and exits with code 2."""


class ConfigError(TrimtabError):
    """A model's config.json or preprocessor_config.json lacks or contradicts a field."""


class UnknownModelError(ConfigError):
    """No family describes this `model_type`."""


class ImageError(TrimtabError):
    """An image's header or size cannot be used."""


class SampleError(TrimtabError):
    """A data set cannot be read, or holds samples that cannot be planned."""


class PackingError(TrimtabError):
    """Samples cannot be packed under the limits that were asked for."""


class PartitionError(TrimtabError):
    """Layers cannot be cut into the stages, or do not fit the memory, that were asked for."""


class PlanError(TrimtabError):
    """A plan cannot be made with these options, is not readable, or no longer fits its inputs."""


class UnsupportedPlanError(PlanError):
    """A framework cannot express what the plan decides."""


def refuse_type(name: str, value: object, kind: type, made_by: str) -> None:
    """One sentence in place of an AttributeError deep inside: `value` was given as `name` and is no `kind`.

    >>> refuse_type("cluster", "32xH100", dict, 'parse_cluster("32xH100")')
    Traceback (most recent call last):
    trimtab.errors.TrimtabError: cluster was given as str, and a dict is wanted: give parse_cluster("32xH100")
    """
    if not isinstance(value, kind):
        raise TrimtabError(
            f"{name} was given as {type(value).__name__}, and a {kind.__name__} is wanted: give {made_by}"
        )


def join_problems(problems: Sequence[str], *, limit: int = 20) -> str:
    """All problems of one input as one message, a line each; past `limit` only their number."""
    lines = list(problems[:limit])
    if len(problems) > limit:
        lines.append(f"... and {len(problems) - limit} more of the same input")
    return "\n".join(lines)
