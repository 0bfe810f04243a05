"""What a family hands back, and the arithmetic of counting weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trimtab.specs import LayerKind, LayerSpec, Tower

NormKind = Literal["layer_norm", "rms_norm"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of a module: all of them, and those that every row is multiplied with."""

    num_params: int = 0
    num_matmul_params: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.num_params + other.num_params, self.num_matmul_params + other.num_matmul_params)

    def __mul__(self, times: int) -> Weights:
        return Weights(self.num_params * times, self.num_matmul_params * times)


def linear(num_inputs: int, num_outputs: int, *, bias: bool) -> Weights:
    """A dense matrix, or a convolution whose kernel does not overlap (`num_inputs` is then its volume)."""
    weights = num_inputs * num_outputs
    return Weights(weights + (num_outputs if bias else 0), weights)


def vector(size: int) -> Weights:
    """Anything that is added or multiplied elementwise: a norm's scale, a bias, a class token, positions."""
    return Weights(size, 0)


def norm(size: int, kind: NormKind) -> Weights:
    """LayerNorm has scale and shift, RMSNorm only a scale."""
    return vector(2 * size if kind == "layer_norm" else size)


def rotary_bytes(rotated: int) -> int:
    """Buffers of one rotary table: the frequencies of every second dimension, and as they were at first, in fp32."""
    return 2 * 4 * -(-rotated // 2)


def named_layer(
    name: str, tower: Tower, kind: LayerKind, weights: Weights, *, hidden_size: int, **more: Any
) -> LayerSpec:
    """A LayerSpec; rows that leave are as wide as those that enter, and as many, unless `more` of its fields differ."""
    same = {"output_size": hidden_size, "rows_out_per_input": more.get("rows_per_input", 1.0)}
    return LayerSpec(
        name=name,
        tower=tower,
        kind=kind,
        hidden_size=hidden_size,
        num_params=weights.num_params,
        num_matmul_params=weights.num_matmul_params,
        **{**same, **more},
    )


def numbered(prefix: str, blocks: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Blocks without names -> the elements of the list of modules at `prefix`."""
    return [replace(block, name=f"{prefix}.{i}") for i, block in enumerate(blocks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model without its name and image rule: what a family reads out of a configuration."""

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    tied: tuple[tuple[str, str], ...] = ()
    forbidden_cuts: frozenset[int] = frozenset()
    forbidden_cut_reason: str | None = None
    joined_cuts: frozenset[int] | None = None  # None: all forbidden ones
    notes: tuple[str, ...] = ()
