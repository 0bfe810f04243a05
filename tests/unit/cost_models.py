"""A small vision-language model written out by hand, for tests of costs."""

from __future__ import annotations

from trimtab.specs import AttentionSpec, ImageCounts, LayerSpec, MlpSpec, ModelSpec


class OneTile:
    """Every image is 16 patches and 4 tokens."""

    name = "one tile"

    def count(self, width: int, height: int) -> ImageCounts:
        return ImageCounts(patches=16, tokens=4, tiles=1, patches_sq=256, patches_windowed=64)


def vision_block(index: int = 0, *, window: int | None = None, num_heads: int = 4) -> LayerSpec:
    h, f, d = 64, 256, 16
    return LayerSpec(
        name=f"vision.{index}",
        tower="vision",
        kind="block",
        hidden_size=h,
        output_size=h,
        num_params=2 * h * num_heads * d * 2 + 2 * h * f + 4 * h,
        num_matmul_params=2 * h * num_heads * d * 2 + 2 * h * f,
        attention=AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_heads, head_dim=d, value_head_dim=d, causal=False, window=window
        ),
        mlp=MlpSpec(intermediate_size=f, gated=False),
        norm="layer_norm",
    )


def text_block(index: int = 0, *, num_kv_heads: int = 2, window: int | None = None) -> LayerSpec:
    h, f, d, heads = 128, 512, 32, 4
    weights = h * d * (2 * heads + 2 * num_kv_heads) + 3 * h * f
    return LayerSpec(
        name=f"language.{index}",
        tower="language",
        kind="block",
        hidden_size=h,
        output_size=h,
        num_params=weights + 2 * h,
        num_matmul_params=weights,
        attention=AttentionSpec(
            num_heads=heads, num_kv_heads=num_kv_heads, head_dim=d, value_head_dim=d, causal=True, window=window
        ),
        mlp=MlpSpec(intermediate_size=f, gated=True),
        norm="rms_norm",
    )


def embed(vocab: int = 1000) -> LayerSpec:
    return LayerSpec(
        name="embed",
        tower="language",
        kind="embed",
        hidden_size=128,
        output_size=128,
        num_params=vocab * 128,
        num_matmul_params=0,
    )


def head(vocab: int = 1000, *, tied: bool = False) -> LayerSpec:
    return LayerSpec(
        name="head",
        tower="language",
        kind="head",
        hidden_size=128,
        output_size=vocab,
        num_params=0 if tied else vocab * 128,
        num_matmul_params=vocab * 128,
    )


def projector() -> LayerSpec:
    return LayerSpec(
        name="projector",
        tower="projector",
        kind="projector",
        hidden_size=256,
        output_size=128,
        num_params=256 * 128 + 128 * 128,
        num_matmul_params=256 * 128 + 128 * 128,
        rows_per_input=0.25,
        rows_out_per_input=0.25,
    )


def patches() -> LayerSpec:
    return LayerSpec(
        name="patches",
        tower="vision",
        kind="embed",
        hidden_size=64,
        output_size=64,
        num_params=588 * 64,
        num_matmul_params=588 * 64,
    )


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
