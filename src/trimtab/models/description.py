"""A description as a file: what `describe` found, as JSON that every machine reads without torch."""

import difflib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trimtab.ask import UNASKED
from trimtab.errors import ConfigError, join_problems, quote
from trimtab.files import write_atomically
from trimtab.models.images.asked import AskedClips, AskedImages
from trimtab.models.images.rules import (
    MAX_TILES,
    AnyRes,
    DynamicTiling,
    FixedImage,
    GlmSmartResize,
    PaddedTiles,
    PanAndScan,
    SmartResize,
    UnsettledRule,
)
from trimtab.specs import NUM_WORK_TERMS, AttentionSpec, ImageMarkup, ImageRule, LayerSpec, MlpSpec, ModelSpec
from trimtab.typed_json import read_typed

# -- what must hold between the figures of one layer, for the cost formulas -------------------------------------------


def attention_weights(a: AttentionSpec, hidden_size: int) -> int:
    """Count the weights of q, k, v and the output over rows of one width."""
    rows = a.num_heads * a.head_dim + a.num_kv_heads * (a.head_dim + a.value_head_dim)
    return hidden_size * (rows + a.num_heads * a.value_head_dim)


def mlp_weights(m: MlpSpec, hidden_size: int) -> int:
    """Count the weights that each row meets: of experts those that run, and their router."""
    matrices = 3 if m.gated else 2
    if m.num_experts is None:
        return matrices * hidden_size * m.intermediate_size
    active = (m.experts_per_token or 1) * m.intermediate_size + m.shared_intermediate_size
    return hidden_size * (matrices * active + m.num_experts)


def find_layer_problems(layer: LayerSpec) -> list[str]:
    """Return sentences on one layer that came from outside; none for what families and asked models make."""
    problems = []
    measured, m = layer.measured, layer.mlp
    if not layer.name or len(layer.name) > 400:
        problems.append("layers: a name has 1 to 400 characters")
    if measured is not None and {len(measured.forward_flops), len(measured.kept_bytes)} not in ({0}, {NUM_WORK_TERMS}):
        problems.append(f"{layer.name}: measured work has {NUM_WORK_TERMS} coefficients, or none")
    if m is not None and (m.experts_per_token or 1) > (m.num_experts or 1):
        problems.append(f"{layer.name}: experts_per_token is more than num_experts")
    if layer.kind in ("head", "projector") and not layer.num_matmul_params and measured is None:
        problems.append(f"{layer.name}: a {layer.kind} multiplies its rows, so num_matmul_params is above 0")
    explained = 0 if layer.attention is None else attention_weights(layer.attention, layer.hidden_size)
    explained += 0 if m is None else mlp_weights(m, layer.hidden_size)
    if layer.kind == "block" and measured is None and explained > 1.001 * layer.num_matmul_params:
        problems.append(
            f"{layer.name}: num_matmul_params {layer.num_matmul_params} is less than attention and mlp, {explained}"
        )
    return problems


VERSION = "trimtab-description 1.0"
MAX_BYTES = 2**20  # as of a config.json
MAX_LAYERS = 3 * 4096  # of three towers
RULES: Mapping[str, type] = MappingProxyType(
    {
        rule.__name__: rule
        for rule in (
            *(AnyRes, AskedImages, DynamicTiling, FixedImage, GlmSmartResize, PaddedTiles, PanAndScan),
            *(SmartResize, UnsettledRule),
        )
    }
)
"""Image rules that a file may name: a class and its settings, nothing that runs."""

_CARRIED = ("config", "assumed", "sources")  # of a shipped one and of an answer
_RULES_AND_LAYERS = ("image_rule", "clip_rule", "layers")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptionFile:
    """What a description file holds, layers and image rule aside."""

    name: str
    family: str
    vocab_size: int
    image_markup: ImageMarkup | None = None
    tied: tuple[tuple[str, str], ...] = ()
    max_positions: int | None = None
    stored_as: str | None = None
    forbidden_cuts: tuple[tuple[int, int], ...] = ()  # first and last of each run
    forbidden_cut_reason: str | None = None
    joined_cuts: tuple[tuple[int, int], ...] | None = None  # as forbidden_cuts
    config_blake2b: str = ""
    notes: tuple[str, ...] = ()
    asked_of: tuple[tuple[str, str], ...] = ()


def description_bytes(model: ModelSpec) -> bytes:
    """Return `model` as a description file: same model, same bytes.

    Layers in a row that differ only in one number of their name are written once, with `num_alike`.
    """
    rule = type(model.image_rule).__name__
    if RULES.get(rule) is not type(model.image_rule):
        raise ConfigError(f"{model.name}'s image rule {quote(rule)} is in no file: use one of {', '.join(RULES)}")
    written = {
        **{f.name: getattr(model, f.name) for f in fields(DescriptionFile)},
        "description_version": VERSION,
        "forbidden_cuts": runs_of(model.forbidden_cuts),
        "joined_cuts": None if model.joined_cuts is None else runs_of(model.joined_cuts),
        "image_markup": None if model.image_markup is None else asdict(model.image_markup),
        "image_rule": {"kind": rule, "settings": _settings(model.image_rule)},
        "clip_rule": {"question": model.clip_rule.question} if isinstance(model.clip_rule, AskedClips) else None,
        "layers": _write_layers(model.layers),
    }
    content = (json.dumps(written, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()
    if len(content) > MAX_BYTES:
        raise ConfigError(f"the description of {model.name} takes more than {MAX_BYTES} bytes: use its config.json")
    return content


def save_description(model: ModelSpec, path: str | Path) -> None:
    """Writes `model` as a file that every verb takes in place of a model.

    Use it for machines without torch, and for models of your own (`describe_model`).

    >>> import tempfile, pathlib
    >>> from trimtab.models.describe import describe
    >>> from trimtab.models.description import save_description
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.json"
    >>> save_description(describe("Qwen2.5-VL-7B"), path)
    >>> describe(path) == describe("Qwen2.5-VL-7B")
    True
    """
    write_atomically(Path(path), description_bytes(model))


def read_description(data: Mapping[str, Any], *, source: str) -> ModelSpec:
    """The model of a parsed description file; every missing, unknown or ill field is named in one `ConfigError`."""
    if data.get("description_version") != VERSION:
        raise ConfigError(
            f"{source} has description_version {quote(data.get('description_version'))}, not {VERSION!r}: write it "
            "again with `trimtab describe MODEL --out`"
        )
    problems: list[str] = []
    plain = {k: v for k, v in data.items() if k not in ("description_version", *_CARRIED, *_RULES_AND_LAYERS)}
    head = read_typed(DescriptionFile, plain, "", problems, read_number=_read_number)
    rule = _read_rule(data.get("image_rule"), "image_rule", problems)
    clips = data.get("clip_rule")
    if clips is not None:
        question = clips.get("question") if isinstance(clips, dict) else None
        clips = AskedClips(question=question) if isinstance(question, str) else None
        if clips is None:
            problems.append("clip_rule: expected an object with a text `question`")
    layers = _read_layers(data.get("layers"), problems)
    if not problems:
        problems += [x for layer in layers for x in find_layer_problems(layer)]
        problems += _find_misfits(head, layers)
    if problems:
        raise ConfigError(
            f"{source} is no description, write it again with `trimtab describe MODEL --out`:\n"
            + join_problems(problems)
        )
    kept = {f.name: getattr(head, f.name) for f in fields(DescriptionFile) if not f.name.endswith("_cuts")}
    return ModelSpec(
        **kept,
        layers=tuple(layers),
        image_rule=rule,
        clip_rule=clips,
        forbidden_cuts=_numbers(head.forbidden_cuts),
        joined_cuts=None if head.joined_cuts is None else _numbers(head.joined_cuts),
    )


# -- writing --------------------------------------------------------------------------------------------------------


def runs_of(numbers: Collection[int]) -> list[tuple[int, int]]:
    """Return first and last of each run: 2 3 4 7 -> (2, 4), (7, 7)."""
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    return list(zip(starts, sorted(n for n in numbers if n + 1 not in numbers), strict=True))


def _numbers(runs: Sequence[tuple[int, int]]) -> frozenset[int]:
    return frozenset(cut for first, last in runs for cut in range(first, last + 1))


def _settings(rule: ImageRule) -> dict[str, Any]:
    return {f.name: getattr(rule, f.name) for f in fields(rule) if f.init}  # type: ignore[arg-type]


def _write_layers(layers: Sequence[LayerSpec]) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    first, count = layers[0], 0
    for layer in layers:
        if written and layer == replace(first, name=_name_after(first.name, count) or ""):
            count += 1
            written[-1]["num_alike"] = count
        else:
            first, count = layer, 1
            written.append(_without_defaults(asdict(layer), layer))
    return written


def _without_defaults(values: dict[str, Any], made: Any) -> dict[str, Any]:
    kept = {}
    for f in fields(made):
        value, part = values[f.name], getattr(made, f.name)
        if f.default is MISSING or part != f.default:
            kept[f.name] = _without_defaults(value, part) if isinstance(value, dict) else value
    return kept


def _name_after(name: str, steps: int) -> str | None:
    """The name with its last number, which is a part between dots, larger by `steps`; None without one."""
    parts = name.split(".")
    for i in range(len(parts) - 1, -1, -1):
        if _NUMBER.fullmatch(parts[i]):
            return ".".join([*parts[:i], str(int(parts[i]) + steps), *parts[i + 1 :]])
    return None


# -- reading --------------------------------------------------------------------------------------------------------


def read_layers(value: Any) -> list[LayerSpec]:
    """Return the layers of the list that a description file holds under `layers`."""
    problems: list[str] = []
    layers = _read_layers(value, problems)
    if problems:
        raise ConfigError(join_problems(problems))
    return layers


def _read_layers(value: Any, problems: list[str]) -> list[LayerSpec]:
    if not isinstance(value, list) or not value:
        problems.append("layers: expected a list of layers")
        return []
    layers: list[LayerSpec] = []
    for i, entry in enumerate(value):
        if not isinstance(entry, dict):
            problems.append(f"layers.{i}: expected an object")
            continue
        count = entry.get("num_alike", 1)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_LAYERS - len(layers):
            problems.append(f"layers.{i}.num_alike: expected a whole number from 1, and {MAX_LAYERS} layers in all")
            return []
        plain = {k: v for k, v in entry.items() if k != "num_alike"}
        first = read_typed(LayerSpec, plain, f"layers.{i}.", problems, read_number=_read_number)
        if first is None:
            continue
        names = [first.name, *(_name_after(first.name, n) for n in range(1, count))]
        if None in names:
            problems.append(f"layers.{i}.name: {quote(first.name)} has no number that {count} layers could count on")
            continue
        layers += [replace(first, name=name) for name in names]
    return layers


def _read_rule(value: Any, where: str, problems: list[str]) -> Any:
    stand_in = UnsettledRule(reason="")
    if not isinstance(value, dict) or set(value) != {"kind", "settings"}:
        problems.append(f"{where}: expected an object with `kind` and `settings`")
        return stand_in
    kind = RULES.get(value["kind"]) if isinstance(value["kind"], str) else None
    if kind is None:
        problems.append(f"{where}.kind: {quote(value['kind'])} is none of {', '.join(RULES)}")
        return stand_in
    try:
        rule = read_typed(kind, value["settings"], f"{where}.settings.", problems, read_number=_read_number)
    except ArithmeticError as error:
        problems.append(f"{where}.settings: {error}")
        return stand_in
    return stand_in if rule is None else rule


_MAY_BE_ZERO = frozenset(
    (
        *("num_params", "num_matmul_params", "num_norms", "shared_intermediate_size", "rows_per_input"),
        *("rows_out_per_input", "extra_rows", "extra_bytes"),
    )
)
_FEW = re.compile(r"tiles|slices|crops|patch_size|merge_size|temporal|grid_size")


def _read_number(place: str, kind: Any, value: Any, problems: list[str]) -> Any:
    """Read a number: sizes are whole and above 0, coefficients finite and not negative."""
    name = place.rpartition(".")[2]
    least = 0 if kind is float or name in _MAY_BE_ZERO else 1
    most = 2.0**100 if kind is float else (MAX_TILES if _FEW.search(name) else 2**62)
    if not least <= value <= most or (kind is float and not math.isfinite(value)):
        problems.append(f"{place}: expected a number from {least} to {most:g}, found {str(value)[:40]}")
        return value
    return float(value) if kind is float else value


def _find_misfits(head: DescriptionFile, layers: Sequence[LayerSpec]) -> list[str]:
    """Return the names and cuts that do not belong to the layers."""
    names = {x.name for x in layers}
    problems = [] if len(names) == len(layers) else ["layers: names repeat"]
    for name in ("forbidden_cuts", "joined_cuts"):
        for first, last in getattr(head, name) or ():
            if not first <= last < len(layers):
                problems.append(f"{name}: {first} to {last} lies outside the {len(layers)} layers")
    for pair in head.tied:
        problems += [f"tied: {quote(x)} is no layer" for x in pair if x not in names]
    return problems


# -- shipped descriptions ---------------------------------------------------------------------------------------------


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
    """Return the names that `describe` knows without a file."""
    return tuple(sorted(name for name in _lines() if name not in UNLISTED))


def find_shipped(name: str) -> str | None:
    """The shipped name that `name` stands for: with or without a hub's prefix, an -Instruct, and in any case.

    >>> from trimtab.models.description import find_shipped
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
    """Return " did you mean NAME" for a name that is not known; empty where none is near."""
    own = _spelling(_ENDINGS.sub("", name.rpartition("/")[2]))
    near = difflib.get_close_matches(own, list(_by_spelling()), n=1, cutoff=0.75)
    return f" (did you mean {_by_spelling()[near[0]]}?)" if near else ""


def read_shipped(name: str) -> Mapping[str, Any]:
    """Return a shipped description, its published configuration under `config`."""
    return _unfolded(_lines()[name])


def _unfolded(line: str) -> Mapping[str, Any]:
    """Read a line, in which a layer may be the differences from an earlier one: `like` it, but for keys `without`."""
    data: dict[str, Any] = json.loads(line)
    layers: list[dict[str, Any]] = []
    for layer in data["layers"]:
        base = layers[layer.pop("like")] if "like" in layer else {}
        gone = layer.pop("without", ())
        layers.append({**{key: value for key, value in base.items() if key not in gone}, **layer})
    return {**data, "layers": layers}


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
        shipped = _unfolded(line)
        if _says_the_same(said, flat_fields(shipped["config"]), shipped["assumed"]):
            return shipped
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
