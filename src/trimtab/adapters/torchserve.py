"""A placed model as a TorchServe 0.12 archive: handler, model-config.yaml, setup_config.json, config.properties.

TorchServe is archived: no release since 0.12.0 (2024), and its README says that vulnerabilities may not be fixed.
The archive is written here and not by `torch-model-archiver`: same members, and the same bytes for the same input.
Tested with torchserve 0.12.0 and torch-model-archiver 0.12.0.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_args

from trimtab.errors import ConfigError, TrimtabError
from trimtab.files import open_atomically, read_small, write_atomically, written_together
from trimtab.options import DType, MapRule, Option
from trimtab.typed_json import parse_json
from trimtab.units import MIB, parse_bytes

_HANDLER = "torchserve_handler.py"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NOT_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".py")  # pickles, other frameworks, code
_MAX_REQUEST_BYTES = 32 * MIB  # TorchServe's own default, 6.5 MB, is less than two photographs
_RESPONSE_TIMEOUT_S = 300  # a worker that is silent for longer is killed
_MAX_NEW_TOKENS = 256
_DTYPES: Mapping[DType, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_AS_EVER = (("low_cpu_mem_usage", True), ("offload_state_dict", True), ("revision", "main"))  # so it loads anyway
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest a zip can say


def parse_max_memory(words: list[str]) -> dict[str, str]:
    """{"0": "20GiB", "cpu": "64GiB"} of "0=20GiB" and "cpu=64GiB"."""
    found: dict[str, str] = {}
    for word in words:
        device, _, size = word.partition("=")
        if not (device == "cpu" or device.isdecimal()):
            raise ConfigError(f"{word!r} names no device: write it as 0=20GiB or cpu=64GiB")
        parse_bytes(size)
        found[device] = size
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveOptions:
    """How TorchServe shall load and run the model. What is None, TorchServe's own recipe may say (`read_recipe`)."""

    name: Annotated[str | None, Option("Name of the model; by default the folder's.")] = None
    version: Annotated[str, Option("Version of the archive.")] = "1.0"
    device_map: Annotated[
        Mapping[str, int | str] | MapRule | None,
        Option("Without --map: Accelerate's own rule; default: auto.", read=str, typed=MapRule),
    ] = None
    runs_on: Mapping[str, int | str] = field(default_factory=dict)  # of a map's modules on "cpu" or "disk"
    max_memory: Annotated[
        Mapping[str, str] | None,  # {"0": "20GiB", "cpu": "64GiB"}
        Option(
            "Without --map: what a device may hold, as in 0=20GiB or cpu=64GiB.",
            read=parse_max_memory,
            typed=list[str],
        ),
    ] = None
    offload_folder: Annotated[
        str | None,  # relative to the unpacked archive
        Option("Folder for modules that the map places on disk.", read=str, typed=Path),
    ] = None
    dtype: Annotated[DType | None, Option("Type of the weights; by default the model's own.")] = None
    num_workers: Annotated[int, Option("Processes, each with the whole model.", flag="--workers", least=1)] = 1
    batch_size: Annotated[int, Option("Requests that are answered together.", least=1)] = 1
    max_batch_delay_ms: Annotated[
        int, Option("Milliseconds to wait for a batch to fill.", flag="--max-batch-delay", least=1)
    ] = 100
    max_new_tokens: Annotated[int | None, Option("Tokens of an answer; else 256.", least=1)] = None
    pack_weights: Annotated[bool, Option("Copy the weights into the archive.")] = False  # else it names their folder
    port: Annotated[int, Option("Inference port; the next two are taken too.", least=1, most=65533)] = 8080


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchServeExport:
    """What was written, and the command that serves it."""

    archive: Path
    config: Path
    command: str
    notes: tuple[str, ...]


def export_torchserve(model_dir: Path, out: Path, options: ArchiveOptions) -> TorchServeExport:
    """Writes OUT/NAME.mar, OUT/config.properties, and beside them the archive's own files to read."""
    options = replace(options, name=options.name or model_dir.resolve().name)
    _check(model_dir, options)
    setup = {
        "model_path": "model" if options.pack_weights else str(model_dir.resolve()),
        "device_map": options.device_map or "auto",
        "runs_on": options.runs_on,
        "torch_dtype": None if options.dtype is None else _DTYPES[options.dtype],
        "max_memory": options.max_memory,
        "offload_folder": options.offload_folder,
        "max_new_tokens": options.max_new_tokens or _MAX_NEW_TOKENS,
    }
    files = {
        _HANDLER: resources.files("trimtab.serve").joinpath(_HANDLER).read_text(encoding="utf-8"),
        "setup_config.json": _json(setup),
        "model-config.yaml": _model_config(options),
    }
    archive, config = out / f"{options.name}.mar", out / "config.properties"
    weights = _model_files(model_dir) if options.pack_weights else []
    with written_together():
        for name, text in files.items():
            write_atomically(out / name, text)
        write_atomically(config, _properties(out.resolve(), options))
        _write_archive(archive, {**files, "MAR-INF/MANIFEST.json": _json(_manifest(options))}, weights)
    return TorchServeExport(
        archive=archive,
        config=config,
        command=f"torchserve --start --ncs --foreground --ts-config {config}",
        notes=_notes(options),
    )


def read_recipe(path: Path) -> dict[str, Any]:
    """Fields of `ArchiveOptions` in the setup_config.json of TorchServe's own recipe for large models.

    `ConfigError` for a key that the handler would not honour.
    """
    try:
        given = parse_json(read_small(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}): give the recipe's setup_config.json") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path} holds no object of keys: give the recipe's setup_config.json")
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key in ("device_map", "offload_folder"):
            found[key] = value
        elif key == "max_memory" and isinstance(value, dict):
            found[key] = parse_max_memory([f"{device}={size}" for device, size in value.items()])
        elif key == "torch_dtype" and value in _DTYPES.values():
            found["dtype"] = next(ours for ours, theirs in _DTYPES.items() if theirs == value)
        elif key == "max_length" and str(value).isdecimal():
            found["max_new_tokens"] = int(value)  # what the recipe's handler takes it for
        elif (key, value) not in _AS_EVER:
            known = ", ".join(f"{name} {json.dumps(kept)}" for name, kept in _AS_EVER)
            raise ConfigError(
                f"{path} has {key} {json.dumps(value)}, which the handler would not honour: leave it out (taken are "
                f"device_map, max_memory, offload_folder, torch_dtype, max_length, and {known})"
            )
    return found


def _check(model_dir: Path, options: ArchiveOptions) -> None:
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir} holds no config.json: name the folder of a saved model")
    if not any(model_dir.glob("*.safetensors")):
        raise ConfigError(f"{model_dir} holds no safetensors: save the model as safetensors, no other format is read")
    if not _NAME.fullmatch(options.name or ""):
        raise ConfigError(f"{options.name!r} cannot stand in a URL: name the model with letters, digits, _ . and -")
    placed = options.device_map or "auto"
    if isinstance(placed, str):
        if placed not in get_args(MapRule):
            raise ConfigError(
                f"device_map {placed!r} is no rule of Accelerate's: choose one of "
                f"{', '.join(get_args(MapRule))}, or give a map"
            )
        return
    if options.max_memory is not None:
        raise ConfigError("max_memory has no say beside a device map, which places everything: leave one of them out")
    if "disk" in placed.values() and options.offload_folder is None:
        raise ConfigError("the device map places modules on disk: name a folder for them with --set offload_folder")
    from trimtab.models.describe import describe  # NumPy, which the help of the options above does without

    try:
        layers = [layer.name for layer in describe(model_dir).layers]
    except TrimtabError:  # the worker, which has Transformers, says what is wrong with the folder or the map
        return
    lost = [name for name in layers if not any(_overlap(name, module) for module in placed)]
    if lost:
        raise ConfigError(
            f"the device map says nowhere where {lost[0]} lies ({len(lost)} of {len(layers)} layers of {model_dir}): "
            "it is another model's; write one with trimtab map"
        )


def _overlap(layer: str, module: str) -> bool:
    """Whether one lies in the other; a map may place parts of a layer."""
    return module == "" or f"{layer}.".startswith(f"{module}.") or module.startswith(f"{layer}.")


def _notes(options: ArchiveOptions) -> tuple[str, ...]:
    notes = [
        "TorchServe is archived and gets no security fixes: prefer trimtab serve, or vLLM and SGLang for throughput"
    ]
    if not options.pack_weights:
        notes.append("the archive names the model's folder and does not hold it: keep the folder where it is")
    return tuple(notes)


def _model_config(options: ArchiveOptions) -> str:
    """A worker holds the whole map, so it sees every device: `parallelType`, which deals devices out, stays unset."""
    settings = {
        "minWorkers": options.num_workers,
        "maxWorkers": options.num_workers,
        "batchSize": options.batch_size,
        "maxBatchDelay": options.max_batch_delay_ms,
        "responseTimeout": _RESPONSE_TIMEOUT_S,
        "startupTimeout": 1800,
    }
    return "".join(f"{name}: {value}\n" for name, value in settings.items())


def _properties(store: Path, options: ArchiveOptions) -> str:
    """Loopback, tokens asked for (TorchServe's default), no models added over the network."""
    address = "http://127.0.0.1:"
    settings = {
        "inference_address": f"{address}{options.port}",
        "management_address": f"{address}{options.port + 1}",
        "metrics_address": f"{address}{options.port + 2}",
        "model_store": store,
        "load_models": f"{options.name}.mar",
        "max_request_size": _MAX_REQUEST_BYTES,
        "max_response_size": _MAX_REQUEST_BYTES,
        "install_py_dep_per_model": "false",
        "disable_token_authorization": "false",
        "enable_model_api": "false",
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _manifest(options: ArchiveOptions) -> dict[str, Any]:
    return {
        "createdOn": "01/01/1980 00:00:00",
        "runtime": "python",
        "model": {
            "modelName": options.name,
            "handler": _HANDLER,
            "modelVersion": options.version,
            "configFile": "model-config.yaml",
        },
        "archiverVersion": "0.12.0",
    }


def _model_files(folder: Path) -> list[Path]:
    """What Transformers reads of a model's folder: no pickles, no code, no folders below it."""
    return sorted(x for x in folder.iterdir() if x.is_file() and x.suffix not in _NOT_WEIGHTS and x.name[0] != ".")


def _write_archive(path: Path, texts: Mapping[str, str], weights: list[Path]) -> None:
    """Texts first; weights stored as they are, because they do not compress."""
    with open_atomically(path) as whole, zipfile.ZipFile(whole, "w") as archive:
        for name, text in sorted(texts.items()):
            archive.writestr(_member(name), text)
        for file in weights:
            info = _member(f"model/{file.name}")
            info.file_size = file.stat().st_size  # more than 2 GiB need a larger header from the start
            with archive.open(info, "w") as member, file.open("rb") as source:
                shutil.copyfileobj(source, member, 16 * MIB)


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.external_attr = 0o644 << 16
    return info


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
