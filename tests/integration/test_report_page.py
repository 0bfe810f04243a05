"""The report as a headless Chromium shows it, and its script against our own simulator. Needs node, and for the former

npm install @sparticuz/chromium@131 puppeteer-core@23

in a folder that TRIMTAB_CHROME names, or globally. TRIMTAB_SHOTS names a folder for screenshots.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from trimtab.costs.devices import parse_cluster
from trimtab.models.describe import describe
from trimtab.partition.schedules import peak_saved_bytes, splits_backward
from trimtab.partition.simulate import StageTimes, block_costs, simulate
from trimtab.plan.build import make_plan
from trimtab.plan.decide.what_if import capped_splits
from trimtab.plan.file.details import PlanDetails
from trimtab.plan.options import PlanOptions
from trimtab.report.html import html_report

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import report_fixtures as fixtures
from plan_cases import tile_samples

pytestmark = pytest.mark.integration

NODE = shutil.which("node")
if NODE is None:
    pytest.skip("node is not installed", allow_module_level=True)

SCHEDULES = [("1F1B", 4, 1), ("GPipe", 4, 1), ("Interleaved1F1B", 3, 2), ("ZBH1", 4, 1), ("ZBVZeroBubble", 3, 2)]


def chrome_modules() -> Path:
    """The folder whose node_modules hold Chromium and its driver."""
    places = [os.environ.get("TRIMTAB_CHROME")]
    if shutil.which("npm"):
        root = subprocess.run(["npm", "root", "-g"], capture_output=True, text=True, check=False).stdout.strip()
        places.append(str(Path(root).parent) if root else None)
    for place in filter(None, places):
        if all((Path(place) / "node_modules" / name).is_dir() for name in ("@sparticuz/chromium", "puppeteer-core")):
            return Path(place)
    pytest.skip("npm install @sparticuz/chromium@131 puppeteer-core@23, and name the folder in TRIMTAB_CHROME")


@pytest.mark.parametrize(("schedule", "P", "V"), SCHEDULES)
def test_the_pages_step_is_that_of_the_simulator(schedule: str, P: int, V: int) -> None:
    rng = np.random.default_rng(P)
    S, GIB = P * V, 2**30
    f, b, sends = rng.uniform(0.5, 2.0, S), rng.uniform(1.0, 4.0, S), rng.uniform(0.0, 0.3, (2, S))
    saved, transient, state = rng.uniform(1.0, 3.0, (3, S)) * GIB
    whole = saved * rng.uniform(1.0, 2.0, S)
    counts = [P, 2 * P, 4 * P] if schedule == "Interleaved1F1B" else [1, 2, P, 2 * P + 1, 17]
    expected, seconds = [], None
    for M in counts:
        tiled = [np.tile(x[:, None], M) for x in (f, b, *sends, 0.4 * b)]
        times = StageTimes(
            forward_s=tiled[0],
            backward_s=tiled[1],
            send_forward_s=tiled[2],
            send_backward_s=tiled[3],
            weight_s=tiled[4],
        )
        line = simulate(times, schedule=schedule, num_devices=P)
        shape = {"num_devices": P, "num_chunks": V, "num_microbatches": M}
        peaks = peak_saved_bytes(saved, schedule, **shape, pending_bytes=whole)
        own = [np.flatnonzero(np.array(line.stage_devices) == device) for device in range(P)]
        held = [state[x].sum() + peak + transient[x].max() + GIB for x, peak in zip(own, peaks, strict=True)]
        expected.append((line.makespan_s + 0.5, line.bubble_ratio, held))
        seconds = block_costs(times, schedule).seconds[:, :, 0]
    data = {
        "schedule": schedule,
        "apart": splits_backward(schedule),
        "num_devices": P,
        "reserve_bytes": GIB,
        "reserve_share": 0.0,
    }
    split = {"update_s": 0.5, "seconds": seconds.tolist(), "sends": sends.tolist()}
    split |= {"saved_bytes": saved.tolist(), "whole_bytes": whole.tolist()}
    split |= {"transient_bytes": transient.tolist(), "state_bytes": state.tolist()}
    script = files("trimtab.report").joinpath("what_if.js").read_text(encoding="utf-8")
    ask = f"{json.dumps(counts)}.map(M => simulateStep({json.dumps(data)}, {json.dumps(split)}, M))"
    run = subprocess.run(
        [NODE, "-e", f"{script}\nconsole.log(JSON.stringify({ask}))"], capture_output=True, text=True, check=True
    )
    for said, (step_s, idle, held) in zip(json.loads(run.stdout), expected, strict=True):
        assert said["step_s"] == pytest.approx(step_s, rel=1e-9)
        assert said["idle"] == pytest.approx(idle, rel=1e-9)
        assert said["peak_bytes"] == pytest.approx(held, rel=1e-9)


def plan_of(model: str, cluster: str, **options: object) -> PlanDetails:
    return make_plan(describe(model), tile_samples(600), parse_cluster(cluster), PlanOptions(**options))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    """What Chromium says of every page at every width, light and dark."""
    modules, folder = chrome_modules(), tmp_path_factory.mktemp("pages")
    pages = {
        "pipeline": plan_of("InternVL-Chat-V1-5", "16xA100-80GB", pp=4, tp=2),
        "data-parallel": plan_of("InternVL-Chat-V1-5", "64xA100-80GB", pp=1, tp=1),
        "open": plan_of("Qwen2.5-VL-7B", "8xA100-80GB"),
        "misfit": fixtures.internvl_details(),
        "crowded": fixtures.crowded_details(),
    }
    for name, details in pages.items():
        run = fixtures.make_run() if name == "misfit" else None
        (folder / f"{name}.html").write_text(html_report(details, run=run), encoding="utf-8")
    told = subprocess.run(
        [NODE, Path(__file__).with_name("report_page.mjs"), modules, os.environ.get("TRIMTAB_SHOTS", "")]
        + [folder / f"{name}.html" for name in pages],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    views = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(views) == 6 * len(pages)
    found = {name: [view for view in views if Path(view["file"]).stem == name] for name in pages}
    found["plan"] = pages["pipeline"]
    return found


@pytest.mark.parametrize("problem", ["errors", "faint", "outside", "hidden", "broken", "scrolled"])
def test_nothing_is_wrong_at_any_width_light_or_dark(seen, problem: str) -> None:
    """Console errors, contrast under 4.5, text outside, labels under marks, names broken before "]", tables cut."""
    wrong = {
        f"{name} {view['width']} {view['scheme']}": view[problem]
        for name, views in seen.items()
        if name != "plan"
        for view in views
        if view[problem] or view["overflow"] > 0
    }
    assert not wrong


def test_the_sliders_give_the_simulators_step(seen) -> None:
    details: PlanDetails = seen["plan"]
    (slid,) = [view["slid"] for view in seen["pipeline"] if view["slid"]]
    least = capped_splits(details.case, details.variants[-1].stages)[-1]
    assert slid["microbatches"] == "3"
    assert slid["cap"] == f"{least.cap_bytes / 2**30:.1f} GiB"
    tiled = [np.tile(x[:, None], 3) for x in (*least.seconds[:2], *least.sends)]
    times = StageTimes(forward_s=tiled[0], backward_s=tiled[1], send_forward_s=tiled[2], send_backward_s=tiled[3])
    line = simulate(times)
    assert float(slid["step"].split()[0]) == pytest.approx(line.makespan_s + least.update_s, rel=0.01)
    assert slid["idle"] == f"{100 * line.bubble_ratio:.1f} %"
    assert slid["fits"] == "fits"
