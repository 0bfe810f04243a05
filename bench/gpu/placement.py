"""Loading and answering with weights that no GPU holds, in host memory or on disk: our map beside Accelerate's.

A model with random weights is written to disk. The GPU is given a share of its weights' bytes, and what the request
takes beside them; host memory has room for the rest, or for a half of it and the disk for the other. Both sides load
the same folder and answer the same request. `planned` is what the map counts: bytes on the GPU and over its link.
`--tiny` runs on simulated devices, which count every copy between them.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from bench.gpu.copies import CountBytes
from bench.gpu.setting import Case, Setting

from trimtab.models.asking.model import complete
from trimtab.models.describe import describe
from trimtab.models.description import read_shipped
from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import CONTEXT_BYTES, Gpu, Machine, Workload
from trimtab.placement.place import place
from trimtab.placement.placed import Placement
from trimtab.runtime.placing.load import load_placed, move_inputs
from trimtab.specs import ModelSpec

NUM_NEW = 32
SHARES = (1.0, 0.7, 0.4)
"""Of the weights' bytes, on the GPU."""
MODELS = {"Qwen2.5-VL-3B": 24e9, "Qwen2.5-VL-7B": 48e9}
"""Bytes of a device on which the model is worth trying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A saved model and what it is asked."""

    folder: Path
    spec: ModelSpec
    inputs: dict[str, torch.Tensor]
    images: tuple[tuple[int, int], ...]
    dtype: str

    @property
    def weight_bytes(self) -> int:
        return {"bf16": 2, "fp32": 4}[self.dtype] * self.spec.num_params

    @property
    def workload(self) -> Workload:
        num_text = int((self.inputs["mm_token_type_ids"] == 0).sum())
        return Workload(seq_len=num_text, max_new_tokens=NUM_NEW, images=self.images, dtype=self.dtype)  # type: ignore[arg-type]


def cases(setting: Setting) -> list[Case]:
    makers: dict[str, Callable[[Path], Request]] = {"tiny": _tiny_request}
    if not setting.tiny:
        makers = {
            name: partial(_request, name=name, setting=setting)
            for name, room in MODELS.items()
            if room <= setting.memory_bytes
        }
    return [
        Case(name=f"{name}, {share:.0%} on the GPU", run=partial(compare, setting, make, share))
        for name, make in makers.items()
        for share in (SHARES[1:2] if setting.tiny else SHARES)
    ]


def compare(setting: Setting, make: Callable[[Path], Request], share: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        request = make(Path(name))
        table = inference_table(request.spec, request.workload)
        running = int((table.kv_full + table.held).sum() + table.prefill.max())
        context = CONTEXT_BYTES if setting.device.type == "cuda" else 0
        free = int(share * request.weight_bytes) + running + context
        host = 2 * request.weight_bytes
        found: dict[str, Any] = {"weight_bytes": request.weight_bytes, "running_bytes": running}
        placements = {"host": _place(request, free, host, context)}
        if share < 1.0 and not setting.tiny:
            placements["host and disk"] = _place(request, free, int((1 - share) / 2 * request.weight_bytes), context)
        for where, placement in placements.items():
            (gpu,) = (use for use in placement.uses if use.device == 0)
            found[f"trimtab, {where}"] = {
                "planned_gpu_bytes": gpu.total_bytes - context,
                "planned_moved_bytes": placement.moved_bytes,
                **_run(setting, request, partial(load_placed, request.folder, placement)),
            }
        limits = {0: free - running - context, "cpu": host}
        found["accelerate, host"] = _run(setting, request, partial(_load_by_accelerate, request, limits))
        return found


def _place(request: Request, free: int, host: int, context: int) -> Placement:
    machine = Machine(gpus=(Gpu(index=0, free_bytes=free),), cpu_bytes=host, disk=True, context_bytes=context)
    return place(request.spec, machine, request.workload)


def _load_by_accelerate(request: Request, limits: dict[int | str, int]) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        request.folder, device_map="auto", max_memory=limits, dtype="auto"
    )


def _run(setting: Setting, request: Request, load: Callable[[], Any]) -> dict[str, Any]:
    """Seconds to load, of the first answer, and of the second; the most the GPU held."""
    setting.reset_peak()
    with _devices(setting), _copies(setting) as copied:
        started = time.perf_counter()
        model = load()
        loaded = time.perf_counter()
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            _answer(request, model)
            if setting.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        answer_bytes = _answer_bytes(setting, request, model)
    del model
    return {
        "load_s": loaded - started,
        "first_answer_s": seconds[0],
        "answer_s": seconds[1],
        "answer_copied_bytes": answer_bytes,
        "copied_bytes": None if copied is None else copied.total,  # of both answers and the loading
        **setting.peak_bytes(),
    }


def _answer(request: Request, model: Any) -> None:
    with torch.no_grad():
        model.generate(
            **move_inputs(model, request.inputs), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False
        )


def _answer_bytes(setting: Setting, request: Request, model: Any) -> int | None:
    """What one more answer, untimed, copies between host and GPU; simulated devices count by themselves."""
    if setting.device.type == "cpu":
        return None
    with CountBytes() as counting:
        _answer(request, model)
    return counting.moved_bytes


def _devices(setting: Setting) -> AbstractContextManager[Any]:
    if setting.device.type != "cpu":
        return nullcontext()
    from simulated_devices import simulated

    return simulated()


@contextmanager
def _copies(setting: Setting) -> Iterator[Any]:
    if setting.device.type != "cpu":
        yield None
        return
    from simulated_devices import counted

    with counted() as traffic:
        yield traffic


# -- requests ---------------------------------------------------------------------------------------------------------


def _tiny_request(folder: Path) -> Request:
    from bench.offload_traffic import open_shop  # with devices in Python, which are new in torch: read for tiny runs

    shop = open_shop("qwen2_5_vl", folder, num_new=NUM_NEW)
    return Request(folder=folder, spec=shop.spec, inputs=shop.inputs, images=((56, 56),), dtype="fp32")


def _request(folder: Path, *, name: str, setting: Setting) -> Request:
    """Random weights of the published sizes, and a request of two images of 1,008 x 1,008 pixels and 256 words."""
    config = complete(read_shipped(name)["config"])
    with torch.device(setting.device):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    grid = torch.tensor([[1, 72, 72]] * 2)
    token = config.image_token_id
    ids = torch.tensor([[token] * (2 * 72 * 72 // 4) + [100] * 256])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2 * 72 * 72, 3 * 2 * 14 * 14, dtype=torch.bfloat16),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == token).long(),
    }
    return Request(folder=folder, spec=describe(name), inputs=inputs, images=((1008, 1008),) * 2, dtype="bf16")
