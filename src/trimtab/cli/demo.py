"""`trimtab demo`: draw a data set, then everything `size`, `plan` and `report` do on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.data import WORKERS, SizingOptions, size_data
from trimtab.cli.output import JsonOption, console, log, print_json, progress

if TYPE_CHECKING:
    from trimtab.demo.draw import DemoData

_ONE_WORKER = 5000  # samples up to which starting another process costs more than it saves
_MAX_TILES = 4  # and a thumbnail, as the OmniBal paper trains this model; its own limit of 12 suits inference


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the data set, the plan and the report.")] = Path("trimtab-demo"),
    model: Annotated[str, typer.Option(help="A shipped description or a config.json.")] = "InternVL-Chat-V1-5",
    cluster: Annotated[str, typer.Option(help="Devices to plan for.")] = "32xA100-80GB",
    num_samples: Annotated[int, typer.Option(min=50, max=100_000, help="Samples to draw.")] = 2000,
    max_tiles: Annotated[
        int | None, typer.Option(min=1, help="Most tiles of an image; default: 4 where the model has tiles.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same data and plan.")] = 0,
    workers: Annotated[int | None, typer.Option(help=WORKERS.text, min=1, max=1024)] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole flow on a small data set of real images that is drawn here: no download, no GPU, no torch."""
    from trimtab.cli.show import data_files, plan_json, plan_with_progress, write_all
    from trimtab.costs.devices import parse_cluster
    from trimtab.demo.draw import write_model
    from trimtab.models.describe import describe
    from trimtab.models.images.tiles import DynamicTiling
    from trimtab.options import ReadingOptions
    from trimtab.plan.options import PlanOptions, PlanOrigin
    from trimtab.report.text import print_plan
    from trimtab.samples.sources import find_sources
    from trimtab.samples.table import save_sizing

    spec, devices = describe(model, max_tiles=max_tiles), parse_cluster(cluster)
    if max_tiles is None and isinstance(spec.image_rule, DynamicTiling):
        max_tiles = _MAX_TILES
        spec = describe(model, max_tiles=max_tiles)
    if workers is None and num_samples <= _ONE_WORKER:
        workers = 1
    data = _draw(out / "data", num_samples, seed)
    sizing = SizingOptions(reading=ReadingOptions(tokenizer=data.tokenizer), source_key="source", workers=workers)
    sized = size_data(spec, [data.data], sizing)
    save_sizing(sized, out / "sizes.npz")
    num_patches, num_tokens = int(sized.table.num_patches.sum()), int(sized.table.num_tokens.sum())
    log(f"sized them for {spec.name}: {num_patches:,} ViT patches, {num_tokens:,} tokens")
    tiles = "" if max_tiles is None else f" --max-tiles {max_tiles}"
    origin = PlanOrigin(
        command=f"trimtab demo --model {model} --cluster {cluster} --num-samples {num_samples}{tiles} --seed {seed}",
        data_files=data_files(find_sources(data.data)),
        assumptions=sized.assumptions,
    )
    details = plan_with_progress(spec, sized.table, devices, PlanOptions(seed=seed), origin)
    files = {"data": data.data, "sizes": out / "sizes.npz", **write_all(details, out / "plan")}
    files["model"] = write_model(out / "model", data.folder)
    if as_json:
        print_json({**plan_json(details, files), "data": str(data.data)})
        return
    log("")
    print_plan(details, console())
    print("\n".join(f"{name:>9}: {path}" for name, path in files.items()))


def _draw(folder: Path, num_samples: int, seed: int) -> DemoData:
    from trimtab.demo.draw import draw_dataset

    with progress("drawing") as advance:
        data = draw_dataset(
            folder, num_samples=num_samples, seed=seed, progress=lambda _what, done, total: advance(done, total)
        )
    log(f"drew {data.num_samples:,} samples with {data.num_pictures} images and a tokenizer")
    return data
