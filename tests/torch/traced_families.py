"""Tiny models of more than twenty families, with the inputs of one image, and what autograd keeps of them.

`kept_bytes` and `allocated_bytes` measure the real model and share no code with what they check. Needs torch and
Transformers.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from tiny_models import CLIP, GLM_VIT, IMAGE_TOKEN, ODD_CONFIGS, SIGLIP, TEXT, make_tiny_model
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

SIZE = 56
TILES = {**SIGLIP, "hidden_size": 32, "num_hidden_layers": 3}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 14,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

DESCRIBED = {
    "llava": "llava llama",
    "llava_next": "llava_next",
    "llava_onevision": "llava_onevision",
    "internvl": "internvl qwen2",
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "gemma3": "gemma3",
}
"""Families that `tiny_models` builds, by one of its cases."""


def _text(model_type: str, **more: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": model_type, **more}


def _pixels(*leading: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(*leading, 3, SIZE, SIZE)}


def _ids(num_image_tokens: int, token: int = IMAGE_TOKEN) -> torch.Tensor:
    return torch.tensor([[3] * 5 + [token] * num_image_tokens + [4] * 6])


def _grid(num_axes: int = 3) -> dict[str, torch.Tensor]:
    ids = _ids(8)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(32, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 8, 4]]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
    }


OTHERS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "paligemma": lambda: (
        {
            "vision_config": TILES,
            "text_config": _text("gemma", head_dim=16),
            "image_token_index": IMAGE_TOKEN,
            "projection_dim": 64,
        },
        {"input_ids": _ids(16), "token_type_ids": torch.tensor([[0] * 21 + [1] * 6]), **_pixels(1)},
    ),
    "idefics2": lambda: (
        {
            "vision_config": {**TILES, "model_type": "idefics2_vision"},
            "text_config": _text("mistral", sliding_window=None),
            "perceiver_config": {
                "model_type": "idefics2_perceiver",
                "hidden_size": 64,
                "resampler_n_latents": 4,
                "resampler_depth": 2,
                "resampler_n_heads": 4,
                "resampler_head_dim": 16,
                "num_key_value_heads": 2,
            },
            "image_token_id": IMAGE_TOKEN,
        },
        {"input_ids": _ids(4), **_pixels(1, 1)},
    ),
    "idefics3": lambda: (
        {
            "vision_config": {**TILES, "model_type": "idefics3_vision"},
            "text_config": _text("llama"),
            "scale_factor": 2,
            "image_token_id": IMAGE_TOKEN,
        },
        {"input_ids": _ids(4), **_pixels(1, 1)},
    ),
    "smolvlm": lambda: (
        {
            "vision_config": {**TILES, "model_type": "smolvlm_vision"},
            "text_config": _text("llama"),
            "scale_factor": 2,
            "image_token_id": IMAGE_TOKEN,
        },
        {"input_ids": _ids(4), **_pixels(1, 1)},
    ),
    "mistral3": lambda: (
        {
            "vision_config": PIXTRAL,
            "text_config": _text("mistral", sliding_window=None),
            "spatial_merge_size": 2,
            "image_token_index": IMAGE_TOKEN,
        },
        {"input_ids": _ids(4), "image_sizes": torch.tensor([[SIZE, SIZE]]), **_pixels(1)},
    ),
    "aya_vision": lambda: (
        {
            "vision_config": TILES,
            "text_config": _text("cohere2", sliding_window=8),
            "image_token_index": IMAGE_TOKEN,
            "downsample_factor": 2,
            "adapter_layer_norm_eps": 1e-6,
        },
        {"input_ids": _ids(4), **_pixels(1)},
    ),
    "cohere2_vision": lambda: (
        {
            "vision_config": TILES,
            "text_config": _text("cohere2", sliding_window=8),
            "image_token_id": IMAGE_TOKEN,
            "downsample_factor": 2,
            "alignment_intermediate_size": 64,
        },
        {"input_ids": _ids(4), **_pixels(1)},
    ),
    "vipllava": lambda: (
        {
            "vision_config": CLIP,
            "text_config": _text("llama"),
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layers": [-2, -1, 1],
        },
        {"input_ids": _ids(16), **_pixels(1)},
    ),
    "llava_next_video": lambda: (
        {
            "vision_config": CLIP,
            "text_config": _text("llama"),
            "image_token_index": IMAGE_TOKEN,
            "video_token_index": IMAGE_TOKEN + 1,
            "image_grid_pinpoints": [[112, 56], [112, 112]],
        },
        {"input_ids": _ids(16 + 8 * 5), "image_sizes": torch.tensor([[112, 56]]), **_pixels(1, 3)},
    ),
    "ovis2": lambda: (
        {
            "vision_config": {
                **PIXTRAL,
                "model_type": "ovis2_vision",
                "vocab_size": 40,
                "hidden_stride": 2,
                "num_visual_indicator_tokens": 5,
            },
            "text_config": _text("qwen2"),
            "image_token_id": IMAGE_TOKEN,
            "visual_indicator_token_ids": [190, 191, 192, 193, 194],
            "hidden_size": 64,
            "vocab_size": 203,
        },
        {"input_ids": _ids(4), **_pixels(1)},
    ),
    "glm4v": lambda: (
        {
            "vision_config": GLM_VIT,
            "text_config": _text("glm4v_text", rope_parameters={**MROPE, "partial_rotary_factor": 1.0}),
            "image_token_id": IMAGE_TOKEN,
        },
        _grid(),
    ),
    "glm4v_moe": lambda: (
        {
            "vision_config": GLM_VIT,
            "text_config": _text(
                "glm4v_moe_text",
                head_dim=16,
                n_routed_experts=6,
                n_shared_experts=2,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                first_k_dense_replace=1,
                rope_parameters={**MROPE, "partial_rotary_factor": 1.0},
            ),
            "image_token_id": IMAGE_TOKEN,
        },
        _grid(),
    ),
    "qwen3_5": lambda: (
        {
            "vision_config": {
                **{k: v for k, v in GLM_VIT.items() if k != "image_size"},
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [],
            },
            "text_config": _text(
                "qwen3_5_text",
                head_dim=32,
                layer_types=["linear_attention", "full_attention", "full_attention"],
                linear_num_value_heads=4,
                linear_num_key_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                rope_parameters={
                    **MROPE,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                    "partial_rotary_factor": 0.25,
                },
            ),
            "image_token_id": IMAGE_TOKEN,
        },
        _grid(),
    ),
    "mllama": lambda: (
        {
            "vision_config": {
                "model_type": "mllama_vision_model",
                "hidden_size": 32,
                "intermediate_size": 72,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "image_size": SIZE,
                "patch_size": 14,
                "max_num_tiles": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 96,
            },
            "text_config": {
                **_text("mllama_text_model"),
                "cross_attention_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "pad_token_id": 0,
            },
            "image_token_index": IMAGE_TOKEN,
        },
        {
            "input_ids": _ids(1),
            **_pixels(1, 1, 2),
            "aspect_ratio_ids": torch.tensor([[2]]),
            "aspect_ratio_mask": torch.ones(1, 1, 2, dtype=torch.long),
            "cross_attention_mask": torch.ones(1, 12, 1, 2, dtype=torch.long),
        },
    ),
    "llama4": lambda: (
        {
            "vision_config": {
                "model_type": "llama4_vision_model",
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "image_size": SIZE,
                "patch_size": 14,
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "pixel_shuffle_ratio": 0.5,
            },
            "text_config": {
                **_text("llama4_text", head_dim=16, num_local_experts=4, intermediate_size_mlp=112),
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 16,
                "pad_token_id": 0,
            },
            "image_token_index": IMAGE_TOKEN,
        },
        {"input_ids": _ids(4), **_pixels(1)},
    ),
    "deepseek_vl": lambda: (
        {
            "vision_config": TILES,
            "text_config": _text("llama"),
            "image_token_id": IMAGE_TOKEN,
        },
        {"input_ids": _ids(16), **_pixels(1)},
    ),
    "lfm2_vl": lambda: (
        {
            "vision_config": {
                **{k: v for k, v in TILES.items() if k != "image_size"},
                "model_type": "siglip2_vision_model",
                "num_patches": 16,
            },
            "text_config": _text(
                "lfm2", layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
            ),
            "image_token_id": IMAGE_TOKEN,
            "projector_hidden_size": 64,
        },
        {
            "input_ids": _ids(4),
            "pixel_values": torch.randn(1, 16, 3 * 14 * 14),
            "spatial_shapes": torch.tensor([[4, 4]]),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
        },
    ),
}

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


def make_family(name: str, dtype: torch.dtype, *, more_text: int = 0) -> Family:
    """One image, some text before it and 3 + `more_text` tokens or more behind it."""
    torch.manual_seed(0)
    if name in DESCRIBED:
        assert DESCRIBED[name] in ODD_CONFIGS
        tiny = make_tiny_model(DESCRIBED[name])
        config, inputs = tiny.model.config, tiny.inputs
    else:
        fields, inputs = OTHERS[name]()
        config = transformers.AutoConfig.for_model(name, **copy.deepcopy(fields))
    rows = inputs["input_ids"].shape[1]
    for key, x in inputs.items():
        if x.dim() > 1 and x.shape[1] == rows and not x.is_floating_point():
            inputs[key] = torch.cat([x, x[:, -1:].repeat_interleave(more_text, dim=1)], dim=1)
    inputs = {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}
    return Family(name, config, {**inputs, "labels": inputs["input_ids"].clone(), "use_cache": False})


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
