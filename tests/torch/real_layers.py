"""Real Transformers layers beside the LayerSpecs that describe them, at any size. Needs torch and Transformers."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.specs import AttentionSpec, LayerSpec, MlpSpec


@dataclass(frozen=True)
class RealLayer:
    """A module, the arguments of its forward behind the hidden states, and what we say about it."""

    module: nn.Module
    spec: LayerSpec
    batched: bool  # hidden states are (1, rows, h), else (rows, h)
    arguments: Callable[[int], dict[str, Any]]  # rows -> keyword arguments

    def hidden(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (1, rows, self.spec.hidden_size) if self.batched else (rows, self.spec.hidden_size)
        return torch.randn(shape, dtype=dtype, requires_grad=True)


def _spec(module: nn.Module, tower: str, h: int, attention: AttentionSpec, mlp: MlpSpec, **more: Any) -> LayerSpec:
    # experts are 3-dimensional parameters, of which a row meets experts_per_token
    share = (mlp.experts_per_token or 1) / (mlp.num_experts or 1)
    weights = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    weights += sum(round(p.numel() * share) for p in module.parameters() if p.dim() == 3)
    return LayerSpec(
        name="layer",
        tower=tower,  # type: ignore[arg-type]
        kind="block",
        hidden_size=h,
        output_size=h,
        num_params=sum(p.numel() for p in module.parameters()),
        num_matmul_params=weights,
        attention=attention,
        mlp=mlp,
        **more,
    )


def _build(layer_class: Any, *arguments: Any) -> nn.Module:
    """A layer without its random initialisation, which would take longer than all else here."""
    with torch.device("meta"):
        module: nn.Module = layer_class(*arguments)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.01)
    return module


def _attention(config: Any, *, causal: bool, **more: Any) -> AttentionSpec:
    heads = config.num_attention_heads if hasattr(config, "num_attention_heads") else config.num_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    return AttentionSpec(num_heads=heads, num_kv_heads=kv, head_dim=d, value_head_dim=d, causal=causal, **more)


def _text(family: str, attention: str, h: int, heads: int, kv: int, d: int, f: int, **more: Any) -> RealLayer:
    names = {
        "qwen2_5_vl": ("Qwen2_5_VLTextConfig", "Qwen2_5_VLDecoderLayer"),
        "qwen3_vl": ("Qwen3VLTextConfig", "Qwen3VLTextDecoderLayer"),
        "qwen3_vl_moe": ("Qwen3VLMoeTextConfig", "Qwen3VLMoeTextDecoderLayer"),
        "gemma3": ("Gemma3TextConfig", "Gemma3DecoderLayer"),
        "llama": ("LlamaConfig", "LlamaDecoderLayer"),
    }
    config_name, layer_name = names[family]
    package = f"transformers.models.{family}"
    config = getattr(importlib.import_module(f"{package}.configuration_{family}"), config_name)(
        hidden_size=h, num_attention_heads=heads, num_key_value_heads=kv, head_dim=d, intermediate_size=f, **more
    )
    config._attn_implementation = attention
    module = _build(getattr(importlib.import_module(f"{package}.modeling_{family}"), layer_name), config, 0)
    moe = family == "qwen3_vl_moe"
    mlp = MlpSpec(
        intermediate_size=config.moe_intermediate_size if moe else f,
        gated=True,
        num_experts=config.num_experts if moe else None,
        experts_per_token=config.num_experts_per_tok if moe else None,
    )
    spec = _spec(
        module,
        "language",
        h,
        AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv,
            head_dim=d,
            value_head_dim=d,
            causal=True,
            qk_norm=family.startswith(("qwen3", "gemma3")),
        ),
        mlp,
        norm="rms_norm_fp32" if family == "gemma3" else "rms_norm",
        num_norms=4 if family == "gemma3" else 2,
    )

    def arguments(rows: int) -> dict[str, Any]:
        dtype = next(module.parameters()).dtype
        return {"position_embeddings": tuple(torch.randn(1, rows, d, dtype=dtype) for _ in range(2))}

    return RealLayer(module, spec, True, arguments)


def _vision_layer(
    family: str, prefix: str, kind: str, attention: str, fields: dict[str, Any]
) -> tuple[Any, torch.nn.Module]:
    """A configuration of the family's tower, and one layer of it."""
    package = f"transformers.models.{family}"
    named = f"{prefix.removesuffix('Vision')}VisionConfig"
    config = getattr(importlib.import_module(f"{package}.configuration_{family}"), named)(**fields)
    config._attn_implementation = attention
    return config, _build(getattr(importlib.import_module(f"{package}.modeling_{family}"), f"{prefix}{kind}"), config)


def _qwen_vision(family: str, attention: str, h: int, heads: int, f: int) -> RealLayer:
    prefix = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    fields = {"hidden_size": h, "num_heads": heads, "intermediate_size": f}
    config, module = _vision_layer(family, f"{prefix}Vision", "Block", attention, fields)
    gated = family == "qwen2_5_vl"
    spec = _spec(
        module,
        "vision",
        h,
        _attention(config, causal=False, fused_qkv=True),
        MlpSpec(intermediate_size=f, gated=gated),
        norm="rms_norm" if gated else "layer_norm",
    )

    def arguments(rows: int) -> dict[str, Any]:
        positions = tuple(torch.randn(rows, h // heads) for _ in range(2))  # fp32 in the models, whatever their dtype
        return {"cu_seqlens": torch.tensor([0, rows], dtype=torch.int32), "position_embeddings": positions}

    return RealLayer(module, spec, False, arguments)


def _internvl_vision(attention: str, h: int, heads: int, f: int, *, norm: str, qk_norm: bool) -> RealLayer:
    fields = {"hidden_size": h, "num_attention_heads": heads, "intermediate_size": f}
    fields |= {"norm_type": norm, "use_qk_norm": qk_norm}
    config, module = _vision_layer("internvl", "InternVLVision", "Layer", attention, fields)
    spec = _spec(
        module,
        "vision",
        h,
        _attention(config, causal=False, qk_norm=qk_norm),
        MlpSpec(intermediate_size=f, gated=False),
        norm=norm,
        layer_scale=True,
    )
    return RealLayer(module, spec, True, lambda rows: {})


def _clip_like(family: str, attention: str, h: int, heads: int, f: int) -> RealLayer:
    prefix = {"clip": "CLIP", "siglip": "Siglip"}[family]
    fields = {"hidden_size": h, "num_attention_heads": heads, "intermediate_size": f}
    config, module = _vision_layer(family, prefix, "EncoderLayer", attention, fields)
    spec = _spec(
        module,
        "vision",
        h,
        _attention(config, causal=False),
        MlpSpec(intermediate_size=f, gated=False, quick_gelu=family == "clip"),
        norm="layer_norm",
    )
    return RealLayer(module, spec, True, lambda rows: {"attention_mask": None})


# (attention, divisor of the published widths) -> layer; at least 2 key/value heads, for one is repeated without a copy
LAYERS: dict[str, Callable[[str, int], RealLayer]] = {
    "Qwen2.5-VL-7B ViT": lambda a, n: _qwen_vision("qwen2_5_vl", a, 1280 // n, 16 // n, 3420 // n),
    "Qwen2.5-VL-7B text": lambda a, n: _text(
        "qwen2_5_vl", a, 14 // n * 256, 14 // n * 2, max(4 // n, 2), 128, 18944 // n
    ),
    "Qwen2.5-VL-72B text": lambda a, n: _text("qwen2_5_vl", a, 8192 // n, 64 // n, 8 // n, 128, 29568 // n),
    "Qwen3-VL-8B ViT": lambda a, n: _qwen_vision("qwen3_vl", a, 1152 // n, 16 // n, 4304 // n),
    "Qwen3-VL-8B text": lambda a, n: _text("qwen3_vl", a, 4096 // n, 32 // n, 8 // n, 128, 12288 // n),
    "Qwen3-VL-30B-A3B text": lambda a, n: _text(
        "qwen3_vl_moe",
        a,
        2048 // n,
        32 // n,
        max(4 // n, 2),
        128,
        6144 // n,
        moe_intermediate_size=768 // n,
        num_experts=128 // n // n,
        num_experts_per_tok=8,
        experts_implementation="grouped_mm",
    ),
    "InternViT-6B": lambda a, n: _internvl_vision(a, 3200 // n, 25, 12800 // n, norm="rms_norm", qk_norm=True),
    "InternViT-300M": lambda a, n: _internvl_vision(a, 1024 // n, 16 // n, 4096 // n, norm="layer_norm", qk_norm=False),
    "InternLM2-20B": lambda a, n: _text("llama", a, 6144 // n, 48 // n, 8 // n, 128, 16384 // n),
    "CLIP-L": lambda a, n: _clip_like("clip", a, 1024 // n, 16 // n, 4096 // n),
    "SigLIP-400M": lambda a, n: _clip_like("siglip", a, 1152 // n, 16 // n, 4304 // n),
    "Gemma3-27B text": lambda a, n: _text("gemma3", a, 5376 // n, 32 // n, 16 // n, 128, 21504 // n),
}


def kept_bytes(layer: RealLayer, rows: int, dtype: torch.dtype) -> int:
    """Bytes of the distinct storages autograd keeps for one forward; parameters and shared arguments left out."""
    module = layer.module.to(dtype).train()
    arguments = layer.arguments(rows)
    shared = {t.untyped_storage().data_ptr() for t in module.parameters()}
    for value in arguments.values():
        for t in value if isinstance(value, tuple) else (value,):
            if isinstance(t, torch.Tensor):
                shared.add(t.untyped_storage().data_ptr())
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in shared and storage.nbytes() >= rows:  # views of constants: a few bytes
            found[storage.data_ptr()] = storage.nbytes()
        alive.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = layer.module(layer.hidden(rows, dtype), **arguments)
    del result
    return sum(found.values())


class ProductResults(TorchDispatchMode):
    """Bytes of the results of matrix products and fused attention: what a policy that saves them would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"):
            for t in result if isinstance(result, tuple) else (result,):
                self.num_bytes += t.numel() * t.element_size()
        return result
