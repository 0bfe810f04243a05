"""What a run takes before anybody starts it: `python examples/predict_a_run.py`.

Three ways to train Qwen2.5-VL-7B on 16 devices, as a launcher would build them, on the same drawn lengths: time, memory
and why devices wait.
"""

from __future__ import annotations

import numpy as np

import trimtab


def main() -> None:
    rng = np.random.default_rng(0)
    patches = 4 * rng.integers(64, 1024, size=2000)
    tokens = patches // 4 + np.minimum(rng.lognormal(5.0, 0.9, size=2000), 2500).astype(np.int64) + 10
    samples = trimtab.SampleTable(
        num_images=np.ones(2000, np.int64),
        num_patches=patches,
        num_tokens=tokens,
        patches_sq=patches**2,
        patches_windowed=patches * 64,
        source=np.zeros(2000, np.int32),
    )
    model, cluster = trimtab.describe("Qwen2.5-VL-7B"), trimtab.parse_cluster("16xA100-80GB")
    runs = {
        "FSDP, batch 1": trimtab.GivenRun(batch=1, zero_stage=3, recompute="full"),
        "FSDP, packs of 8192": trimtab.GivenRun(max_tokens=8192, zero_stage=3, recompute="full"),
        "Megatron, tp 2 pp 4": trimtab.GivenRun(
            tp=2, pp=4, batch=1, num_microbatches=16, stages="vision-first", fused_kernels=True
        ),
    }
    print(f"{'run':22}{'samples/s':>10}{'step':>9}{'95 %':>9}{'memory':>11}{'idle':>7}  fits")
    for name, run in runs.items():
        found = trimtab.predict_run(model, samples, cluster, run)
        peak_gib = max(memory.total_bytes for memory in found.variant.memory) / 2**30
        print(
            f"{name:22}{found.samples_per_s:10.1f}{found.mean_step_s:8.2f}s{found.p95_step_s:8.2f}s"
            f"{peak_gib:8.1f}GiB{found.variant.idle_share:7.0%}  {found.variant.fits}"
        )


if __name__ == "__main__":
    main()
