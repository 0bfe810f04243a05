"""config.json -> ModelSpec: layers in forward order with their parameters, image rule, tied weights, forbidden cuts."""

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.ask import INSTALL, ask_own_code, is_installed
from trimtab.ask import ask as ask_transformers
from trimtab.errors import ConfigError, ImageError, TrimtabError, UnknownModelError, quote
from trimtab.files import read_small
from trimtab.models.description import (
    fill_silent,
    find_same,
    find_shipped,
    read_description,
    read_shipped,
    shipped_models,
    suggest_shipped,
)
from trimtab.models.families import FAMILIES, Fields, LackingFileError, family_of
from trimtab.models.images.asked import AskedImages, ask_clips, ask_images, clip_rule_of
from trimtab.models.images.rules import FixedImage, UnsettledRule, with_limits
from trimtab.options import VideoOptions
from trimtab.specs import ImageMarkup, ImageRule, ModelOrigin, ModelSpec
from trimtab.typed_json import parse_json

MAX_HEADER_BYTES = 2**25  # of one safetensors file; those of the largest shards take 1 MiB


def stored_format(quantised: object) -> str:
    """Return the name of the format that `quantization_config` describes, as `trimtab map --quant` has it.

    A method without a formula keeps its own name, which is refused where bytes are counted.
    """
    if not isinstance(quantised, Mapping):
        raise ConfigError(f"quantization_config is {quote(quantised)}: a JSON object is needed, or none")
    is_bitsandbytes = any(name in quantised for name in ("load_in_4bit", "load_in_8bit"))
    method = str(quantised.get("quant_method", "bitsandbytes" if is_bitsandbytes else "unknown"))
    if method == "bitsandbytes":
        if quantised.get("load_in_8bit"):
            return "bnb-int8"
        return "bnb-nf4-double" if quantised.get("bnb_4bit_use_double_quant") else "bnb-nf4"
    if method == "modelopt" and quantised.get("quant_algo") == "FP8":
        return "fp8"
    if method == "compressed-tensors":
        return _compressed_format(quantised)
    bits = quantised.get("bits", quantised.get("w_bit", 4))
    if method in ("awq", "gptq") and bits == 4:
        return "awq"
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    return f"{method}-{bits}" if method in ("awq", "gptq") else method


def _compressed_format(quantised: Mapping[str, Any]) -> str:
    """Return the format of weights that all groups share; towers that `ignore` does not list are taken as listed."""
    groups = quantised.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    kinds = {(x.get("type"), x.get("num_bits")) for x in weights if isinstance(x, Mapping)}
    known: dict[tuple[Any, Any], str] = {("float", 8): "fp8", ("int", 4): "awq"}
    return known.get(kinds.pop(), "compressed-tensors") if len(kinds) == 1 else "compressed-tensors"


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names of the tensors in the folder's safetensors files; none where they are not there or torn."""
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            return frozenset(json.loads(index.read_bytes())["weight_map"])
        with (folder / "model.safetensors").open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return frozenset(json.loads(file.read(size))) if size <= MAX_HEADER_BYTES else frozenset()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return frozenset()


# -- image rules: the formula of a family, or what the processor answers ----------------------------------------------


NO_FILES = (
    "images of this model cannot be counted: the files of its processor were not given: put preprocessor_config.json "
    "or processor_config.json next to config.json, or pass --set preprocessor=FILE"
)
TEXT_ONLY = "this is a text model, which reads no images: leave samples with images out, or name the whole model"


def image_rule(config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> ImageRule:
    """The rule of a model, from its config.json and, where that does not settle it, its preprocessor_config.json.

    Use its `count(width, height)` to know the patches and tokens of an image from nothing but its size in pixels.

    Nothing is filled from a class default: a setting given nowhere, or two that contradict each other, raise a
    `ConfigError`. Two switches follow the processor instead of the file: InternVL's, Gemma's.

    >>> pixels = {"min_pixels": 3136, "max_pixels": 12845056}
    >>> rule = image_rule({"model_type": "qwen2_vl"}, {"patch_size": 14, "merge_size": 2, **pixels})
    >>> rule.count(448, 448).tokens
    256
    """
    build = family_of(config.get("model_type")).image_rule
    if build is None:
        names = ", ".join(name for name, family in FAMILIES.items() if family.image_rule is not None)
        raise UnknownModelError(f"model_type {quote(config.get('model_type'))} has no image rule: take one of {names}")
    return build(Fields(config, preprocessor))


def image_rule_or_reason(config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> ImageRule:
    """Return `image_rule`, or an `UnsettledRule` where only preprocessor_config.json is missing."""
    try:
        return image_rule(config, preprocessor)
    except LackingFileError as error:
        return UnsettledRule(reason=str(error))


def image_rule_by_processor(
    config: Mapping[str, object], files: Mapping[str, Mapping[str, Any]], settings: Mapping[str, object] | None
) -> tuple[ImageRule, ImageMarkup | None]:
    """Ask what Transformers' processor does to images; `files`: its own by name, `settings`: of the image processor.

    A family whose formula and text of an image are both declared is not asked about, unless processor_config.json
    counts by other numbers than the model has. Of another, a formula of any family here is taken where it reads these
    files and equals the processor on every size of `asked.STANDARD`: it needs no Transformers afterwards.
    """
    family = family_of(config.get("model_type"))
    own: ImageRule = UnsettledRule(reason=NO_FILES)
    if family.image_rule is not None:
        try:
            own = image_rule_or_reason(config, settings)
        except ConfigError as error:
            own = UnsettledRule(reason=str(error))
    is_settled = not isinstance(own, UnsettledRule) and not _contradict(config, files)
    if not files or (is_settled and family.markup is not None):
        return own, None
    try:
        rule, markup = ask_images(files, config)
    except ConfigError as error:
        return own if is_settled else UnsettledRule(reason=str(error)), None
    return next((x for x in _formulas(config, settings, rule) if _equals(x, rule)), rule), markup


_COUNTED_BY = (
    ("patch_size", "vision_config.patch_size"),
    ("vision_feature_select_strategy", "vision_feature_select_strategy"),
)
"""What a processor of LLaVA's kind counts tokens by, and where the model has it."""


def _contradict(config: Mapping[str, object], files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether processor_config.json has another of these than the model."""
    written, own = files.get("processor_config.json", {}), Fields(config)
    values = ((written.get(name), own.raw(of_model)) for name, of_model in _COUNTED_BY)
    return any(None not in (one, other) and one != other for one, other in values)


def _formulas(
    config: Mapping[str, object], settings: Mapping[str, object] | None, asked: AskedImages
) -> Iterator[ImageRule]:
    """Yield the rules that these files may mean."""
    if asked.table:
        _, _, patches, tokens, tiles, *_ = asked.table[0]
        if tiles == 1:
            yield FixedImage(rows=patches, tokens=tokens)
    for build in dict.fromkeys(family.image_rule for family in FAMILIES.values() if family.image_rule is not None):
        with contextlib.suppress(ConfigError):  # it lacks what that family reads
            yield build(Fields(config, settings))


def _equals(rule: ImageRule, asked: AskedImages) -> bool:
    """Return whether both agree on every standard size; no formula has own texts, or other counts in company."""
    if asked.by_sample or len(asked.texts) > 1:
        return False
    for width, height, *row in asked.table:
        try:
            found = rule.count(width, height)
        except ImageError:
            return False
        if [found.patches, found.tokens, found.tiles, found.patches_sq] != row[:4]:
            return False
    return bool(asked.table)


MAX_CONFIG_BYTES = 2**20  # a config.json has some KiB; what is larger is another file

Config = Mapping[str, object]
Files = Mapping[str, Config]  # by name


def describe(
    source: str | Path | Config,
    *,
    preprocessor: str | Path | Config | None = None,
    name: str | None = None,
    max_pixels: int | None = None,
    max_tiles: int | None = None,
    ask: bool = True,
    run_its_code: bool = False,
) -> ModelSpec:
    """The model that `source` describes: a config.json, a folder or a description file, its content, or a shipped name.

    Call this first: every other function takes the `ModelSpec` that it returns.

    Shipped names, description files, and configurations that say what a shipped one says, field by field, need no
    torch. Every other is put to Transformers where it is installed (`trimtab.ask`), unless `ask` is false.
    `run_its_code`: the folder's own Python code builds the model, in a process without network and with your rights on
    files. Give it only for code that you trust.

    `preprocessor` is the model's preprocessor_config.json (or its content); next to a config.json it is found by
    itself. It is needed where the configuration does not settle how images are cut, and for nothing else:
    without it such a model is described, and the error comes when an image is to be counted.
    `max_pixels` and `max_tiles` are the user's own limits on an image (`images.with_limits`).
    Exact: the parameters of every layer are those of the Transformers model built from the same configuration.

    >>> model = describe("Qwen2.5-VL-7B")
    >>> len(model.layers), model.num_params, model.image_rule.count(1280, 720).tokens
    (65, 8292166656, 1196)
    """
    path, config = _read_source(source)
    settings, files = _read_processor(preprocessor, near=path)
    if run_its_code and (path is None or "description_version" in config):
        raise ConfigError(f"{str(source)[:200]!r} is no folder with code: leave --run-its-code out")
    if "description_version" in config:
        model = _read_described(config, settings, files, source=str(path or "the description"))
    else:
        if run_its_code and path is not None:
            model = _as_answered(ask_own_code(path.parent, config), config, settings, files)
        else:
            model = _describe_config(config, settings, files, may_ask=ask)
        model = replace(
            model,
            name=_default_name(path, config, model.family),
            config_blake2b=_digest(config, settings),
        )
    rule = with_limits(model.image_rule, max_pixels=max_pixels, max_tiles=max_tiles)
    origin = None
    if not isinstance(source, Mapping) and not isinstance(preprocessor, Mapping):
        other = None if preprocessor is None else str(preprocessor)
        origin = ModelOrigin(config=str(source), preprocessor=other, max_pixels=max_pixels, max_tiles=max_tiles)
    model = _as_stored(replace(model, name=name or model.name, image_rule=rule, origin=origin), config, path)
    return replace(model, clip_rule=clip_rule_of(model, VideoOptions()))


def _as_stored(model: ModelSpec, config: Config, path: Path | None) -> ModelSpec:
    """Give `model` what its weights on disk say: their format, and that a head of its own is not tied."""
    if "description_version" in config:
        return model
    model = replace(model, max_positions=find_positions(config))
    if (quantised := config.get("quantization_config")) is not None:
        model = replace(model, stored_as=stored_format(quantised))
    if model.tied and path is not None and path.name == "config.json":
        names = stored_names(path.parent)
        owners = {owner for owner, borrower in model.tied if _stores(names, owner) and _stores(names, borrower)}
        if owners:
            apart = {borrower: owner for owner, borrower in model.tied if owner in owners}
            layers = tuple(
                replace(x, num_params=x.num_params + x.num_matmul_params) if x.name in apart else x
                for x in model.layers
            )
            model = replace(model, layers=layers, tied=tuple(x for x in model.tied if x[1] not in apart))
    return model


def find_positions(config: Config) -> int | None:
    sections = [config, *(x for name in ("text_config", "llm_config") if isinstance(x := config.get(name), Mapping))]
    found = [x for section in sections if type(x := section.get("max_position_embeddings")) is int and x > 0]
    return found[-1] if found else None


def _stores(names: Collection[str], layer: str) -> bool:
    """Return whether a weight of this layer lies in the files, under its own name or an older prefix."""
    last = f"{layer.rpartition('.')[2]}.weight"
    return any(name == last or name.endswith(f".{last}") for name in names)


def _read_described(config: Config, settings: Config | None, files: Files, *, source: str) -> ModelSpec:
    """Read what the file says; where images are cut otherwise (`settings`), with its configuration's rule."""
    model = read_description(config, source=source)
    if settings is None:
        return model
    carried = config.get("config")
    if not isinstance(carried, Mapping):
        raise ConfigError(f"{source} is a description: give --set preprocessor to `trimtab describe MODEL --out`")
    return _with_own_files(model, carried, settings, files)


def _describe_config(config: Config, settings: Config | None, files: Files, *, may_ask: bool) -> ModelSpec:
    """The shipped description of a configuration that says the same, else what Transformers answers."""
    shipped = find_same(config)
    if shipped is not None:
        model = read_description(shipped, source=shipped["name"])
        return _with_own_files(model, fill_silent(config, shipped), settings, files)
    model_type = config.get("model_type")
    if may_ask and isinstance(model_type, str) and is_installed():
        return _asked(config, settings, files)
    raise UnknownModelError(
        f"model_type {quote(model_type)} is no shipped model: correct config.json, {INSTALL}, or give a description"
    )


def _with_own_files(model: ModelSpec, config: Config, settings: Config | None, files: Files) -> ModelSpec:
    """Return `model` with images and videos counted as these files say; without files, as those of the model do."""
    markup = model.image_markup
    if family_of(config.get("model_type")).image_rule is not None:
        rule = image_rule_or_reason(config, settings)
    elif files:
        rule, markup = image_rule_by_processor(config, files, settings)
    else:
        return model
    if settings is None and isinstance(rule, UnsettledRule):
        return model
    return replace(
        model,
        image_rule=rule,
        image_markup=markup,
        clip_rule=ask_clips(config, files),
        config_blake2b=_digest(config, settings),
    )


def _asked(config: Config, settings: Config | None, files: Files) -> ModelSpec:
    """The description that Transformers gives, with the image rule of its processor."""
    return _as_answered(ask_transformers(config, "describe"), config, settings, files)


def _as_answered(answer: Mapping[str, Any], config: Config, settings: Config | None, files: Files) -> ModelSpec:
    model = read_description(answer, source=f"the answer on model_type {quote(config.get('model_type'))}")
    if not model.indices("vision"):
        return replace(model, image_rule=UnsettledRule(reason=TEXT_ONLY))
    assumed = {"image_seq_length"} - set(config)  # of the class's own image size, not of this model's
    whole = {**config, **{key: value for key, value in answer["config"].items() if key not in assumed}}
    rule, markup = image_rule_by_processor(whole, files, settings)
    return replace(model, image_rule=rule, image_markup=markup, clip_rule=ask_clips(config, files))


def read_config(source: str | Path | Config) -> Config:
    """The configuration that `describe` reads from `source`.

    Use this to look at the fields before you describe the model, or to change one and describe the changed `dict`.

    >>> read_config("Qwen2.5-VL-7B")["model_type"]
    'qwen2_5_vl'
    """
    config = _read_source(source)[1]
    if "description_version" in config:
        carried = config.get("config")
        if isinstance(carried, Mapping):
            return carried
        raise ConfigError(f"{str(source)[:200]!r} is a description, which builds no model: give its config.json")
    return config


# -- reading --------------------------------------------------------------------------------------------------------


def _read_source(source: str | Path | Config) -> tuple[Path | None, Config]:
    """The file that was read, where there is one, and the configuration."""
    if isinstance(source, Mapping):
        return None, _checked(source, "the configuration")
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"{type(source).__name__} is no model: give a config.json, its folder or its content")
    path = Path(source)
    shipped = find_shipped(source) if isinstance(source, str) else None
    if shipped is not None and (shipped == source or not path.exists()):
        return None, read_shipped(shipped)
    try:
        if path.is_dir():
            path = path / "config.json"
        return path, _read_json(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{str(source)[:200]!r} is no config.json, no folder with one and no shipped model"
            f"{suggest_shipped(str(source)[:200])}: give a path, or one of {', '.join(shipped_models())}"
        ) from None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{str(source)[:200]!r} cannot be read ({type(error).__name__}): give another config.json"
        ) from error


_OF_IMAGES = ("preprocessor_config.json", "processor_config.json")  # Transformers 5 writes the second


def _read_processor(
    preprocessor: str | Path | Config | None, *, near: Path | None
) -> tuple[Config | None, dict[str, Config]]:
    """Return what image rules read, and by name all that Transformers makes the processor of.

    That is the file given, else what lies next to config.json.
    """
    if preprocessor is not None:
        given = _read_given(preprocessor)
        return given, {_OF_IMAGES["image_processor" in given]: given}
    if near is None:
        return None, {}
    paths = [near.parent / name for name in (*_OF_IMAGES, "video_preprocessor_config.json")]
    files = {path.name: _read_json(path) for path in paths if path.is_file()}
    settings = _image_settings(files)
    if settings is None:
        return None, {}
    tokenizer = near.parent / "tokenizer_config.json"
    if tokenizer.is_file() and tokenizer.stat().st_size <= MAX_CONFIG_BYTES:
        content = _read_json(tokenizer)
        extra = content.get("extra_special_tokens")
        named = {**(extra if isinstance(extra, Mapping) else {}), **content}
        files[tokenizer.name] = {k: v for k, v in named.items() if k.endswith("_token") or k == "processor_class"}
    return settings, files


def _image_settings(files: Mapping[str, Config]) -> Config | None:
    """Return what `AutoImageProcessor` reads: the nested section where there is one, else the older file."""
    older, newer = (files.get(name) for name in _OF_IMAGES)
    nested = None if newer is None else newer.get("image_processor")
    return nested if isinstance(nested, Mapping) else older


def _read_given(preprocessor: str | Path | Config) -> Config:
    if isinstance(preprocessor, Mapping):
        return _checked(preprocessor, "the preprocessor configuration")
    try:
        return _read_json(Path(preprocessor))
    except OSError as error:
        raise ConfigError(
            f"{str(preprocessor)[:200]!r} cannot be read ({type(error).__name__}): give another"
        ) from error


def _read_json(path: Path) -> Config:
    """Read a JSON file; `OSError` where it cannot be read."""
    try:
        content = read_small(path, most_bytes=MAX_CONFIG_BYTES)
    except TrimtabError as error:
        raise ConfigError(str(error)) from None
    try:
        value = parse_json(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): give it as the model ships it") from None
    return _checked(value, str(path))


def _checked(value: object, source: str) -> Config:
    """Return a mapping that can be written as JSON, so that it has a digest."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{source} holds {quote(value)}: a JSON object with a `model_type` is needed")
    try:
        _canonical(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is no JSON ({error}): give plain numbers, strings, lists and objects") from None
    return value


def _canonical(value: object) -> bytes:
    # `default` also turns read-only mappings into objects
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict)
    return text.encode()


def _digest(config: Config, settings: Config | None) -> str:
    """Return 16 hex digits over both files' content, whatever their layout and key order."""
    return hashlib.blake2b(_canonical([config, settings]), digest_size=8).hexdigest()


def _default_name(path: Path | None, config: Config, model_type: str) -> str:
    if path is not None:
        return path.resolve().parent.name if path.name == "config.json" else path.stem
    written = config.get("_name_or_path")
    return written if isinstance(written, str) and written else model_type
