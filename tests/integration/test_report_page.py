"""The report as a headless Chromium shows it. Needs node, and

npm install @sparticuz/chromium@131 puppeteer-core@23

in a folder that TRIMTAB_CHROME names, or globally. TRIMTAB_SHOTS names a folder for screenshots.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab import PlanDetails, PlanOptions, describe, make_plan, parse_cluster
from trimtab.report.html import html_report

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import report_fixtures as fixtures
from plan_cases import tile_samples

pytestmark = pytest.mark.integration

NODE = shutil.which("node")
if NODE is None:
    pytest.skip("node is not installed", allow_module_level=True)


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
    return {name: [view for view in views if Path(view["file"]).stem == name] for name in pages}


@pytest.mark.parametrize("problem", ["errors", "faint", "outside", "hidden", "broken", "scrolled"])
def test_nothing_is_wrong_at_any_width_light_or_dark(seen, problem: str) -> None:
    """Console errors, contrast under 4.5, text outside, labels under marks, names broken before "]", tables cut."""
    wrong = {
        f"{name} {view['width']} {view['scheme']}": view[problem]
        for name, views in seen.items()
        for view in views
        if view[problem] or view["overflow"] > 0
    }
    assert not wrong
