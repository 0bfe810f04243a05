"""Plans for tests: the small one of tests/golden, and those of data files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab import describe, load_plan, make_plan, parse_cluster, size_samples, write_plan
from trimtab.files import fingerprint_file
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.plan.plan import DataFile, Plan

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_v1_0.yaml"


def small_plan() -> Plan:
    return load_plan(GOLDEN)


def origin_of(*files: Path) -> PlanOrigin:
    """What a plan of these files says of where it comes from."""
    named = (DataFile(path=str(x), num_bytes=x.stat().st_size, blake2b=fingerprint_file(x)) for x in files)
    return PlanOrigin(command="trimtab plan", data_files=tuple(named))


def size_and_plan(files: Sequence[Path], out: Path, *, max_pixels: int | None = None, **options: Any) -> Path:
    """A plan for Qwen2.5-VL-7B on 8 devices as dp 4, of files that are sized without a tokenizer."""
    model = describe("Qwen2.5-VL-7B", max_pixels=max_pixels)
    sized = size_samples(list(files), image_rule=model.image_rule, tokenizer=None, on_bad="skip")
    chosen = PlanOptions(**({"dp": 4, "pp": 2, "num_microbatches": 2} | options))
    write_plan(make_plan(model, sized.table, parse_cluster("8xA100-80GB"), chosen, origin=origin_of(*files)), out)
    return out
