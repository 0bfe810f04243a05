"""The demo: everything `size`, `plan` and `report` do, on a data set drawn for the purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trimtab.cli.data import Reading, size_data
from trimtab.cli.output import log, progress
from trimtab.cli.show import data_files, plan_with_progress, write_all
from trimtab.costs.devices import parse_cluster
from trimtab.demo.draw import DemoData, draw_dataset
from trimtab.models.describe import describe
from trimtab.models.images import DynamicTiling
from trimtab.plan.details import PlanDetails
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.samples.table import save_sizing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DemoResult:
    data: DemoData
    details: PlanDetails
    files: Mapping[str, Path]  # what was written, by what it is


_MAX_TILES = 4  # and a thumbnail, as the OmniBal paper trains this model; its own limit of 12 suits inference


def run_demo(
    out: Path,
    *,
    model: str,
    cluster: str,
    num_samples: int,
    max_tiles: int | None,
    seed: int,
    workers: int | None,
) -> DemoResult:
    """Draw, size, plan, report: all of it under `out`."""
    spec, devices = describe(model, max_tiles=max_tiles), parse_cluster(cluster)
    if max_tiles is None and isinstance(spec.image_rule, DynamicTiling):
        max_tiles = _MAX_TILES
        spec = describe(model, max_tiles=max_tiles)
    with progress("drawing") as advance:
        data = draw_dataset(
            out / "data",
            num_samples=num_samples,
            seed=seed,
            progress=lambda _what, done, total: advance(done, total),
        )
    log(f"drew {data.num_samples:,} samples with {data.num_pictures} images and a tokenizer")
    sized = size_data(spec, [data.data], Reading(tokenizer=data.tokenizer, source_key="source", workers=workers))
    save_sizing(sized, out / "sizes.npz")
    num_patches, num_tokens = int(sized.table.num_patches.sum()), int(sized.table.num_tokens.sum())
    log(f"sized them for {spec.name}: {num_patches:,} ViT patches, {num_tokens:,} tokens")
    tiles = "" if max_tiles is None else f" --max-tiles {max_tiles}"
    origin = PlanOrigin(
        command=f"trimtab demo --model {model} --cluster {cluster} --num-samples {num_samples}{tiles} --seed {seed}",
        data_files=data_files([data.data]),
        assumptions=sized.assumptions,
    )
    details = plan_with_progress(spec, sized.table, devices, PlanOptions(seed=seed), origin)
    written = write_all(details, out / "plan")
    return DemoResult(data=data, details=details, files={"data": data.data, "sizes": out / "sizes.npz", **written})
