"""Decoders of published text runs as a `ModelSpec`: what stands around their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trimtab.models.images.rules import FixedImage
from trimtab.specs import LayerSpec, ModelSpec


def decoder_of(
    name: str,
    blocks: Sequence[LayerSpec],
    vocabulary: int,
    *,
    family: str = "text",
    tied: bool = False,
    last_norm: bool = False,
) -> ModelSpec:
    """These blocks, numbered, between a token embedding and a head of the same vocabulary, which may be one matrix.

    `last_norm`: with a layer for the norm before the head, of the blocks' kind.
    """
    h = blocks[0].hidden_size
    bare = replace(blocks[0], num_params=vocabulary * h, attention=None, mlp=None, norm=None, linears=None)
    norm = replace(bare, name="norm", kind="norm", num_params=h, num_matmul_params=0, norm=blocks[0].norm)
    layers = (
        replace(bare, name="embed", kind="embed", num_matmul_params=0),
        *(replace(block, name=f"blocks.{i}") for i, block in enumerate(blocks)),
        *([norm] if last_norm else []),
        replace(
            bare,
            name="head",
            kind="head",
            output_size=vocabulary,
            num_params=0 if tied else vocabulary * h,
            num_matmul_params=vocabulary * h,
        ),
    )
    return ModelSpec(
        name=name, family=family, layers=layers, image_rule=FixedImage(rows=1, tokens=1), vocab_size=vocabulary
    )
