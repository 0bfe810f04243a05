"""What decides a layer's cost, its shape aside: parallel degrees, number formats, sharding, kernels, efficiencies."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb
from types import MappingProxyType
from typing import Any, get_args

from trimtab.costs.formula.curves import Efficiency as Efficiency
from trimtab.costs.formula.curves import efficiency_of
from trimtab.costs.formula.host import HOSTS, OTHER_LAYERS, Host
from trimtab.errors import PartitionError, join_problems
from trimtab.lora import Lora
from trimtab.options import (
    EXPERT_IMBALANCE,
    AdapterWeights,
    AttentionKernel,
    Dispatcher,
    DType,
    ExpertProducts,
    HostName,
    Precision,
)
from trimtab.options import ITEM_BYTES as ITEM_BYTES
from trimtab.options import Attention as Attention
from trimtab.specs import DeviceSpec, LayerKind, MlpSpec, ParallelDims, Tower

OPTIMIZER_BYTES = MappingProxyType({"adamw": 8, "adamw_8bit": 2, "sgd_momentum": 4, "sgd": 0})
"""Bytes of optimizer state for each parameter, the fp32 master copy aside: two fp32 moments, two 8-bit, one, none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """The choices of `profile_model`, checked together."""

    dims: ParallelDims = field(default_factory=ParallelDims)
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    zero_stage: int = 1
    optimizer: str = "adamw"
    attention: Attention = "flash"  # skips masked pairs and needs no mask; sdpa, eager: Transformers' own paths
    packed: bool = True  # several samples share one row of tokens, which SDPA can only do with a mask
    fused_kernels: bool = False  # norms, rotary and gates as single kernels (Liger, Transformer Engine); else PyTorch's
    sequence_parallel: bool = False  # of the language model, over the tp devices
    vision_sequence_parallel: bool = False  # of vision tower and projector; Megatron-Core's own do without
    tp_overlap: bool = False  # its messages go in tp parts next to the products: one part in tp is waited for
    ep_overlap: bool = False  # experts' rows of one micro-batch are sent next to the products of another
    frozen_towers: frozenset[Tower] = frozenset()
    lora: Lora | None = None  # only adapters are trained
    dp_bytes_per_s: float | None = None  # to data-parallel neighbours, read by ZeRO-3; None: those of its own node
    expert_dp_bytes_per_s: float | None = None  # the same between copies of experts
    cp_bytes_per_s: float | None = None  # to neighbours that share a pack's tokens
    ep_bytes_per_s: float | None = None  # out of the node, of a device that shares experts with others
    ep_in_node: float | None = None  # devices of a node that share experts; None: all that do
    expert_imbalance: float = EXPERT_IMBALANCE
    dispatcher: Dispatcher = "alltoall"
    expert_products: ExpertProducts = "grouped"
    attention_kernel: AttentionKernel = "fa2"  # where attention is "flash"
    early_stop: bool = False  # recompute ends before a block's last product, as PyTorch's own checkpoints do
    adapter_weights: AdapterWeights = "fp32"  # where `lora` does not say
    host: HostName = "none"
    host_block_s: float | None = None  # of a block's forward on the host; None: the host's own figure
    blocking_launches: bool = False  # CUDA_LAUNCH_BLOCKING=1: host and device take turns
    efficiency: Efficiency | None = None  # None: what is known of the device (`efficiency_of`)

    def __post_init__(self) -> None:
        problems: list[str] = []
        # words that have a formula
        for what, value, known in (
            ("dtype", self.dtype, get_args(Precision)),
            ("grad_dtype", self.grad_dtype, get_args(DType)),
            ("optimizer", self.optimizer, OPTIMIZER_BYTES),
            ("attention", self.attention, get_args(Attention)),
            ("dispatcher", self.dispatcher, get_args(Dispatcher)),
            ("expert_products", self.expert_products, get_args(ExpertProducts)),
            ("attention_kernel", self.attention_kernel, get_args(AttentionKernel)),
            ("adapter_weights", self.adapter_weights, get_args(AdapterWeights)),
            ("host", self.host, get_args(HostName)),
        ):
            if value not in known:
                problems.append(f"{what} {value!r} has no cost formula: choose one of {', '.join(known)}")
        if self.expert_products == "fused" and self.dtype != "mxfp8":
            problems.append(f"experts fused into one MLP run in mxfp8 alone, not in {self.dtype}: choose grouped")
        if self.zero_stage not in (0, 1, 2, 3):
            problems.append(f"zero_stage {self.zero_stage} does not exist: choose 0, 1, 2 or 3")
        for tower in sorted(self.frozen_towers - set(get_args(Tower))):
            problems.append(f"tower {tower!r} cannot be frozen: models have {', '.join(get_args(Tower))}")
        # figures that a run can have
        for name in ("dp_bytes_per_s", "expert_dp_bytes_per_s", "cp_bytes_per_s", "ep_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and rate <= 0:
                problems.append(f"{name} {rate} is no bandwidth: give bytes per second above 0")
        if self.host_block_s is not None and not 0 <= self.host_block_s < float("inf"):
            problems.append(f"host_block_s {self.host_block_s} is no time: give seconds of 0 or more")
        if not 1 <= self.expert_imbalance < float("inf"):
            problems.append(f"expert_imbalance {self.expert_imbalance} is the busiest over the mean: give 1 or more")
        if problems:
            raise PartitionError(join_problems(problems))

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def in_8_bits(self) -> bool:
        """Return whether blocks multiply 8-bit copies of bf16 weights and activations."""
        return self.dtype in ("fp8", "mxfp8")

    @property
    def of_host(self) -> Host:
        return HOSTS[self.host]

    def host_s(self, kind: LayerKind) -> float:
        """Return the seconds of the host for the forward of a layer of this kind, its experts aside."""
        block_s = self.of_host.block_s if self.host_block_s is None else self.host_block_s
        return block_s if kind == "block" else OTHER_LAYERS * block_s

    @property
    def adapters_in(self) -> AdapterWeights:
        """The format of the adapters' weights: what `lora` says, else the host's."""
        return self.adapter_weights if self.lora is None or self.lora.weights is None else self.lora.weights

    @property
    def input_bytes(self) -> int:
        """Return a value's bytes as kept for the product of a block: those of its 8-bit copy, if any."""
        return 1 if self.in_8_bits else self.item_bytes

    def efficiency_on(self, device: DeviceSpec) -> Efficiency:
        """Return what kernels reach on `device`: as given, else as published benchmarks show."""
        return self.efficiency or efficiency_of(device, self.attention_kernel)

    def visits(self, m: MlpSpec) -> float:
        """Return rows of the busiest device's experts for each row of its own; k where all devices have all experts."""
        return (m.experts_per_token or 1) * self.dims.expert_tp / self.dims.tp * self.busiest_experts

    def reached(self, m: MlpSpec, parts: float) -> float:
        """Return how many of `parts` with equal shares of the experts have some of a row's k, in the mean.

        One has none in C(E - E / parts, k) of C(E, k) equally likely choices.
        """
        k, E = m.experts_per_token or 1, m.num_experts or 1
        return parts * (1.0 - comb(E - round(E / parts), k) / comb(E, k))

    @property
    def busiest_experts(self) -> float:
        """Return the rows of the busiest device's experts over the mean's; 1 for a device that has them all."""
        return self.expert_imbalance if self.dims.ep > 1 else 1.0

    def token_share(self, tower: Tower) -> int:
        """Return devices that share the rows of a pack: cp in the language model; vision towers run whole on each."""
        return self.dims.cp if tower == "language" else 1

    def row_share(self, tower: Tower) -> int:
        """Count the devices that share the rows between tensor-parallel regions: tp where sequence parallel, else 1."""
        shared = self.sequence_parallel if tower == "language" else self.vision_sequence_parallel
        return self.dims.tp if shared else 1


def settings_of(*, host: HostName = "none", **choices: Any) -> CostSettings:
    """Return the settings of a run on `host`: what is None among `choices` is what that host does by itself.

    Dispatchers of experts ask for sequence parallelism, whatever the host.

    >>> settings_of(host="recipe", dispatcher="alltoall").grad_dtype
    'bf16'
    """
    if host not in HOSTS:
        raise PartitionError(f"host {host!r} is unknown: choose one of {', '.join(HOSTS)}")
    said = {name: value for name, value in choices.items() if value is not None}
    dims = said.get("dims", ParallelDims())
    folded = {"sequence_parallel": True} if dims.is_folded and dims.tp > 1 else {}
    return CostSettings(host=host, **{**HOSTS[host].settings(said.get("dtype", "bf16")), **said, **folded})
