"""A small vision-language model written out by hand, for tests of costs."""

from typing import Any

from trimtab.options import Tower
from trimtab.specs import AttentionSpec, ImageCounts, LayerKind, LayerSpec, MlpSpec, ModelSpec


class OneTile:
    """Every image is 16 patches and 4 tokens."""

    name = "one tile"

    def count(self, width: int, height: int) -> ImageCounts:
        return ImageCounts(patches=16, tokens=4, tiles=1, patches_sq=256, patches_windowed=64)


def layer_of(
    name: str, tower: Tower, kind: LayerKind, width: int, weights: int, *, beside: int = 0, **more: Any
) -> LayerSpec:
    """A layer with `weights` that its rows are multiplied by and `beside` other parameters."""
    fields = {"hidden_size": width, "output_size": width, "num_params": weights + beside, "num_matmul_params": weights}
    return LayerSpec(name=name, tower=tower, kind=kind, **(fields | more))


def vision_block(index: int = 0, *, window: int | None = None, num_heads: int = 4) -> LayerSpec:
    h, f, d = 64, 256, 16
    attention = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=d, value_head_dim=d, causal=False, window=window
    )
    mlp = MlpSpec(intermediate_size=f, gated=False)
    parts = {"attention": attention, "mlp": mlp, "norm": "layer_norm"}
    weights = 2 * h * num_heads * d * 2 + 2 * h * f
    return layer_of(f"vision.{index}", "vision", "block", h, weights, beside=4 * h, **parts)


def text_block(index: int = 0, *, num_kv_heads: int = 2, window: int | None = None) -> LayerSpec:
    h, f, d, heads = 128, 512, 32, 4
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=num_kv_heads, head_dim=d, value_head_dim=d, causal=True, window=window
    )
    mlp = MlpSpec(intermediate_size=f, gated=True)
    parts = {"attention": attention, "mlp": mlp, "norm": "rms_norm"}
    weights = h * d * (2 * heads + 2 * num_kv_heads) + 3 * h * f
    return layer_of(f"language.{index}", "language", "block", h, weights, beside=2 * h, **parts)


def embed(vocab: int = 1000) -> LayerSpec:
    return layer_of("embed", "language", "embed", 128, 0, beside=vocab * 128)


def head(vocab: int = 1000, *, width: int = 128, tied: bool = False) -> LayerSpec:
    weights = vocab * width
    return layer_of("head", "language", "head", width, weights, beside=-weights if tied else 0, output_size=vocab)


def projector() -> LayerSpec:
    joined = {"output_size": 128, "rows_per_input": 0.25, "rows_out_per_input": 0.25}
    return layer_of("projector", "projector", "projector", 256, 256 * 128 + 128 * 128, **joined)


def patches() -> LayerSpec:
    return layer_of("patches", "vision", "embed", 64, 588 * 64)


def small_model(*, tied: bool = False, num_heads: int = 4) -> ModelSpec:
    return ModelSpec(
        name="small",
        family="by hand",
        layers=(
            patches(),
            *(vision_block(i, num_heads=num_heads) for i in range(3)),
            projector(),
            embed(),
            *(text_block(i) for i in range(4)),
            head(tied=tied),
        ),
        image_rule=OneTile(),
        vocab_size=1000,
        tied=(("embed", "head"),) if tied else (),
    )
