"""Hosts: how fast each launches what a layer's pass asks for, and what it does by itself, which is what is priced.

A layer's pass lasts max(device, host); a stage's pass is the sum over its layers. The host's seconds are a constant of
a block, whatever its kernels: a fused kernel costs Python as much as the operations that it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trimtab.options import (
    EXPERT_IMBALANCE,
    AdapterWeights,
    AttentionKernel,
    Dispatcher,
    DType,
    ExpertProducts,
    HostName,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Seconds of one host, and its settings where nothing else is said.

    block_s: of a block's forward. Its backward takes twice as long, recompute the forward once more, any other layer
        (embedding, projector, norm, head) a third.
    routing: of a block's seconds, what a block with experts takes more: router, dispatch, both permutations.
    expert_s: of each kernel of one expert, in the forward; twice as many in the backward.
    takes_turns: the device waits while experts' kernels are launched; else these seconds add to the block's.
    send_bytes_per_s: of sends between stages for which both ends wait; None: sends run next to the products.
    """

    block_s: float
    expert_s: float = 16e-6
    routing: float = 1.0
    takes_turns: bool = False
    send_bytes_per_s: float | None = None
    fused_kernels: bool = False
    sequence_parallel: bool = True
    vision_sequence_parallel: bool = False
    attention_kernel: AttentionKernel = "fa2"
    early_stop: bool = False  # recompute ends before a block's last product
    tp_overlap: bool = False
    grad_dtype: DType = "fp32"
    fp16_grad_dtype: DType = "fp32"  # of runs in fp16
    adapter_weights: AdapterWeights = "fp32"
    dispatcher: Dispatcher = "alltoall"
    expert_imbalance: float = EXPERT_IMBALANCE
    expert_products: ExpertProducts = "grouped"
    mxfp8_expert_products: ExpertProducts = "grouped"  # of runs in MXFP8

    def settings(self, dtype: str) -> dict[str, Any]:
        """Return its fields of `CostSettings`, for a run in `dtype`."""
        names = (
            *("fused_kernels", "sequence_parallel", "vision_sequence_parallel", "tp_overlap"),
            *("attention_kernel", "early_stop", "adapter_weights"),
            *("dispatcher", "expert_imbalance"),
        )
        return {name: getattr(self, name) for name in names} | {
            "grad_dtype": self.fp16_grad_dtype if dtype == "fp16" else self.grad_dtype,
            "expert_products": self.mxfp8_expert_products if dtype == "mxfp8" else self.expert_products,
        }


# Where the figures come from (bench/published.py prints what they give):
# - block_s 2.2 ms: 88-token steps of LoongForge on A800, micro-batch 1 of nanotron on H100, MindSpeed-MM at pp 1 on
#   Ascend 910B imply 1.8, 2.3 and 1.9 to 2.3 ms. One H20 host took 9.8 ms: a run of your own settles it
#   (`trimtab profile --from-logs`). Recipes replay graphs: none.
# - expert_s: three tuned runs of NeMo on H100 and B200, where the device waits in turn.
# - mxfp8_expert_products: recipes of Megatron-Bridge 26.06 print cuda_graph_impl full_iteration; older ones do not.
# - routing: without graphs Bridge (8 experts a device), Transformers (16) and DeepSpeed (32) take about 2 ms more,
#   whatever the number of experts: as long as the block itself. LoongForge's on A800 want 240 us an expert instead.
# - send_bytes_per_s: nanotron's pipelines of a 1B model want 3.3 to 4.1 GB/s at both ends; no other source does.
_EAGER_S = 2.2e-3
HOSTS: Mapping[HostName, Host] = MappingProxyType(
    {
        # kernels alone, as a profile of the device sees them
        "none": Host(block_s=0.0, takes_turns=True, sequence_parallel=False),
        # what is common today, where no host is named
        "common": Host(block_s=_EAGER_S, fused_kernels=True, vision_sequence_parallel=True),
        # Transformers' modules in PyTorch, as Trainer, Accelerate, FSDP2 and `trimtab train` run them
        "eager": Host(block_s=_EAGER_S, vision_sequence_parallel=True, early_stop=True),
        # the same under DeepSpeed, which keeps gradients in the model's format
        "deepspeed": Host(block_s=_EAGER_S, grad_dtype="bf16", fp16_grad_dtype="fp16", early_stop=True),
        # Megatron-Core with Transformer Engine; its vision models are not sequence parallel
        "megatron": Host(block_s=_EAGER_S, fused_kernels=True, fp16_grad_dtype="fp16", adapter_weights="same"),
        # tuned recipes of Megatron-Bridge and NeMo: graphs, bf16 gradients, balanced routing
        "recipe": Host(
            block_s=0.0,
            takes_turns=True,
            fused_kernels=True,
            attention_kernel="cudnn",
            tp_overlap=True,
            grad_dtype="bf16",
            fp16_grad_dtype="fp16",
            adapter_weights="same",
            dispatcher="deepep",
            expert_imbalance=1.0,
            mxfp8_expert_products="fused",
        ),
        "nanotron": Host(block_s=_EAGER_S, send_bytes_per_s=4e9),
    }
)
OTHER_LAYERS = 1 / 3
"""Of a block's seconds on the host, for any other layer; nothing in the sources is bound by it."""
