"""Shrunk models of more than twenty families, with the inputs of one image, and what autograd keeps of them.

`kept_bytes` and `allocated_bytes` measure the real model and share no code with what they check. Needs torch and
Transformers.
"""

import copy
import functools
import gc
import weakref
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from shrunk_models import shrink
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from trimtab.costs.measured.timed_model import build_to_run
from trimtab.models.asking.batches import Batches
from trimtab.models.asking.units import split_units

DESCRIBED = (
    *("llava", "llava_next", "llava_onevision", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    "gemma3",
)
OTHERS = (
    *("paligemma", "idefics2", "idefics3", "smolvlm", "mistral3", "aya_vision", "cohere2_vision", "vipllava"),
    *("llava_next_video", "ovis2", "glm4v", "glm4v_moe", "qwen3_5", "mllama", "llama4", "deepseek_vl", "lfm2_vl"),
)
"""Families of other kinds of layers."""

FAMILIES = (*DESCRIBED, *OTHERS)


@dataclass(frozen=True)
class Family:
    """One family's configuration and inputs; `make_real` gives its model random weights."""

    name: str
    config: Any
    inputs: dict[str, Any]

    def make_real(self, *, dtype: torch.dtype, attention: str) -> Any:
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(
            copy.deepcopy(self.config), attn_implementation=attention, dtype=dtype
        )
        return model.train()


def make_family(name: str, dtype: torch.dtype) -> Family:
    """One image, and some text before and behind it."""
    torch.manual_seed(0)
    config = shrink(name, {})
    model = build_to_run(copy.deepcopy(config), dtype=dtype, attention="sdpa")
    inputs = Batches(model, split_units(model), packed=False).make(1, 12).inputs
    floats = {k: x.to(dtype) for k, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return Family(name, config, {**inputs, **floats})


def find_layers(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, GradientCheckpointingLayer)]


# -- what the real model does ---------------------------------------------------------------------------------------


class _Box:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


def run_step(model: Any, inputs: dict[str, Any], recomputed: Collection[str]) -> torch.Tensor:
    """The loss; `recomputed` layers under torch's own checkpointing while it is computed."""
    with ExitStack() as stack:
        for name in recomputed:
            layer = model.get_submodule(name)
            forward = layer.forward
            layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
                partial(forward, **kwargs), *args, use_reentrant=False
            )
            stack.callback(delattr, layer, "forward")
        return model(**inputs).loss


def kept_bytes(model: Any, inputs: dict[str, Any], recomputed: Collection[str]) -> int:
    """Bytes of the storages alive for backward: what autograd saved, and what checkpoints' closures hold.

    Counted from the tensors themselves, by address, after the forward; parameters and buffers left out. A checkpoint
    saves the tensors that it is handed by position, and holds the keywords and tuples (of rotary tables) as they are.
    """
    boxes: weakref.WeakSet[_Box] = weakref.WeakSet()
    handed: dict[str, list[list[weakref.ref[torch.Tensor]]]] = {}

    def pack(tensor: torch.Tensor) -> _Box:
        box = _Box(tensor)
        boxes.add(box)
        return box

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: handed.setdefault(name, []).append(
                [
                    weakref.ref(x)
                    for x in tree_leaves([kwargs, [y for y in args if not isinstance(y, torch.Tensor)]])
                    if isinstance(x, torch.Tensor)
                ]
            ),
            with_kwargs=True,
        )
        for name in recomputed
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        loss = run_step(model, inputs, recomputed)
    for hook in hooks:
        hook.remove()
    fixed = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    closures = [x() for calls in handed.values() for call in calls for x in call]
    alive = [box.tensor for box in boxes] + [x for x in closures if x is not None]
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}
    del loss
    return sum(size for address, size in sizes.items() if address not in fixed)


@functools.cache
def kernels() -> frozenset[str]:
    """Operators that reach a kernel as they are; the others are made of these. Names as the profiler writes them."""
    made_of_others: dict[str, bool] = {}
    for overload in torch._C._dispatch_get_all_op_names():
        name = overload.partition(".")[0]
        others = torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd")
        made_of_others[name] = made_of_others.get(name, False) or others
    return frozenset(name for name, others in made_of_others.items() if not others)


@dataclass(frozen=True)
class _Allocation:
    """Bytes taken (or given back: negative) at an address, inside the call of a kernel or outside of all."""

    start_ns: int
    num_bytes: int
    address: int
    kernel: Any


def allocated_peak_bytes(model: Any, inputs: dict[str, Any], recomputed: Collection[str]) -> int:
    """Largest sum of what the allocator handed out and took back during one step, by torch's profiler.

    Workspaces are left out: what one call of a kernel takes and gives back before it ends. They are the processor's
    own (AMX products pack copies of bf16 operands, attention takes a buffer a thread), and no trace counts them.
    """
    model.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run_step(model, inputs, recomputed).backward()
    model.zero_grad(set_to_none=True)
    found: list[_Allocation] = []

    def visit(node: Any, kernel: Any) -> None:
        if node.tag == _EventType.Allocation:
            fields = node.extra_fields
            found.append(_Allocation(node.start_time_ns, fields.alloc_size, fields.ptr, kernel))
        elif kernel is None and node.name in kernels():
            kernel = node
        for child in node.children:
            visit(child, kernel)

    for root in recorded.profiler.kineto_results.experimental_event_tree():
        visit(root, None)
    assert found
    live = peak = 0
    taken: dict[int, _Allocation] = {}
    workspaces: set[_Allocation] = set()
    found.sort(key=lambda x: x.start_ns)
    for x in found:
        if x.num_bytes > 0:
            taken[x.address] = x
        elif (pair := taken.pop(x.address, None)) is not None and x.kernel is not None and pair.kernel is x.kernel:
            workspaces |= {pair, x}
    for x in found:
        live += 0 if x in workspaces else x.num_bytes
        peak = max(peak, live)
    return peak
