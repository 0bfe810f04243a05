"""`trimtab demo`: draw a data set, then everything `size`, `plan` and `report` do on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.data import SizingOptions, size_data
from trimtab.cli.output import JsonOption, console, log, print_json

_MAX_TILES = 4  # and a thumbnail, as the OmniBal paper trains this model; its own limit of 12 suits inference


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the data set, the plan and the report.")] = Path("trimtab-demo"),
    model: Annotated[str, typer.Option(help="A shipped description or a config.json.")] = "InternVL-Chat-V1-5",
    cluster: Annotated[str, typer.Option(help="Devices to plan for.")] = "32xA100-80GB",
    num_samples: Annotated[int, typer.Option(min=50, max=100_000, help="Samples to draw.")] = 2000,
    seed: Annotated[int, typer.Option(help="Same seed, same data and plan.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run the whole flow on a small data set of images that is drawn here: no download, no GPU, no torch."""
    from trimtab.cli.report import data_files, plan_json, plan_with_progress, write_all
    from trimtab.costs.devices import parse_cluster
    from trimtab.demo.draw import draw_dataset, write_model
    from trimtab.models.describe import describe
    from trimtab.models.images.rules import DynamicTiling
    from trimtab.options import ReadingOptions
    from trimtab.plan.options import PlanOptions, PlanOrigin
    from trimtab.report.plan_tables import print_plan
    from trimtab.samples.sources import find_sources
    from trimtab.samples.table import save_sizing

    spec, devices = describe(model), parse_cluster(cluster)
    if isinstance(spec.image_rule, DynamicTiling):
        spec = describe(model, max_tiles=_MAX_TILES)
    data = draw_dataset(out / "data", num_samples=num_samples, seed=seed) / "data.jsonl"
    log(f"drew {num_samples:,} samples with their images and a tokenizer")
    reading = ReadingOptions(tokenizer=data.with_name("tokenizer.json"))
    sized = size_data(spec, [data], SizingOptions(reading=reading, source_key="source", workers=1))
    save_sizing(sized, out / "sizes.npz")
    num_patches, num_tokens = int(sized.table.num_patches.sum()), int(sized.table.num_tokens.sum())
    log(f"sized them for {spec.name}: {num_patches:,} ViT patches, {num_tokens:,} tokens")
    origin = PlanOrigin(
        command=f"trimtab demo --model {model} --cluster {cluster} --num-samples {num_samples} --seed {seed}",
        data_files=data_files(find_sources(data)),
        assumptions=sized.assumptions,
    )
    details = plan_with_progress(spec, sized.table, devices, PlanOptions(seed=seed), origin)
    files = {"data": data, "sizes": out / "sizes.npz", **write_all(details, out / "plan")}
    files["model"] = write_model(out / "model", data.parent)
    if as_json:
        print_json({**plan_json(details, files), "data": str(data)})
        return
    log("")
    print_plan(details, console())
    print("\n".join(f"{name:>9}: {path}" for name, path in files.items()))
