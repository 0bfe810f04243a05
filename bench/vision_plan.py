"""What a plan knows of shared images from sums per sample, beside what it would know from the size of every image.

Slowest share over mean share (Σ max / Σ mean), images shared one sample at a time: `true` from all sizes, `planned`
from the sums of a sample table, `equal` if a sample's images were taken as equal. Samples are those of
`vision_load.py`; costs from the analytic profile of Qwen2.5-VL-7B on an H100. Then CPU seconds of planning many.
Run: python bench/vision_plan.py   (half a minute on one core)
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import share_pools, tower_seconds
from trimtab.costs.devices import find_device, parse_cluster
from trimtab.costs.profile import profile_model
from trimtab.models.describe import describe
from trimtab.plan.build import make_plan
from trimtab.plan.decide.exchange import image_sizes
from trimtab.plan.options import PlanOptions, VisionChoice
from trimtab.specs import FloatArray, IntArray, SampleTable
from vision_load import MIXES, NUM_BATCHES, PATCHES, Batch

MODEL = "Qwen2.5-VL-7B"
MANY = 100_000


def main() -> None:
    model = describe(MODEL)
    cost = tower_seconds(profile_model(model, find_device("H100")))
    patch, merge = PATCHES[MODEL]
    print(f"{'slowest / mean':16s}{'ranks':>6s}{'true':>8s}{'planned':>9s}{'equal':>8s}{'sizes known':>13s}")
    for i, (mix, draw) in enumerate(MIXES.items()):
        if mix.startswith("clips"):
            continue  # frames of a clip are equal
        rng = np.random.default_rng(i)
        images = [Batch(draw(rng), patch, merge, cost).frame_patches for _ in range(NUM_BATCHES)]
        table = _table(images, rng)
        sizes, offsets = image_sizes(table, model), _offsets([len(x) for x in images])
        planned = sizes.atoms_of(np.arange(len(table)))
        true = np.concatenate(images).astype(np.float64)
        known = table.num_patches[sizes.known].sum() / table.num_patches.sum()
        equal = np.repeat(table.num_patches / table.num_images, table.num_images)
        for ranks in (2, 4, 8):
            found = [_over_mean(cost, atoms, offsets, ranks) for atoms in (true, planned[:, 0], equal)]
            print(f"{mix:16s}{ranks:6d}{found[0]:8.3f}{found[1]:9.3f}{found[2]:8.3f}{known:13.1%}")

    rng = np.random.default_rng(9)
    counts = rng.integers(0, 9, MANY)
    drawn = 4 * np.clip(np.exp(rng.normal(5.0, 1.0, int(counts.sum()))), 4, 4096).astype(np.int64)
    many = _table(np.split(drawn, np.cumsum(counts)[:-1]), rng)
    options = PlanOptions(pp=1, tp=4, global_batch=256)
    seconds = []
    for choice in (VisionChoice(), VisionChoice(group="tp", pooling=1)):
        start = time.process_time()
        made = make_plan(model, many, parse_cluster("8xH100-80GB"), replace(options, vision=choice))
        seconds.append(time.process_time() - start)
    print(
        f"\n{MANY:,} samples, {len(drawn):,} images, {made.packing.num_packs:,} packs: planned in {seconds[0]:.1f} s "
        f"of CPU, with images shared over tp 4 {seconds[1]:.1f} s"
    )


def _over_mean(cost: LinearCost, patches: FloatArray, offsets: IntArray, ranks: int) -> float:
    seconds = cost.of(patches)
    load = share_pools(seconds, seconds, patches[:, None], offsets, ranks, rule="balanced").load
    return float(load.max(axis=1).sum() / load.mean(axis=1).sum())


def _table(images: list[IntArray], rng: np.random.Generator) -> SampleTable:
    num_patches = np.array([x.sum() for x in images], np.int64)
    squares = np.array([(x * x).sum() for x in images], np.int64)
    return SampleTable(
        num_images=np.array([len(x) for x in images], np.int64),
        num_patches=num_patches,
        num_tokens=num_patches // 4 + rng.integers(20, 800, len(images)),
        patches_sq=squares,
        patches_windowed=64 * num_patches,
        source=np.zeros(len(images), np.int32),
    )


def _offsets(counts: list[int]) -> IntArray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


if __name__ == "__main__":
    main()
