"""Should ranks share their images? `python examples/plan_shared_images.py`

Plans Qwen2.5-VL-7B on 8 H100s, tensor parallel over 4, for samples of up to three images: with and without sharing, and
with pools of micro-batches, as far as memory allows them. Sizes are drawn here; yours come from `trimtab size`.
"""

from __future__ import annotations

import numpy as np

import trimtab
import trimtab.vision


def draw_sizes(num_samples: int) -> trimtab.SampleTable:
    """Samples of one to three images of log-normal area, and some text."""
    rng = np.random.default_rng(0)
    num_images = rng.integers(1, 4, num_samples)
    patches = 4 * np.clip(np.exp(rng.normal(6.0, 0.8, int(num_images.sum()))), 16, 4096).astype(np.int64)
    starts = np.cumsum(num_images) - num_images
    num_patches = np.add.reduceat(patches, starts)
    return trimtab.SampleTable(
        num_images=num_images,
        num_patches=num_patches,
        num_tokens=num_patches // 4 + rng.integers(20, 800, num_samples),
        patches_sq=np.add.reduceat(patches**2, starts),
        patches_windowed=64 * num_patches,
        source=np.zeros(num_samples, np.int32),
    )


def main() -> None:
    model, cluster = trimtab.describe("Qwen2.5-VL-7B"), trimtab.parse_cluster("8xH100-80GB")
    for choice in (
        trimtab.vision.VisionChoice(),
        trimtab.vision.VisionChoice(group="tp", pooling=1),
        trimtab.vision.VisionChoice(group="auto"),
    ):
        options = trimtab.PlanOptions(pp=1, tp=4, num_microbatches=4, vision=choice)
        plan = trimtab.make_plan(model, draw_sizes(400), cluster, options).plan
        decision, found = plan.decisions.vision_data_parallel, plan.estimates.vision_data_parallel
        print(f"asked for {choice.group}: {plan.estimates.samples_per_s:.3g} samples/s")
        if decision is None or found is None:
            continue
        print(f"  shared over {decision.group} {decision.degree}, pooling {decision.pooling}")
        print(f"  slowest rank's tower {found.tower_without_ms:.0f} -> {found.tower_ms:.0f} ms in a step")
        print(f"  activations {found.activations_without_gib} -> {found.activations_gib} GiB")
        print(f"  state {found.state_without_gib} -> {found.state_gib} GiB")


if __name__ == "__main__":
    main()
