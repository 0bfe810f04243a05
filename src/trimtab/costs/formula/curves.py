"""How near kernels come to a device's peaks, as curves of their sizes, and what one takes in seconds.

Symbols: N rows, K x M a product's weights (K entering, M leaving columns); W outputs in flight, D depth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trimtab.errors import PartitionError
from trimtab.options import AttentionKernel
from trimtab.specs import DeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What kernels reach of a device's published peaks; `efficiency_of` knows the devices of the table.

    matmul: share of the peak that a product without end reaches in a training step.
    outputs: a product of N rows and M columns runs at N M / (N M + outputs) of that: the last wave of tiles leaves
        multiprocessors idle, and narrow weights, as tensor parallelism makes them, need more rows.
    depth: at K / (K + depth) of that: while outputs are written, nothing is multiplied.
    product_s: start and drain of a product.
    attention: share of the peak that fused attention reaches.
    memory: elementwise kernels against the datasheet's bytes/s.
    fp8, mxfp8: a product of 8-bit operands without end, times as fast as one of bf16; None: the device has none, or
        nobody has published it.
    link: NCCL's rings move 370 of NVLink 4's 450 GB/s (NVIDIA/nccl-tests#212).
    """

    matmul: float = 0.70
    outputs: float = 0.57e6
    depth: float = 245.0
    product_s: float = 5e-6
    attention: float = 0.50
    memory: float = 0.80
    link: float = 0.80
    fp8: float | None = None
    mxfp8: float | None = None

    def __post_init__(self) -> None:
        for name in ("matmul", "attention", "memory", "link"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise PartitionError(f"{name} efficiency {value} is no share of a peak: give above 0, at most 1")
        for name in ("outputs", "depth", "product_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise PartitionError(f"{name} {getattr(self, name)} is no size of a kernel: give 0 or more")

    def product_share(self, rows: float, in_width: float, out_width: float) -> float:
        """Share of the peak that one product reaches: the curve that docs/costs.md draws, its start left out.

        >>> e = Efficiency(matmul=0.8, outputs=1e6, depth=100)
        >>> [round(e.product_share(rows, 4096, 4096), 2) for rows in (128, 1024, 8192)]
        [0.27, 0.63, 0.76]
        """
        outputs = rows * out_width
        return self.matmul * outputs / (outputs + self.outputs) * in_width / (in_width + self.depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """Devices whose kernels come equally near to their peaks: their names begin so."""

    names: tuple[str, ...]
    matmul: float = 0.70
    attention: float = 0.38
    fp8: float | None = None
    mxfp8: float | None = None
    outputs_per_flop_s: float = 0.57e6 / 989e12


# Where the figures come from (bench/published_curves.py fits them, docs/costs.md shows the curves):
# - outputs, depth, product_s: 60 bf16 products on H100 in OpenXLA's table (xla/service/gpu/model/
#   matmul_interpolator_data.h; mean error 3 %), 36 on A100 by cuBLAS, printed by Triton's and EleutherAI's benchmarks.
#   depth grows with peak / bandwidth, as writing outputs does: 245 on the H100.
# - matmul of A100 and H100: 22 training runs of MPT models (mosaicml/llm-foundry, scripts/train/benchmarking).
#   Products alone reach 0.85 (A100) and 1.0 (H100, cold: a training step meets its power limit).
# - matmul of the others: 0.87 of the best product that stas00/ml-engineering found on them (compute/accelerator at
#   744d01e, "Maximum Achievable Matmul FLOPS"), as the H100 keeps 0.70 of 0.803. fp8: both its tables; of the MI300X
#   Azure's benchmark (1159 Tflop/s) over its bf16.
# - attention: FlashAttention-2 forward and backward, arXiv 2307.08691 (A100) and 2407.08608 (H100); of the MI300X as
#   many Tflop/s as of the H100, as Azure measured it on both (Azure/AI-benchmarking-guide: 329 and 328).
# A device of no row is taken as the H100 without FP8; outputs go by the peak. The H20 has 78 of the H100's 132
# multiprocessors, and a peak cut below what its power allows.
_DEPTH_PER_FLOP_A_BYTE = 0.83
_CUDNN = 0.55  # cuDNN and FlashAttention-3 on Hopper: arXiv 2407.08608, figures 5 to 7
_ARCHITECTURES = (
    _Architecture(names=("A100", "A800"), matmul=0.82, attention=0.50, outputs_per_flop_s=0.22e6 / 312e12),
    _Architecture(names=("H100", "H800"), fp8=1.77),
    _Architecture(names=("H200",), fp8=1.83),
    _Architecture(names=("H20",), matmul=0.82, attention=0.50, fp8=1.77, outputs_per_flop_s=0.57e6 * 78 / 132 / 148e12),
    _Architecture(names=("B200", "B300"), matmul=0.68, fp8=1.93, mxfp8=1.93),
    _Architecture(names=("GB200", "GB300"), matmul=0.64, fp8=1.98, mxfp8=1.98),
    _Architecture(names=("MI300X",), matmul=0.45, attention=0.29, fp8=1.73),
    _Architecture(names=("MI325X",), matmul=0.53, attention=0.29, fp8=1.73),
    _Architecture(names=("MI35",), matmul=0.59),
    _Architecture(names=("Gaudi-2",), matmul=0.84, fp8=1.97),
    _Architecture(names=("Gaudi-3",), matmul=0.64),
)


def efficiency_of(device: DeviceSpec, attention_kernel: AttentionKernel = "fa2") -> Efficiency:
    """Return what kernels reach on `device`, from published benchmarks.

    >>> from trimtab import find_device
    >>> round(efficiency_of(find_device("A100")).product_share(9225, 3200, 6400), 2)
    0.79
    """
    # the first row whose names begin so; waves of tiles grow with the peak, writing with peak / bandwidth
    row = next((row for row in _ARCHITECTURES if device.name.startswith(row.names)), _Architecture(names=()))
    return Efficiency(
        matmul=row.matmul,
        outputs=row.outputs_per_flop_s * device.peak_flops,
        depth=_DEPTH_PER_FLOP_A_BYTE * device.peak_flops / device.memory_bytes_per_s,
        attention=max(row.attention, _CUDNN) if attention_kernel == "cudnn" else row.attention,
        fp8=row.fp8,
        mxfp8=row.mxfp8,
    )


def product_rates(e: Efficiency, peak_flops: float, dtype: str) -> tuple[Efficiency, float]:
    """The curve and the peak of products whose operands are of `dtype`; `peak_flops` is that of bf16.

    fp32 runs as TF32, at half the bf16 rate on every device of the table. Operands of 8 bits are multiplied so much
    faster, and the same bf16 outputs are written: what is lost in waves and in writing weighs as much more.
    """
    if dtype == "fp32":
        return e, 0.5 * peak_flops
    # 8-bit operands: the same outputs are written in less time
    faster = {"fp8": e.fp8, "mxfp8": e.mxfp8}.get(dtype)
    if faster is None:
        return e, peak_flops
    return replace(e, outputs=faster * e.outputs, depth=faster * e.depth), faster * peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds as a line in the rows: a curve N / (N + half) of efficiency is one, `once` standing for the half."""

    row: float = 0.0
    once: float = 0.0

    def __add__(self, other: Line) -> Line:
        return Line(row=self.row + other.row, once=self.once + other.once)


def product_line(in_width: float, out_width: float, e: Efficiency, peak_flops: float) -> Line:
    """Price N rows through K x M weights: 2 (N M + W) (K + D) / (peak x matmul), and the kernel's start.

    The gradient of the rows is the same with K and M exchanged.
    """
    each = 2.0 * (in_width + e.depth) / (peak_flops * e.matmul)
    return Line(row=each * out_width, once=each * e.outputs + e.product_s)


def weight_line(in_width: float, out_width: float, e: Efficiency, peak_flops: float) -> Line:
    """The gradient of the weights: K M outputs, each a sum over N rows: 2 (K M + W) (N + D) / (peak x matmul)."""
    each = 2.0 * (in_width * out_width + e.outputs) / (peak_flops * e.matmul)
    return Line(row=each, once=each * e.depth + e.product_s)
