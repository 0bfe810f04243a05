"""Budget, prediction and measurement of the recompute that `trimtab probe` chooses, for four tiny models on the CPU.

For each model a probe without want gives the peaks with everything and with nothing recomputed. Then budgets at 20, 50
and 80 % of the way between the two: the peak of the chosen recompute by the formulas, by the probed profile, and as it
was counted (live storages, float32, AdamW); how many runs it took and how many choices did not last. Gradients and the
optimizer's state are part of the peaks: at real sizes they are the larger part, here they are a half.
Run: python bench/probe.py   (two minutes of CPU)
"""

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "torch"), str(ROOT / "tests" / "unit")]

import torch  # noqa: E402
from probe_runs import settings_of, write_probed  # noqa: E402

from trimtab.plan.file.reload import reload_plan  # noqa: E402
from trimtab.runtime.probe.run import ProbeResult, probe  # noqa: E402
from trimtab.units import MIB, format_bytes  # noqa: E402

FAMILIES = ("internvl", "llava", "qwen2_5_vl", "qwen3_vl")
SHARES = (0.2, 0.5, 0.8)


def formula_bytes(folder: Path, result: ProbeResult) -> float:
    """What the formulas predict for the choice, on the pack of its highest peak."""
    case = reload_plan(folder / "alone").case
    chosen = [run for run in result.runs if run.peak_bytes == (result.devices[0].peak_bytes,)]
    problem = replace(case.problem, work_max=case.work[chosen[-1].pack], overhead_bytes=0.0, overhead_share=0.0)
    (held,) = problem.assess(result.details.variants[-1].stages).memory
    return held.total_bytes


def main() -> None:
    torch.set_num_threads(1)
    print("model        budget     chosen                     formulas          probed profile   counted    runs back")
    worst = {"formulas": 0.0, "probed": 0.0}
    over = 0
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_probed(folder, family)
            free = probe(settings_of(folder, 1024)).devices[0]
            for share in SHARES:
                started = time.process_time()
                budget = free.full_peak_bytes + share * (free.peak_bytes - free.full_peak_bytes)
                result = probe(settings_of(folder, budget / MIB))
                (device,) = result.devices
                formulas, counted = formula_bytes(folder, result), device.peak_bytes
                off = {"formulas": formulas / counted - 1, "probed": device.predicted_bytes / counted - 1}
                worst = {key: max(worst[key], abs(off[key]), key=abs) for key in worst}
                over += counted > result.limit_bytes
                chosen = ", ".join(f"{tier} {count}" for tier, count in device.recompute.items()) or "none"
                print(
                    f"{family:12} {format_bytes(budget):10} {chosen:26} "
                    f"{format_bytes(formulas):9} {off['formulas']:+6.1%}  "
                    f"{format_bytes(device.predicted_bytes):9} {off['probed']:+6.1%} {format_bytes(counted):9} "
                    f"{len(result.runs):4} {result.num_step_backs:4}  ({time.process_time() - started:.1f} CPU s)",
                    flush=True,
                )
    print(
        f"widest: formulas {worst['formulas']:.1%}, probed profile {worst['probed']:.1%}; {over} runs over the budget"
    )


if __name__ == "__main__":
    main()
