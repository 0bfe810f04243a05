"""Rates of the kernels that a VLM's layers are made of, over rows and widths: the curves behind `costs/`.

Products: rows x in -> out, forward and the two of the backward together, for the layers of eight models at tensor
parallel 1, 2, 4 and 8. Attention: sdpa, forward and backward, over packs of one and of eight samples. Memory-bound:
norm and activation. Launch: an empty kernel's time on the host and on the device.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench.gpu.setting import Case, Setting

# in, out of the widest product of a layer, and its heads: (tower of a model, width, MLP width, heads)
TOWERS = (
    ("InternViT-300M", 1024, 4096, 16),
    ("InternViT-6B", 3200, 12800, 25),
    ("Qwen2.5-VL vision", 1280, 3420, 16),
    ("Qwen3-VL vision", 1152, 4304, 16),
    ("7B", 3584, 18944, 28),
    ("8B", 4096, 12288, 32),
    ("32B", 5120, 27648, 40),
    ("72B", 8192, 29568, 64),
    ("30B-A3B expert", 2048, 768, 32),
)
ROWS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TENSOR_PARALLEL = (1, 2, 4, 8)
LENGTHS = (256, 1024, 4096, 16384)


def cases(setting: Setting) -> list[Case]:
    towers, rows, lengths = TOWERS, ROWS, LENGTHS
    if setting.tiny:
        towers, rows, lengths = (("tiny", 64, 128, 4),), (16, 64), (64,)
    found = [
        Case(name=f"product {name} tp {tp}", run=lambda w=width, m=mlp, tp=tp: products(setting, w, m // tp, rows))
        for name, width, mlp, _ in towers
        for tp in TENSOR_PARALLEL
        if mlp % tp == 0
    ]
    found += [
        Case(name=f"attention {name}", run=lambda w=width, h=heads: attention(setting, h, w // h, lengths))
        for name, width, _, heads in towers
    ]
    found += [Case(name=f"norm {name}", run=lambda w=width: norm(setting, w, rows)) for name, width, _, _ in towers]
    return [*found, Case(name="launch", run=lambda: launch(setting))]


def products(setting: Setting, width: int, mlp: int, rows: tuple[int, ...]) -> dict[str, Any]:
    layer = torch.nn.Linear(width, mlp, bias=False, device=setting.device, dtype=_dtype(setting))
    found = []
    for count in rows:
        x = torch.randn(count, width, device=setting.device, dtype=_dtype(setting), requires_grad=True)
        seed = torch.randn(count, mlp, device=setting.device, dtype=_dtype(setting))
        forward, backward = _both(setting, lambda x=x: layer(x), seed)
        flops = 2 * count * width * mlp
        found.append({"rows": count, "forward_flops_s": flops / forward, "backward_flops_s": 2 * flops / backward})
    return {"in": width, "out": mlp, "points": found}


def attention(setting: Setting, heads: int, head_width: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    found = []
    for length in lengths:
        for causal in (False, True):
            shape = (1, heads, length, head_width)
            q, k, v = (
                torch.randn(shape, device=setting.device, dtype=_dtype(setting), requires_grad=True) for _ in range(3)
            )

            def attend(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

            forward, backward = _both(setting, attend, torch.randn(shape, device=setting.device, dtype=_dtype(setting)))
            flops = 4 * length**2 * heads * head_width / (2 if causal else 1)
            found.append(
                {
                    "length": length,
                    "causal": causal,
                    "forward_flops_s": flops / forward,
                    "backward_flops_s": 2.5 * flops / backward,
                }
            )
    return {"heads": heads, "head_width": head_width, "points": found}


def norm(setting: Setting, width: int, rows: tuple[int, ...]) -> dict[str, Any]:
    """Bytes per second of an RMS norm that reads and writes every row once."""
    layer = torch.nn.RMSNorm(width, device=setting.device, dtype=_dtype(setting))
    found = []
    for count in rows:
        x = torch.randn(count, width, device=setting.device, dtype=_dtype(setting))
        seconds = _time(setting, lambda x=x: layer(x))
        found.append({"rows": count, "bytes_s": 2 * x.nbytes / seconds})
    return {"width": width, "points": found}


def launch(setting: Setting) -> dict[str, Any]:
    """Seconds of the smallest kernel on the device, and of its launch on the host."""
    x = torch.zeros(1, device=setting.device)
    device_s = _time(setting, lambda: x.add_(1))
    started = time.perf_counter()
    for _ in range(1000):
        x.add_(1)
    return {"device_s": device_s, "host_s": (time.perf_counter() - started) / 1000}


def _dtype(setting: Setting) -> torch.dtype:
    return torch.float32 if setting.dtype == "fp32" else torch.bfloat16


def _both(setting: Setting, forward: Callable[[], Any], seed: torch.Tensor) -> tuple[float, float]:
    """Seconds of the forward, and of the backward alone."""
    result = forward()
    backward_s = _time(setting, lambda: result.backward(seed, retain_graph=True))
    return _time(setting, forward), backward_s


def _time(setting: Setting, call: Callable[[], Any]) -> float:
    """Median seconds of a call, many to a reading so that the clock's own step does not count."""
    for _ in range(3):
        call()
    if setting.device.type != "cuda":
        readings = []
        for _ in range(5):
            started = time.perf_counter()
            call()
            readings.append(time.perf_counter() - started)
        return statistics.median(readings)
    readings = []
    for _ in range(5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(10):
            call()
        last.record()
        last.synchronize()
        readings.append(first.elapsed_time(last) / 1e4)
    return statistics.median(readings)
