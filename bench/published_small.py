"""Published runs whose micro-batches hold one short sample, predicted: `python bench/published_small.py`.

MindSpeed-MM (Ascend/MindSpeed-MM f6c7b91, README.md: samples/s of 8 Ascend 910B and a mean of 563 tokens a sample;
examples/qwen2vl, examples/qwen2.5vl: degrees, stages, frozen tower and projector, images of at most 512 x 512). Images
are COCO's, taken as 640 x 480. None of it is in docs/predictions.md's figures: the host decides here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.costs.devices import parse_cluster
from trimtab.models.describe import describe
from trimtab.plan.given import GivenRun
from trimtab.plan.predict import Prediction, predict_run
from trimtab.specs import SampleTable

TOKENS = 563
PATCHES = 4 * 15 * 21  # 640 x 480 at most 512 x 512 pixels, in 15 x 21 tokens of 28 pixels


@dataclass(frozen=True, kw_only=True)
class Small:
    """A row: samples/s of eight devices, one sample in each micro-batch."""

    model: str
    stages: str
    pp: int
    num_microbatches: int
    samples_per_s: float


ROWS = (
    Small(model="Qwen2-VL-2B", stages="32v+28l", pp=1, num_microbatches=24, samples_per_s=34.15),
    Small(model="Qwen2-VL-7B", stages="32v+1l|10l|10l|7l", pp=4, num_microbatches=96, samples_per_s=13.28),
    Small(model="Qwen2.5-VL-3B", stages="32v+36l", pp=1, num_microbatches=32, samples_per_s=23.77),
    Small(model="Qwen2.5-VL-7B", stages="32v+12l|16l", pp=2, num_microbatches=48, samples_per_s=18.82),
)


def predicted(row: Small) -> Prediction:
    """As the formulas have it."""
    dp = 8 // row.pp
    num = np.full(dp * row.num_microbatches, 1)
    patches = PATCHES * num
    samples = SampleTable.of(patches, TOKENS * num, num_images=num, patches_windowed=64 * patches)
    run = GivenRun(
        pp=row.pp,
        batch=1,
        num_microbatches=row.num_microbatches,
        stages=row.stages,
        fused_kernels=True,
        frozen_towers=("vision", "projector"),
    )
    return predict_run(describe(row.model), samples, parse_cluster("8xAscend-910B"), run)


def main() -> None:
    for row in ROWS:
        found = predicted(row).samples_per_s
        print(
            f"{row.model:14} pp {row.pp}  published {row.samples_per_s:5.2f} samples/s, predicted {found:6.2f}: "
            f"{row.samples_per_s / found - 1:+.0%} of the seconds"
        )


if __name__ == "__main__":
    main()
