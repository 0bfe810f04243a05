"""Samples with images of their own resolution, and options of plans that share them."""

import dataclasses

import numpy as np

from trimtab import SampleTable, describe, parse_cluster
from trimtab.plan.options import PlanOptions, VisionChoice

QWEN, TILES = describe("Qwen2.5-VL-7B"), describe("InternVL-Chat-V1-5")
CLUSTER = parse_cluster("8xH100-80GB")
OPTIONS = PlanOptions(pp=1, tp=4, num_microbatches=4, schedule="1F1B", zero_stage=1, risk=0.05)


def image_samples(num_samples: int = 240, seed: int = 0, most: int = 4, largest: int = 16384) -> SampleTable:
    """Samples of 0 to `most` images of log-normal area, up to `largest` patches, at their own resolution."""
    rng = np.random.default_rng(seed)
    num_images = rng.integers(0, most + 1, num_samples)
    patches = 4 * np.clip(np.exp(rng.normal(5.0, 1.0, int(num_images.sum()))), 4, largest // 4).astype(np.int64)
    return table_of(np.split(patches, np.cumsum(num_images)[:-1]), rng)


def table_of(images: list[np.ndarray], rng: np.random.Generator) -> SampleTable:
    num_patches = np.array([x.sum() for x in images], np.int64)
    return SampleTable.of(
        num_patches,
        num_patches // 4 + rng.integers(20, 800, len(images)),
        num_images=np.array([len(x) for x in images], np.int64),
        patches_sq=np.array([(x * x).sum() for x in images], np.int64),
        patches_windowed=64 * num_patches,
    )


def with_vision(**choice: object) -> PlanOptions:
    return dataclasses.replace(OPTIONS, vision=VisionChoice(**choice))  # type: ignore[arg-type]
