"""Sample sizes for the tests of plan/: like a mixture of chats, photos and many-page documents."""

from __future__ import annotations

import numpy as np

from trimtab.specs import SampleTable


def tile_samples(num_samples: int = 600, seed: int = 0) -> SampleTable:
    """Sizes in InternVL tiles of 1025 patches: up to 5 tiles, 256 tokens a tile and a heavy-tailed text."""
    rng = np.random.default_rng(seed)
    tiles = rng.choice([0, 1, 3, 5], p=[0.15, 0.2, 0.25, 0.4], size=num_samples).astype(np.int64)
    text = np.minimum(rng.lognormal(5.0, 0.9, size=num_samples), 3000).astype(np.int64) + 10
    return SampleTable.of(
        tiles * 1025,
        tiles * 256 + text,
        patches_sq=tiles * 1025**2,
        source=(tiles == 0).astype(np.int32),
        source_names=("images", "text"),
    )
