"""A placement for vLLM, SGLang and TorchServe.

vLLM and SGLang read one environment variable: decoder layers of each pipeline rank, separated by commas, their number
and sum checked against `--pipeline-parallel-size` and the model (vllm/distributed/utils.py and
sglang/srt/distributed/utils.py, `get_pp_indices`). Vision tower and embedding run on the first rank, the head on the
last. What an engine needs beyond that (paged cache, graphs) is its own; the counts balance what a placement knows of.

TorchServe 0.12 gets a handler and its settings, packed by `torch-model-archiver`. It is archived: no release
since 0.12.0 (2024), and its README says that vulnerabilities may not be fixed.
"""

import itertools
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import get_args

from trimtab.errors import ConfigError, UnsupportedPlanError
from trimtab.files import read_small, write_atomically, written_together
from trimtab.options import MapRule
from trimtab.placement.bytes import device_changes
from trimtab.placement.engines import MAX_RUNNING, MAX_STEP_TOKENS, MEMORY_SHARE, Engine, Layout
from trimtab.typed_json import parse_json
from trimtab.units import MIB, parse_bytes

VARIABLES: Mapping[Engine, str] = {"vllm": "VLLM_PP_LAYER_PARTITION", "sglang": "SGLANG_PP_LAYER_PARTITION"}
SIZE_FLAGS: Mapping[Engine, str] = {"vllm": "--pipeline-parallel-size", "sglang": "--pp-size"}
_TENSOR_FLAGS: Mapping[Engine, str] = {
    "vllm": "--tensor-parallel-size {} --mm-encoder-tp-mode data",
    "sglang": "--tp-size {} --mm-enable-dp-encoder",
}
# Families whose forward takes `pp_proxy_tensors` in sglang 0.5.23 (srt/models); it refuses stages of all others.
_SGLANG_STAGES = frozenset(
    (
        *("gemma4", "glm4v", "glm4v_moe", "llava", "mistral3", "qwen2_5_vl"),
        *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounts:
    """Decoder layers of every pipeline rank, and the GPU of each."""

    layers: tuple[int, ...]
    gpus: tuple[int, ...]

    def environment(self, engine: Engine) -> dict[str, str]:
        """Return the variables to start the engine with; ranks take visible devices in order."""
        found = {VARIABLES[engine]: ",".join(map(str, self.layers))}
        if self.gpus != tuple(range(len(self.gpus))):
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return found

    def shell(self, engine: Engine, command: str = " # with") -> str:
        """The variables, the engine's command, and the flag that goes with them."""
        words = [f"{name}={value}" for name, value in self.environment(engine).items()]
        return " ".join([*words, command, SIZE_FLAGS[engine], str(len(self.layers))])

    def by_tensors(self, engine: Engine) -> str:
        """Return flags for the same GPUs without stages: layers divided among all, images shared out whole.

        Each GPU needs the same free memory then.
        """
        return _TENSOR_FLAGS[engine].format(len(self.layers))

    def refuse_stages(self, engine: Engine, family: str) -> None:
        """Raise `UnsupportedPlanError` where the engine runs no stages of this family, with what it does run."""
        if engine == "sglang" and family not in _SGLANG_STAGES:
            raise UnsupportedPlanError(f"SGLang has no stages of {family}: use {self.by_tensors(engine)}, or vLLM")


_LAUNCH: Mapping[Engine, str] = {"vllm": "vllm serve {}", "sglang": "python -m sglang.launch_server --model-path {}"}
_LIMITS: Mapping[Engine, str] = {
    "vllm": f"--max-num-batched-tokens {MAX_STEP_TOKENS} --max-num-seqs {MAX_RUNNING} "
    f"--gpu-memory-utilization {MEMORY_SHARE}",
    "sglang": f"--chunked-prefill-size {MAX_STEP_TOKENS} --max-running-requests {MAX_RUNNING} "
    f"--mem-fraction-static {MEMORY_SHARE}",
}
_COPIES: Mapping[Engine, str] = {"vllm": "--data-parallel-size", "sglang": "--dp-size"}
_FIRST_PORT = 8001  # 8000 is the proxy's
# vLLM 0.11.1 and later: examples/online_serving/disaggregated_encoder of its repository, where the proxy lies
_CONNECTOR = (
    """--ec-transfer-config '{{"ec_connector": "ECExampleConnector", "ec_role": "ec_{}", """
    """"ec_connector_extra_config": {{"shared_storage_path": "/dev/shm/ec"}}}}'"""
)


def serving_commands(model: str, engine: Engine, layout: Layout) -> tuple[str, ...]:
    """Write the commands that start a layout: one for equal engines; with encoders one for each, and for the router."""
    launch, tp = f"{_LAUNCH[engine].format(model)} {_LIMITS[engine]}", layout.tp
    words = _TENSOR_FLAGS[engine] if layout.images_whole else _TENSOR_FLAGS[engine].partition("{}")[0] + "{}"
    shared = f" {words.format(tp)}" if tp > 1 else ""
    if not layout.encoders:
        copies = f" {_COPIES[engine]} {layout.engines}" if layout.engines > 1 else ""
        return (launch + shared + copies,)
    # encoders come first, a GPU and a port each
    ports = range(_FIRST_PORT, _FIRST_PORT + layout.encoders + layout.engines)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    encoders, engines = urls[: layout.encoders], urls[layout.encoders :]
    roles = {
        "vllm": (
            "--gpu-memory-utilization 0.01 --enforce-eager --no-enable-prefix-caching --enable-request-id-headers "
            + _CONNECTOR.format("producer"),
            "--enable-request-id-headers " + _CONNECTOR.format("consumer"),
        ),
        "sglang": ("--encoder-only", f"--language-only --encoder-urls {' '.join(encoders)}"),
    }[engine]
    started = [
        f"CUDA_VISIBLE_DEVICES={i} {_LAUNCH[engine].format(model)} --port {ports[i]} {roles[0]}"
        for i in range(layout.encoders)
    ]
    for i, port in enumerate(ports[layout.encoders :]):
        gpus = ",".join(str(layout.encoders + i * tp + j) for j in range(tp))
        started.append(f"CUDA_VISIBLE_DEVICES={gpus} {launch}{shared} --port {port} {roles[1]}")
    routers = {
        "vllm": f"python disagg_epd_proxy.py --encode-servers-urls {','.join(encoders)} --prefill-servers-urls disable "
        f"--decode-servers-urls {','.join(engines)}",
        "sglang": f"python -m sglang_router.launch_router --worker-urls {' '.join(engines)}",
    }
    return (*started, routers[engine])


def engine_commands(model: str, family: str, device_map: Mapping[str, int | str] | None) -> tuple[str, ...]:
    """Write commands by which vLLM and SGLang serve `model` in the same placement; None: all on one GPU.

    An engine without stages of this family gets tensor parallelism. `UnsupportedPlanError` if neither can run it.
    """
    commands = {engine: launch.format(model) for engine, launch in _LAUNCH.items()}
    devices = [0] if device_map is None else sorted(set(device_map.values()), key=str)
    if len(devices) == 1 and isinstance(devices[0], int):
        return tuple(commands.values())
    assert device_map is not None, "None is one device"
    stages = count_placed_layers(device_map)
    if family not in _SGLANG_STAGES:
        return stages.shell("vllm", commands["vllm"]), f"{commands['sglang']} {stages.by_tensors('sglang')}"
    return tuple(stages.shell(engine, command) for engine, command in commands.items())


def count_placed_layers(device_map: Mapping[str, int | str]) -> StageCounts:
    """Return the stages of a placement; `UnsupportedPlanError` if an engine cannot run it as stages."""
    modules = list(device_map)
    off = sorted({str(x) for x in device_map.values() if not isinstance(x, int)})
    if off:
        raise UnsupportedPlanError(f"modules lie on {' and '.join(off)}: give `trimtab map --for pipeline` larger GPUs")
    blocks = [name for name in modules if _is_block(name)]
    if not blocks:
        raise UnsupportedPlanError("the placement names no decoder layers: give one that `trimtab map` wrote")
    start = modules.index(blocks[0])
    where = [device_map[name] for name in blocks]
    changes = [0, *device_changes(where), len(blocks)]
    gpus = [int(where[i]) for i in changes[:-1]]
    front = {device_map[name] for name in modules[:start]}
    behind = {device_map[name] for name in modules[start:] if not _is_block(name)}
    if len(set(gpus)) != len(gpus) or front - {gpus[0]} or behind - {gpus[-1]}:
        raise UnsupportedPlanError("the placement is no chain of stages: make it by `trimtab map --for pipeline`")
    counts = tuple(stop - first for first, stop in itertools.pairwise(changes))
    return StageCounts(layers=counts, gpus=tuple(gpus))


def _is_block(module: str) -> bool:
    """Return whether it is a layer of the decoder; towers are `visual`, `vision_tower`, `vision_model`, `vpm`."""
    stem, _, number = module.rpartition(".")
    return number.isdigit() and stem.endswith(
        ("language_model.layers", "language_model.model.layers", "llm.model.layers")
    )


# -- TorchServe -------------------------------------------------------------------------------------------------------


_HANDLER = "torchserve_handler.py"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_AS_EVER = {"low_cpu_mem_usage": True, "offload_state_dict": True, "revision": "main"}  # so it loads anyway
# A worker holds the whole map and sees every device, so `parallelType`, which shares devices out, is unset.
_WORKER = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 1\nresponseTimeout: 300\nstartupTimeout: 1800\n"
# TorchServe's own default, 6.5 MB, is less than two photographs.
_SERVER = f"max_request_size={32 * MIB}\nmax_response_size={32 * MIB}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the handler loads the model, in the words of TorchServe's own recipe for large models."""

    model_name: str
    model_path: str
    device_map: Mapping[str, int | str] | MapRule = "auto"
    runs_on: Mapping[str, int | str] = field(default_factory=dict)  # ours: of modules on "cpu" or "disk"
    max_memory: Mapping[str, str] | None = None  # {"0": "20GiB", "cpu": "64GiB"}
    offload_folder: str | None = None  # from the unpacked archive
    torch_dtype: str | None = None  # the model's own
    max_length: int | str = 256  # new tokens, as the recipe's handler takes it

    def __post_init__(self) -> None:
        folder, places = Path(self.model_path), self.device_map
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise ConfigError(f"{folder} holds no config.json with safetensors: name the folder of a saved model")
        if not _NAME.fullmatch(self.model_name):
            raise ConfigError(f"{self.model_name!r} cannot stand in a URL: use letters, digits, _ . and -")
        if isinstance(places, str):
            if places not in get_args(MapRule):
                raise ConfigError(f"device_map {places!r} is no rule: choose one of {', '.join(get_args(MapRule))}")
        elif self.max_memory is not None:
            raise ConfigError("max_memory does nothing next to a device map: leave one of them out")
        elif "disk" in places.values() and self.offload_folder is None:
            raise ConfigError("the device map places modules on disk: name an offload_folder in the recipe")


def read_recipe(path: Path) -> dict[str, object]:
    """Return fields of `Recipe` from a setup_config.json of TorchServe's recipe.

    Its `model_path` starts from the file's own folder. `ConfigError` for a key that the handler would not honour.
    """
    try:
        found = dict(parse_json(read_small(path)))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} holds no object of keys ({error}): give the recipe's setup_config.json") from None
    takes = {
        "model_name": lambda x: isinstance(x, str),
        "model_path": lambda x: isinstance(x, str),
        "device_map": lambda x: isinstance(x, str | dict),
        "max_memory": lambda x: isinstance(x, dict) and all(parse_bytes(str(size)) for size in x.values()),
        "offload_folder": lambda x: isinstance(x, str),
        "torch_dtype": lambda x: x in ("bfloat16", "float16", "float32"),
        "max_length": lambda x: str(x).isdecimal(),
    }
    for key, value in found.items():
        if not (takes[key](value) if key in takes else _AS_EVER.get(key) == value):
            raise ConfigError(
                f"{path}: leave {key} {json.dumps(value)} out: {', '.join(takes)}, {json.dumps(_AS_EVER)} are read"
            )
    if "model_name" in found:
        found["model_name"] = found["model_name"].rpartition("/")[2]  # without the owner on the Hub
    if "model_path" in found:
        found["model_path"] = str((path.parent / found["model_path"]).resolve())
    return {key: value for key, value in found.items() if key in takes}


def export_torchserve(recipe: Recipe, out: Path) -> Path:
    """Write OUT/NAME.mar by torch-model-archiver, and the handler and settings that it holds next to it."""
    archiver = shutil.which("torch-model-archiver")
    if archiver is None:
        raise ConfigError("torch-model-archiver is not installed: pip install torch-model-archiver==0.12.0")
    files = {
        _HANDLER: resources.files("trimtab.serve").joinpath(_HANDLER).read_text(encoding="utf-8"),
        "setup_config.json": json.dumps(asdict(recipe), indent=2) + "\n",
        "model-config.yaml": _WORKER,
        "config.properties": _SERVER,
    }
    with written_together():
        for name, text in files.items():
            write_atomically(out / name, text)
    archive = out / f"{recipe.model_name}.mar"
    words = [archiver, f"--model-name={recipe.model_name}", "--version=1.0", f"--handler={out / _HANDLER}"]
    words += [f"--extra-files={out / 'setup_config.json'}", f"--config-file={out / 'model-config.yaml'}"]
    with tempfile.TemporaryDirectory(dir=out) as aside:
        done = subprocess.run([*words, "--export-path", aside], capture_output=True, text=True)  # noqa: S603
        if done.returncode != 0:
            raise ConfigError(f"torch-model-archiver failed: {' '.join(done.stderr.split())[-300:]}")
        Path(aside, archive.name).replace(archive)
    return archive
