"""Plan a training run from Python: `python examples/plan_a_run.py [FOLDER]`.

Draws a small data set into FOLDER (default: a temporary one), sizes it, plans Qwen2.5-VL-7B on 16 A100s, and reads the
decisions back as a training script would: which samples make each micro-batch of a rank, which modules a stage holds,
which of them recompute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import trimtab
import trimtab.testing


def main(folder: Path) -> None:
    data = trimtab.testing.draw_dataset(folder / "data", num_samples=300)
    model = trimtab.describe("Qwen2.5-VL-7B", max_pixels=1_003_520)
    tokenizer = data / "tokenizer.json"
    sized = trimtab.size_samples(
        data / "data.jsonl", image_rule=model.image_rule, tokenizer=tokenizer, source_key="source"
    )
    cluster = trimtab.parse_cluster("16xA100-80GB")
    options = trimtab.PlanOptions(pp=2, num_microbatches=8)
    details = trimtab.make_plan(model, sized.table, cluster, options)
    path = trimtab.write_plan(details, folder / "plan")
    assert trimtab.check_plan(path) == []

    plan = details.plan
    print(plan.summary)
    packing, schedule = details.packing, details.schedule
    rank, step = 0, 0
    for microbatch, pack in enumerate(schedule.table[step, rank].tolist()):
        rows = packing.indices[packing.offsets[pack] : packing.offsets[pack + 1]] if pack >= 0 else []
        ids = [details.samples.sample_id(int(row)) for row in rows]
        print(f"rank {rank}, step {step}, micro-batch {microbatch}: {len(ids)} samples, first {ids[:3]}")
    for stage in plan.decisions.stages:
        recomputed = [name for r in plan.decisions.recompute if r.stage == stage.stage for name in r.modules]
        print(f"stage {stage.stage}: {', '.join(stage.modules)}; recomputed: {', '.join(recomputed) or 'none'}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
