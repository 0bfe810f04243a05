"""How far two computations of the same thing may lie apart: by rounding, and by no more. Needs torch.

Bits are compared only where the *same* computation is repeated (resume, the same seed, the same plan in other
processes). Products of other shapes and sums in another order round differently, and how is each processor's own:
`PYTHONPATH=tests/other_processor` simulates one that does it on purpose.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

# Largest |found - expected| / |expected|: some eighty units in the last place of float32, ten of bfloat16. A sample
# that is left out, counted twice or scaled, or a token that sees its neighbour, is off by 1e-3 and more in tiny models.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def distance(found: Tensor | Mapping[str, Tensor], expected: Tensor | Mapping[str, Tensor], part: str = "") -> float:
    """|found - expected| / |expected|, over all tensors whose name has `part` together."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        found, expected = {"": found}, {"": expected}
    assert isinstance(found, Mapping)
    assert isinstance(expected, Mapping)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    names = [name for name in expected if part in name]
    assert names, f"nothing is named {part!r}"
    assert all(found[n].shape == expected[n].shape for n in names), "shapes differ"
    pairs = [(found[n].detach().double(), expected[n].detach().double()) for n in names]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    return (difference / max(1e-30, sum(float(b.square().sum()) for _, b in pairs))) ** 0.5


def assert_close(
    found: Tensor | Mapping[str, Tensor],
    expected: Tensor | Mapping[str, Tensor],
    what: object = "",
    *,
    part: str = "",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fails where they differ by more than computing in `dtype` explains."""
    apart = distance(found, expected, part)
    assert apart <= BOUNDS[dtype], f"{what} {part}: {apart:.2g} apart, and rounding explains {BOUNDS[dtype]:.2g}"
