"""A plan of one stage for a tiny model, and the bench that a probe runs it on, for the probe's tests. Needs torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train_runs import write_run

import trimtab
from trimtab.plan.decide.probed import with_budget
from trimtab.plan.file.reload import reload_plan
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.runtime.probe.trial import Bench, frozen_heap, open_bench
from trimtab.runtime.ranks import process_group
from trimtab.runtime.training.settings import ProbeSettings
from trimtab.units import MIB


def write_probed(folder: Path, family: str) -> None:
    """model/, data/, and plans alone/ for one stage and two/ for two."""
    write_run(folder, family, dp=1)
    found = reload_plan(folder / "plan")
    setting = found.case.setting
    for name, pp in (("alone", 1), ("two", 2)):
        options = PlanOptions(
            dp=1,
            pp=pp,
            tp=1,
            num_microbatches=2 * pp,
            dtype="fp32",
            attention="sdpa",
            schedule="1F1B",
            zero_stage=0,
            max_patches=setting.max_patches,
            max_tokens=setting.max_tokens,
        )
        details = trimtab.make_plan(
            found.case.model,
            found.case.samples,
            trimtab.parse_cluster(f"{pp}xA100-80GB"),
            options,
            origin=PlanOrigin(data_files=found.plan.inputs.data.files),
        )
        trimtab.write_plan(details, folder / name)


def settings_of(folder: Path, memory_mib: float | None = None, **more: object) -> ProbeSettings:
    memory = None if memory_mib is None else int(memory_mib * MIB)
    given = {"plan": folder / "alone", "risk": 0.5, "device": "cpu", "memory_bytes": memory, **more}
    return ProbeSettings(model=folder / "model", **given)


@contextmanager
def bench_of(settings: ProbeSettings) -> Iterator[Bench]:
    found = reload_plan(settings.plan)
    case = with_budget(found.case, memory_bytes=settings.memory_bytes, risk=settings.risk, allocator=False)
    with process_group("cpu") as ranks:
        bench = open_bench(settings, found, case, ranks, lambda _: None)
        with frozen_heap():
            yield bench
