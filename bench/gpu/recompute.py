"""Seconds of a step at three caps: recompute chosen layer by layer, one number for all, every n-th layer.

All three choose by the same probed bytes and must fit the same cap; the cap lies 25, 50 and 75 % of the way from the
peak with everything recomputed to that with nothing. One number: the first n blocks of the language model, the vision
tower all or none, the least n that fits. Every n-th: the largest n that fits. Measured: the median of three whole
steps.
"""

from collections.abc import Callable, Iterable
from typing import Any

from bench.gpu.memory import CAPS, probe, tiny_trainee, trainees
from bench.gpu.setting import Case, Setting
from bench.gpu.training import Trainee, every_nth, first_n, names_of

from trimtab.partition.stages import split_stages
from trimtab.specs import Stage


def cases(setting: Setting) -> list[Case]:
    return [
        Case(name=name, run=lambda make=make: compare(make())) for name, make in trainees(setting, tiny_trainee).items()
    ]


def compare(model: Trainee) -> dict[str, Any]:
    choices = model.choices()
    full, none = (model.measure(choices[name]) for name in ("full", "none"))
    profile = probe(model, choices, full)
    num_layers = len(model.spec.layers)
    rows: dict[str, Any] = {"none": {"step_s": none.step_s}, "full": {"step_s": full.step_s}}
    for share in CAPS:
        cap = full.peak_bytes + share * (none.peak_bytes - full.peak_bytes)

        def fits(stage: Stage, cap: float = cap) -> bool:
            return model.assess(profile, stage).peak_bytes <= cap

        found = {
            "chosen": split_stages(model.problem(profile, cap)).stages[0],
            "one number": _first(fits, (first_n(profile, model.whole(), n) for n in range(num_layers + 1))),
            "every n-th": _first(fits, (every_nth(profile, model.whole(), n) for n in range(num_layers, 0, -1))),
        }
        for rule, stage in found.items():
            if stage is None:
                rows[f"{rule} at {share:.0%}"] = {"fits": False}
                continue
            ran = model.measure(stage)
            rows[f"{rule} at {share:.0%}"] = {
                "recompute": names_of(stage),
                "step_s": ran.step_s,
                "peak_bytes": ran.peak_bytes,
                "cap_bytes": cap,
                "within_cap": ran.peak_bytes <= cap,
            }
    return {"rows": rows}


def _first(fits: Callable[[Stage], bool], stages: Iterable[Stage]) -> Stage | None:
    return next((stage for stage in stages if fits(stage)), None)
