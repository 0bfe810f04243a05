"""`trimtab size`: patches and tokens of every sample of a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.data import DataArgument, ImageOptions, SizingOptions
from trimtab.cli.output import JsonOption, console, log, print_json
from trimtab.cli.settings import verb
from trimtab.errors import SampleError


@verb
def size(
    data: DataArgument,
    model: Annotated[str, typer.Option(help="config.json, its folder, or a shipped description.")],
    images: ImageOptions,
    sizing: SizingOptions,
    out: Annotated[Path | None, typer.Option(help="Save the table here: a file.npz.")] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help="I/N: size every N-th part of DATA from the I-th into --set resume=FOLDER, on any machine; the "
            "same call without it joins all parts."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count images, ViT patches and LLM tokens of every sample of DATA, from image headers and the tokenizer."""
    from trimtab.cli.data import parse_shard, size_data
    from trimtab.samples.table import save_sizing

    if shard is not None:
        if out is not None:
            raise SampleError(
                "--shard was given with --out, and a shard makes no table: leave --out to the joining call"
            )
        kept = size_data(images.describe(model), data, sizing, shard=parse_shard(shard))
        log(kept.assumptions[0])
        return
    result = size_data(images.describe(model), data, sizing)
    if out is not None:
        save_sizing(result, out)
        log(f"table: {out}")
    table = result.table
    if as_json:
        print_json(
            {
                "num_samples": len(table),
                "num_read": result.num_read,
                "num_bad": len(result.bad),
                "bad": result.bad,
                "num_images": int(table.num_images.sum()),
                "num_patches": int(table.num_patches.sum()),
                "num_tokens": int(table.num_tokens.sum()),
                "max_patches": int(table.num_patches.max(initial=0)),
                "max_tokens": int(table.num_tokens.max(initial=0)),
                "patch_unit": table.patch_unit,
                "tokens_exact": table.tokens_exact,
                "assumptions": result.assumptions,
                "table": out,
            }
        )
        return
    from trimtab.report.tables import print_sizes

    print_sizes(result, console())
