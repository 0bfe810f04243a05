"""Descriptions of published models that come with trimtab, found by the names that people use for them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from trimtab.ask import UNASKED

UNLISTED = ("demo-1M",)  # what `trimtab.demo` writes, found by its configuration
_HARMLESS = re.compile(
    rf"{UNASKED.pattern}|architectures|notes|\w+_token_(id|ids|index)|rope_\w+|max_position_embeddings|use_cache"
    r"|initializer_\w+|\w*dropout|drop_path_rate|return_dict|output_\w+|problem_type|id2label|label2id"
    r"|is_encoder_decoder|chunk_size_feed_forward|(min|max)_dynamic_patch|dynamic_image_size|use_thumbnail|ps_version"
    r"|template|router_aux_loss_coef|tokens_per_second|image_seq_length|(layer_norm|rms_norm)_eps"
)
"""Fields that change no layer: of text, of training, of how images are cut."""
_ENDINGS = re.compile(r"[-_](instruct|it|hf|chat|thinking|pt|base|bf16)$", re.IGNORECASE)


@cache
def shipped_models() -> tuple[str, ...]:
    """Names that `describe` knows without a file."""
    return tuple(sorted(name for name in _lines() if name not in UNLISTED))


def find_shipped(name: str) -> str | None:
    """The shipped name that `name` stands for: with or without a hub's prefix, an -Instruct, and in any case.

    >>> from trimtab.models.shipped import find_shipped
    >>> find_shipped("Qwen/Qwen2.5-VL-7B-Instruct"), find_shipped("qwen2.5-vl-7b"), find_shipped("Qwen2.5-VL-8B")
    ('Qwen2.5-VL-7B', 'Qwen2.5-VL-7B', None)
    """
    if name in shipped_models():
        return name
    own = name.rstrip("/").rpartition("/")[2]
    while True:
        found = _by_spelling().get(_spelling(own))
        if found is not None:
            return found
        shorter = _ENDINGS.sub("", own)
        if shorter == own:
            return None
        own = shorter


def suggest_shipped(name: str) -> str:
    """ " did you mean NAME", for a name that is not known; empty where none is near."""
    own = _spelling(_ENDINGS.sub("", name.rpartition("/")[2]))
    near = difflib.get_close_matches(own, list(_by_spelling()), n=1, cutoff=0.75)
    return f" (did you mean {_by_spelling()[near[0]]}?)" if near else ""


def read_shipped(name: str) -> Mapping[str, Any]:
    """Return a shipped description, its published configuration under `config`."""
    data: Mapping[str, Any] = json.loads(_lines()[name])
    return data


# -- configurations that say the same ---------------------------------------------------------------------------------


def find_same(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the shipped description whose configuration says, field by field, what `config` says; None without one.

    Its `config` holds the fields as they were published, `assumed` what the model's class makes of those that may be
    left out. Fields that the class does not have, and those of `_HARMLESS`, change no layer.
    """
    said, kind = flat_fields(config), json.dumps(config.get("model_type"))
    for line in _lines().values():
        if f'"model_type":{kind}' not in line:
            continue
        shipped = json.loads(line)
        if _says_the_same(said, flat_fields(shipped["config"]), shipped["assumed"]):
            return shipped  # type: ignore[no-any-return]
    return None


def fill_silent(config: Mapping[str, Any], shipped: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `config` with the fields of `shipped`, which says the same, where it is silent."""
    return _over(config, _over(shipped["config"], nested_fields(shipped["assumed"])))


def _over(upper: Mapping[str, Any], lower: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        k: _over(v, lower[k]) for k, v in upper.items() if isinstance(v, Mapping) and isinstance(lower.get(k), Mapping)
    }
    return {**lower, **upper, **inner}


def nested_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields by dotted name as sections of sections."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        section = found
        *sections, key = name.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section[key] = value
    return found


def flat_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every field that may change a layer, by its dotted name; text fields at the top go with `text_config`."""
    found = dict(_leaves(config, ""))
    for section in {name.rpartition(".")[0] for name in found}:
        prefix = f"{section}." if section else ""
        if found.get(f"{prefix}use_sliding_window") is False:  # then nothing reads them
            for name in ("sliding_window", "max_window_layers"):
                found.pop(prefix + name, None)
        if section and found.get(f"{prefix}model_type", ...) == config.get("model_type"):  # in older files
            del found[f"{prefix}model_type"]
    return found


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if _HARMLESS.fullmatch(str(name)):
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def _says_the_same(said: Mapping[str, Any], published: Mapping[str, Any], assumed: Mapping[str, Any]) -> bool:
    if not any(name.startswith("text_config.") for name in said):  # files older than that section
        inner = {name for name in (*published, *assumed) if name.startswith("text_config.")}
        outer = {name for name in (*published, *assumed) if "." not in name}
        said = {f"text_config.{k}" if k not in outer and f"text_config.{k}" in inner else k: v for k, v in said.items()}
    if any(name not in said and name not in assumed for name in published):
        return False
    known = {**assumed, **published}
    return all(value in (known[name], assumed.get(name, known[name])) for name, value in said.items() if name in known)


@cache
def _lines() -> Mapping[str, str]:
    """The descriptions by name, as JSON: one file, because files compressed one by one took a tenth of a megabyte."""
    text = resources.files("trimtab.models").joinpath("zoo", "models.jsonl").read_text(encoding="utf-8")
    return MappingProxyType(dict(line.split("\t", 1) for line in text.splitlines()))


def _spelling(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


@cache
def _by_spelling() -> Mapping[str, str]:
    names = json.loads(resources.files("trimtab.models").joinpath("zoo", "names.json").read_bytes())
    also = {_spelling(other): name for name, others in names.items() for other in others}
    return MappingProxyType({**also, **{_spelling(name): name for name in shipped_models()}})
