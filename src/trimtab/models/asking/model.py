"""A model of Transformers' conventions, built on the meta device -> its description."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from trimtab.ask import UNASKED
from trimtab.errors import ConfigError, TrimtabError, UnknownModelError, quote
from trimtab.models.asking.batches import Batches
from trimtab.models.asking.forward import ForwardWatch, Pass, make_weightless
from trimtab.models.asking.inputs import find_encoder, image_calls, quietly, text_calls
from trimtab.models.asking.layers import Passes, describe_units, extra_bytes, first_block, seen_cache, with_extras
from trimtab.models.asking.units import Unit, find_cuts, find_head, forward_order, split_units
from trimtab.models.description import description_bytes
from trimtab.models.families import REMOTE
from trimtab.models.images.rules import UnsettledRule
from trimtab.specs import LayerSpec, ModelSpec

# -- Transformers' own configuration and model: no weights, no network, no code of a folder ---------------------------


_AUTOS = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM")  # the last: text alone
_DEPTH = re.compile(r"layers$|depth|^n_layer")
MAX_LAYERS = 4096  # of a tower
MAX_PARAMS = 10**14  # the largest published models have 10**12


def complete(fields: Mapping[str, object]) -> Any:
    """The configuration that Transformers makes of `fields`, with its class defaults where they are silent."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        cure = (
            "if you trust its own code, `trimtab describe MODEL --run-its-code`"
            if "auto_map" in fields
            else "correct `model_type`, or update Transformers"
        )
        raise UnknownModelError(
            f"Transformers {transformers.__version__} has no model_type {quote(model_type)}: {cure}"
        )
    known = {key: value for key, value in _without_code(fields).items() if key != "model_type"}
    return configured(fields, lambda: transformers.AutoConfig.for_model(model_type, **known))


def configured(fields: Mapping[str, object], make: Callable[[], Any]) -> Any:
    """Return what `make` makes of `fields`, refused in one sentence where they are deep or the library raises."""
    _check_depth(fields, "")
    what_not = f"makes no configuration of this config.json of {fields.get('model_type')}"
    with library_reads(what_not, "correct that field"):
        return make()


@contextmanager
def library_reads(what_not: str, cure: str) -> Iterator[None]:
    """Refuse in one sentence whatever Transformers raises on a stranger's files.

    It checks types and values with exceptions of every class.
    """
    try:
        yield
    except TrimtabError:
        raise
    except Exception as error:
        version = transformers.__version__
        raise ConfigError(f"Transformers {version} {what_not} ({one_line(error)}): {cure}") from error


def build(config: Any, *, dtype: torch.dtype = torch.bfloat16, attention: str | None = None) -> Any:
    """The image-text model of a configuration, or its text model, on the meta device, in evaluation mode.

    attention: as Transformers names it; eager where the model has no code for it.
    """
    autos = [getattr(transformers, name, None) for name in _AUTOS]
    kinds = type(config).__mro__[:2]  # a published format is a kind of Transformers' own
    known = [x._model_mapping[kind] for x in autos if x is not None for kind in kinds if kind in x._model_mapping]
    if not known:
        raise UnknownModelError(
            f"Transformers has no model of {quote(config.model_type)} that writes text: give another"
        )
    what_not = f"builds no model of this config.json of {config.model_type}"
    with library_reads(what_not, "correct or add what it asks for"), torch.device("meta"):
        return _from_config(known[0], config, dtype, attention).eval()


def _from_config(kind: Any, config: Any, dtype: torch.dtype, attention: str | None) -> Any:
    try:
        return kind._from_config(config, dtype=dtype, attn_implementation=attention)
    except (ValueError, ImportError) as error:
        if attention is None or "attention implementation" not in str(error):
            raise
        return kind._from_config(config, dtype=dtype, attn_implementation="eager")


def check_size(module: Any) -> None:
    """Refuses what no machine holds: sizes in a hostile or mistyped file."""
    total = sum(parameter.numel() for parameter in module.parameters())
    if total > MAX_PARAMS:
        raise ConfigError(f"the configuration has {total:.1e} parameters, above {MAX_PARAMS:.0e}: correct its sizes")


def _check_depth(section: Mapping[str, Any], path: str) -> None:
    """Refuse a mistyped depth: lists of blocks are made one by one, and it would take hours."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            _check_depth(value, f"{path}{key}.")
        elif _DEPTH.search(str(key)) and isinstance(value, int) and value > MAX_LAYERS:
            raise ConfigError(f"{path}{key} is {value}: a tower has at most {MAX_LAYERS} layers: correct it")


def _without_code(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_code(x) for key, x in value.items() if not UNASKED.fullmatch(str(key))}
    return value


def one_line(error: Exception) -> str:
    """Return what a library said, for a sentence of ours."""
    text = "".join(x if x.isprintable() else "?" for x in " ".join(str(error).split())[:200])
    return f"{type(error).__name__}: {text}"


NUM_TOKENS = 512  # of the longer text; chunks of linear attention (64 to 256) divide it and its half
UNSETTLED = (
    "images of this model cannot be counted yet: its layers were asked of Transformers, and no image rule of trimtab "
    "is known for it; give sizes of samples without images, or a model whose `model_type` docs/models.md lists"
)


def describe_model(model: Any, *, name: str | None = None) -> ModelSpec:
    """Use this for a model of your own: it describes what you built, so that every verb can plan it.

    `model` follows Transformers' conventions (blocks in a `ModuleList`, `get_input_embeddings`, ...), built under
    `torch.device("meta")`; it has no weights, and cannot run afterwards. Write the result with
    `trimtab.models.save_description`.

    >>> import torch, transformers
    >>> from trimtab.models.asking.model import describe_model
    >>> config = transformers.AutoConfig.for_model("smolvlm")
    >>> with torch.device("meta"):
    ...     built = transformers.AutoModelForImageTextToText.from_config(config)
    >>> describe_model(built).num_params == sum(p.numel() for p in built.parameters())
    True
    """
    if any(parameter.device.type != "meta" for parameter in model.parameters()):
        raise ConfigError('describing uses the model up: build it under `torch.device("meta")`')
    check_size(model)
    family = str(getattr(model.config, "model_type", type(model).__name__))
    extra = extra_bytes(model)
    with quietly():
        units = split_units(model.to(torch.bfloat16).eval())  # what is kept between the passes is counted in 16 bits
        passes, notes = _run(model, units)
        layers = [replace(x, cache=seen_cache(x, passes)) for x in describe_units(model, units, passes)]
    order, entered = _sort(units, passes)
    layers = with_extras([layers[i] for i in order], extra)
    cuts = find_cuts(model, layers)
    if not entered:
        notes.append("The order of the layers is that of their modules: no forward pass could be made.")
    return ModelSpec(
        name=name or family,
        family=family,
        layers=tuple(layers),
        image_rule=UnsettledRule(reason=UNSETTLED),
        vocab_size=_vocab_size(model),
        tied=_tied(units),
        forbidden_cuts=cuts.forbidden,
        forbidden_cut_reason=cuts.reason,
        joined_cuts=cuts.joined,
        asked_of=(("torch", torch.__version__), ("transformers", transformers.__version__)),
        notes=(
            f"Layers were asked of Transformers {transformers.__version__} with torch {torch.__version__}.",
            *notes,
            *_work_notes(layers),
        ),
    )


def describe_fields(fields: Mapping[str, object]) -> ModelSpec:
    """Describe what Transformers builds of a config.json's fields; `complete` and `build` say what it refuses."""
    if fields.get("model_type") == REMOTE:
        return _describe_chat(fields)
    with quietly():
        model = build(complete(fields))
    return describe_model(model)


def _describe_chat(fields: Mapping[str, object]) -> ModelSpec:
    """Return InternVL under the names of its published code, which never runs its vision blocks apart."""
    # needs Transformers 5, which a trainer that only packs may lack
    from trimtab.models.asking.internvl_chat import as_published, chat_config, published_name

    with quietly():
        config = configured(fields, lambda: chat_config(fields))
        model = build(config)
    found = describe_model(model)
    layers = [as_published(layer, config) for layer in found.layers]
    first_of_text = next(i for i, x in enumerate(layers) if x.tower == "language")
    return replace(
        found,
        name=REMOTE,
        family=REMOTE,
        layers=tuple(layers),
        tied=tuple((published_name(a, config), published_name(b, config)) for a, b in found.tied),
        joined_cuts=frozenset(range(1, first_of_text)),
    )


def described(fields: Mapping[str, object]) -> dict[str, Any]:
    """The content of a description file; its `config` has the class defaults where the fields were silent."""
    written = fields
    if fields.get("model_type") != REMOTE:
        with quietly():
            written = json.loads(json.dumps(complete(fields).to_dict(), default=str))
    return {**json.loads(description_bytes(describe_fields(fields))), "config": written}


def described_by_its_code(given: Mapping[str, object]) -> dict[str, Any]:
    """The same for the model in `given["folder"]`, by the code that lies there: it runs."""
    how: dict[str, Any] = {"trust_remote_code": True, "local_files_only": True}
    folder = given["folder"]
    with quietly(), library_reads(f"runs the code of {folder} in vain", "correct it, or install what it asks for"):
        config = transformers.AutoConfig.from_pretrained(folder, **how)
        _check_depth(config.to_dict(), "")
        named = config.auto_map
        auto = next((x for x in (*_AUTOS, "AutoModel") if x in named and hasattr(transformers, x)), None)
        if auto is None:
            raise ConfigError(f"auto_map of {folder} names no model ({', '.join(named)}): add AutoModelForCausalLM")
        with torch.device("meta"):
            model = getattr(transformers, auto).from_config(config, trust_remote_code=True).eval()
        found = describe_model(model)
    note = f"Layers are those of the model's own code, which ran in {folder}."
    written = json.loads(json.dumps(config.to_dict(), default=str))
    return {**json.loads(description_bytes(replace(found, notes=(note, *found.notes[1:])))), "config": written}


# -- running --------------------------------------------------------------------------------------------------------


def _run(model: Any, units: list[Unit]) -> tuple[Passes, list[str]]:
    """Return passes of two texts and one image, and sentences on those that cannot be made."""
    notes: list[str] = []
    make_weightless(model)
    watch = ForwardWatch(units)
    long, short, image = None, None, None
    for target in (model, model.get_decoder()):
        long = _first(watch, target, text_calls(model, NUM_TOKENS))
        short = _first(watch, target, text_calls(model, NUM_TOKENS // 2))
        if long is not None and short is not None:
            break
    else:
        long = short = None
        notes.append("Its decoder cannot be run without an image: work of its blocks is taken from their matrices.")
    cached = [_first(watch, target, _cached(text_calls(model, n))) for n in (NUM_TOKENS // 2, NUM_TOKENS)]
    encode = find_encoder(model)
    if encode is not None:
        image = _first(watch, encode, image_calls(model, units, encode))
        if "features" not in getattr(encode, "__name__", ""):  # the tower alone: what comes after it runs with text
            image = _first(watch, model, _with_text(model, units)) or image
    block = first_block(units, "vision")
    seen = None if image is None or block is None else image.ran.get(block.path)
    num_patches = 0 if seen is None else seen.rows_in
    if not num_patches and any(x.tower in ("vision", "projector") for x in units):
        notes.append(
            "No image could be passed through its tower: each of its layers is described as seeing every patch."
        )
    return (
        Passes(
            short=short,
            long=long,
            num_short=NUM_TOKENS // 2,
            num_long=NUM_TOKENS,
            image=image if num_patches else None,
            num_patches=num_patches,
            short_cached=cached[0],
            long_cached=cached[1],
        ),
        notes,
    )


def _with_text(model: Any, units: list[Unit]) -> Iterator[dict[str, Any]]:
    try:
        batch = Batches(model, units, packed=False).make(1, 16)
    except UnknownModelError:  # it takes none
        return
    if batch.has_images:
        yield batch.inputs


def _cached(calls: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return ({**given, "use_cache": True} for given in calls)


def _first(watch: ForwardWatch, target: Any, calls: Iterable[dict[str, Any]]) -> Pass | None:
    """The pass of the first call that the model takes: families refuse what is not their convention.

    None at once where the code reads values that are not there, as loops over chosen experts do.
    """
    for given in calls:
        try:
            return watch.run(functools.partial(target, **given))
        except (DynamicOutputShapeException, DataDependentOutputException):
            return None
        except Exception:  # noqa: S112 - of any class that the model's own code likes
            continue
    return None


# -- putting together -----------------------------------------------------------------------------------------------


def _sort(units: list[Unit], passes: Passes) -> tuple[list[int], bool]:
    """Return the positions in forward order, and whether any unit was entered."""
    times: dict[str, float] = {}
    for one in (passes.image, passes.long):
        if one is not None:
            for path in one.ran:
                times.setdefault(path, len(times))
    return forward_order(units, times), bool(times)


def _tied(units: list[Unit]) -> tuple[tuple[str, str], ...]:
    """Return (owner, borrower) of every weight that several units read; its owner is the first in module order."""
    owner: dict[int, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for unit in units:
        for parameter in unit.parameters.values():
            first = owner.setdefault(id(parameter), unit.path)
            pairs.update({} if first == unit.path else {(first, unit.path): None})
    return tuple(pairs)


def _vocab_size(model: Any) -> int:
    head = find_head(model)
    if head is not None and getattr(head, "weight", None) is not None:
        return int(head.weight.shape[0])
    return int(getattr(model.config.get_text_config(), "vocab_size", 1))


def _work_notes(layers: list[LayerSpec]) -> list[str]:
    notes = []
    counted = [x for x in layers if x.measured is not None and x.measured.forward_flops and x.tower != "audio"]
    if counted:
        notes.append(
            f"Work of {len(counted)} layers, {counted[0].name} the first, was counted on Transformers' own code: its "
            "matrix products, not its elementwise scans."
        )
    unknown = [x for x in layers if x.measured is not None and not x.measured.forward_flops]
    if unknown:
        notes.append(f"Work of {len(unknown)} layers, {unknown[0].name} the first, is not known: they have no price.")
    unread = [x for x in layers if x.unread]
    if unread:
        notes.append(
            f"{len(unread)} vision layers, {unread[0].name} the first, are computed, and nothing reads them: they cost "
            "forward time alone."
        )
    if any(x.tower == "audio" for x in layers):
        notes.append("Its audio tower is counted only with its weights: samples hold images and text.")
    return notes
