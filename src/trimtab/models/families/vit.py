"""Vision towers: a block of a ViT, as the families whose layers stand here have it."""

from __future__ import annotations

from trimtab.models.families.architecture import NormKind, linear, named_layer, norm, vector
from trimtab.models.fields import Fields
from trimtab.specs import AttentionSpec, LayerSpec, MlpSpec


def read_vit_block(
    vision: Fields,
    *,
    norm_kind: NormKind,
    width: str = "hidden_size",
    heads: str = "num_heads",
    intermediate_size: int | None = None,
    qkv_bias: bool = True,
    gated: bool = False,
    qk_norm: bool = False,
    layer_scale: bool = False,
    fused_qkv: bool = False,
    quick_gelu: bool = False,
) -> LayerSpec:
    """A pre-norm encoder block with full attention, without a name; `qk_norm` is an RMSNorm over all heads together.

    `width` and `heads` are the names of their fields; `intermediate_size` is read where it is None.
    """
    H, num_heads = vision.size(width), vision.size(heads)
    F = vision.size("intermediate_size") if intermediate_size is None else intermediate_size
    vision.check(
        H % num_heads == 0,
        f"{vision.name(width)} {H} is not divisible by {vision.name(heads)} {num_heads}: correct one",
    )
    weights = linear(H, 3 * H, bias=qkv_bias) + linear(H, H, bias=True)
    weights += linear(H, (2 if gated else 1) * F, bias=True) + linear(F, H, bias=True)
    weights += norm(H, norm_kind) * 2 + vector(2 * H) * (qk_norm + layer_scale)
    head_dim = max(H // num_heads, 1)
    return named_layer(
        "",
        "vision",
        "block",
        weights,
        hidden_size=H,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            value_head_dim=head_dim,
            causal=False,
            qk_norm=qk_norm,
            fused_qkv=fused_qkv,
        ),
        mlp=MlpSpec(intermediate_size=F, gated=gated, quick_gelu=quick_gelu),
        norm=norm_kind,
        layer_scale=layer_scale,
    )


def read_channels(vision: Fields) -> int:
    """Colour channels; the processors convert to RGB, so silence means 3."""
    return vision.optional_size("num_channels", "in_channels", "in_chans") or 3
