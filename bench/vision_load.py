"""Time of the vision phase over perfect sharing, for the rules that trainers and servers share images by.

Slowest rank's tower time over the mean, summed over 400 generated batches of a mix (Σ max / Σ mean; 1.00 is perfect),
groups of 2, 4 and 8 ranks, costs from the analytic profile of the model on an H100. `bound` is what no assignment of
these atoms passes. `pooled` shares the images of four batches at a time.
Run: python bench/vision_load.py   (a minute on one core)
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import share_images, tower_seconds
from trimtab.costs.devices import find_device
from trimtab.costs.profile import profile_model
from trimtab.models.describe import describe
from trimtab.specs import FloatArray, IntArray, ParallelDims

PATCHES = {"Qwen3-VL-8B": (16, 2), "Qwen2.5-VL-7B": (14, 2)}  # patch side, merge
NUM_BATCHES = 400
Clip = tuple[int, int, int]  # frames, height and width in pixels
Rng = np.random.Generator


def screenshots(rng: Rng) -> list[Clip]:
    """1 to 3 trajectories of 3 to 12 equal screenshots."""
    sizes = [(720, 1280), (1080, 1920), (1440, 2560), (900, 1440), (2400, 1080)]
    clips: list[Clip] = []
    for _ in range(rng.integers(1, 4)):
        height, width = sizes[rng.integers(len(sizes))]
        clips += [(1, height, width)] * int(rng.integers(3, 13))
    return clips


def documents(rng: Rng) -> list[Clip]:
    """Pages of A4 at 100 to 200 dpi and small crops of them."""
    clips: list[Clip] = []
    for _ in range(rng.integers(2, 11)):
        dpi = rng.uniform(100, 200)
        clips.append((1, int(11.7 * dpi), int(8.3 * dpi)))
        clips += [(1, int(rng.integers(60, 400)), int(rng.integers(200, 800))) for _ in range(rng.integers(0, 4))]
    return clips


def web_images(rng: Rng) -> list[Clip]:
    """6 to 40 images of log-normal area."""
    return [_image(rng, float(np.exp(rng.normal(12.3, 1.1)))) for _ in range(rng.integers(6, 41))]


def few_large(rng: Rng) -> list[Clip]:
    """1 to 6 images: 4K, or a thumbnail."""
    return [(1, 2160, 3840) if rng.random() < 0.4 else (1, 256, 256) for _ in range(rng.integers(1, 7))]


def clips_and_images(rng: Rng) -> list[Clip]:
    """1 to 3 clips of 8 to 64 frames, and some images."""
    clips = [(int(rng.integers(4, 33)), 360, 640) for _ in range(rng.integers(1, 4))]
    return clips + [_image(rng, float(np.exp(rng.normal(12.5, 1.0)))) for _ in range(rng.integers(0, 9))]


MIXES: dict[str, Callable[[Rng], list[Clip]]] = {
    "screenshots": screenshots,
    "documents": documents,
    "web images": web_images,
    "few large": few_large,
    "clips + images": clips_and_images,
}


def _image(rng: Rng, area: float) -> Clip:
    aspect = float(np.exp(rng.normal(0, 0.35)))
    return 1, max(56, int((area * aspect) ** 0.5)), max(56, int((area / aspect) ** 0.5))


class Batch:
    """Atoms of one micro-batch: whole clips, and the frames they consist of."""

    def __init__(self, clips: Sequence[Clip], patch: int, merge: int, cost: LinearCost) -> None:
        grids = [(t, *(max(merge, round(side / patch / merge) * merge) for side in size)) for t, *size in clips]
        grids = [(t, h, w) if h * w <= 16384 else (t, *_shrink(h, w, merge)) for t, h, w in grids]
        self.clip_patches = np.array([t * h * w for t, h, w in grids])
        self.frame_patches = np.array([h * w for t, h, w in grids for _ in range(t)])
        self.frames_of = np.array([t for t, _, _ in grids])
        windows = np.array([_windowed(h, w) for t, h, w in grids for _ in range(t)])
        self.frame_cost = cost.of(self.frame_patches, patches_windowed=windows)
        self.clip_cost = np.add.reduceat(self.frame_cost, np.cumsum(self.frames_of) - self.frames_of)


def _shrink(h: int, w: int, merge: int) -> tuple[int, int]:
    scale = (16384 / (h * w)) ** 0.5
    return int(h * scale / merge) * merge, int(w * scale / merge) * merge


def _windowed(h: int, w: int) -> int:
    """Sum of squared rows over 8 x 8 windows of patches."""
    sides = [[min(8, side - i) for i in range(0, side, 8)] for side in (h, w)]
    return sum(a * a for a in sides[0]) * sum(b * b for b in sides[1])


# -- the rules of others, written from their description ------------------------------------------------------------


def even_counts(num: int, ranks: int) -> IntArray:
    return np.repeat(np.arange(ranks), [num // ranks + (r < num % ranks) for r in range(ranks)])


def greedy_runs(sizes: FloatArray, ranks: int) -> IntArray:
    """Consecutive runs, each ended when it reaches its share of what is left."""
    owner, i = np.full(len(sizes), ranks - 1), 0
    left = float(sizes.sum())
    for rank in range(ranks - 1):
        target, run = left / (ranks - rank), 0.0
        while i < len(sizes) and run < target:
            run += float(sizes[i])
            owner[i] = rank
            i += 1
        left -= run
    return owner


def bisected_runs(sizes: FloatArray, ranks: int) -> IntArray:
    """Consecutive runs, cut where the running sum passes r / N of the total."""
    sums = np.cumsum(sizes)
    cuts = np.searchsorted(sums, sums[-1] * np.arange(1, ranks) / ranks)
    return np.searchsorted(cuts, np.arange(len(sizes)), side="right")


def longest_first(sizes: FloatArray, ranks: int) -> IntArray:
    owner, load = np.zeros(len(sizes), np.int64), np.zeros(ranks)
    for i in np.argsort(-sizes, kind="stable"):
        owner[i] = rank = int(np.argmin(load))
        load[rank] += sizes[i]
    return owner


def slowest(owner: IntArray, cost: FloatArray, ranks: int) -> float:
    return float(np.bincount(owner, cost, ranks).max())


Rule = Callable[[Batch, int], float]
RULES: dict[str, Rule] = {
    "equal counts": lambda b, n: slowest(even_counts(len(b.clip_cost), n), b.clip_cost, n),
    "greedy runs, patches": lambda b, n: slowest(greedy_runs(b.clip_patches, n), b.clip_cost, n),
    "runs by p(p + 3d), frames": lambda b, n: slowest(
        bisected_runs(b.frame_patches * (b.frame_patches + 3456.0), n), b.frame_cost, n
    ),
    "longest first, patches": lambda b, n: slowest(longest_first(b.clip_patches * 1.0, n), b.clip_cost, n),
    "longest first, patches squared": lambda b, n: slowest(longest_first(b.clip_patches**2.0, n), b.clip_cost, n),
    "trimtab contiguous": lambda b, n: share_images(b.frame_cost, n, rule="contiguous").max_load,
    "trimtab balanced": lambda b, n: share_images(b.frame_cost, n).max_load,
    "bound": lambda b, n: share_images(b.frame_cost, n).lower_bound,
}


def pooled(batches: Sequence[Batch], ranks: int, degree: int = 4) -> float:
    total = 0.0
    for i in range(0, len(batches), degree):
        total += share_images(np.concatenate([b.frame_cost for b in batches[i : i + degree]]), ranks).max_load
    return total


def main() -> None:
    worst = 0.0
    for model, (patch, merge) in PATCHES.items():
        cost = tower_seconds(profile_model(describe(model), find_device("H100"), dims=ParallelDims()))
        print(
            f"\n{model}: patch {cost.patches:.3g} s, squared {cost.patches_sq:.3g} s, "
            f"windowed {cost.patches_windowed:.3g} s"
        )
        batches = {
            name: [Batch(draw(rng), patch, merge, cost) for _ in range(NUM_BATCHES)]
            for i, (name, draw) in enumerate(MIXES.items())
            for rng in [np.random.default_rng(i)]
        }
        for ranks in (2, 4, 8):
            print(f"\n{f'group of {ranks}':32s}" + "".join(f"{name:>16s}" for name in MIXES) + f"{'mean of 4':>12s}")
            rows: dict[str, list[float]] = {}
            for rule, run in RULES.items():
                rows[rule] = [_over_mean([run(b, ranks) for b in batches[mix]], batches[mix], ranks) for mix in MIXES]
            rows["pooled by 4"] = [pooled(batches[mix], ranks) / _mean(batches[mix], ranks) for mix in MIXES]
            for rule, values in rows.items():
                four = float(np.mean([v for mix, v in zip(MIXES, values, strict=True) if mix != "few large"]))
                print(f"{rule:32s}" + "".join(f"{v:16.3f}" for v in values) + f"{four:12.3f}")
            gaps = [a / b - 1 for a, b in zip(rows["trimtab balanced"], rows["bound"], strict=True)]
            worst = max(worst, *gaps)
    print(f"\nlargest gap of `balanced` to the bound, over all cells: {worst:.2%}")
    rng = np.random.default_rng(0)
    for num in (64, 1000):
        sizes = [rng.lognormal(0, 1, num) for _ in range(200)]
        for ranks in (2, 4, 8):
            start = time.process_time()
            for s in sizes:
                share_images(s, ranks)
            print(f"{num} atoms, {ranks} ranks: {(time.process_time() - start) / len(sizes) * 1e6:.0f} us")


def _mean(batches: Sequence[Batch], ranks: int) -> float:
    return sum(float(b.frame_cost.sum()) for b in batches) / ranks


def _over_mean(slowest_ranks: Sequence[float], batches: Sequence[Batch], ranks: int) -> float:
    return sum(slowest_ranks) / _mean(batches, ranks)


if __name__ == "__main__":
    main()
