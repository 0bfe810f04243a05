"""`trimtab size`: patches and tokens of every sample of a data set."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.data import (
    AllowOutsideOption,
    DataArgument,
    EngineOption,
    ExifOption,
    MaxLengthOption,
    MediaRootOption,
    NumberIdsOption,
    OnBadOption,
    ResumeOption,
    SourceKeyOption,
    SpecialTokensOption,
    TemplateOption,
    TokenizerOption,
    WorkersOption,
)
from trimtab.cli.describe import MaxPixelsOption, MaxTilesOption, PreprocessorOption
from trimtab.cli.output import JsonOption, console, log, print_json


def size(
    data: DataArgument,
    model: Annotated[str, typer.Option(help="config.json, its folder, or a shipped description.")],
    tokenizer: TokenizerOption = None,
    chat_template: TemplateOption = None,
    special_tokens: SpecialTokensOption = "template",
    preprocessor: PreprocessorOption = None,
    max_pixels: MaxPixelsOption = None,
    max_tiles: MaxTilesOption = None,
    media_root: MediaRootOption = None,
    allow_outside: AllowOutsideOption = False,
    exif: ExifOption = "ignore",
    on_bad: OnBadOption = "error",
    max_length: MaxLengthOption = None,
    source_key: SourceKeyOption = None,
    number_ids: NumberIdsOption = False,
    workers: WorkersOption = None,
    engine: EngineOption = "local",
    resume: ResumeOption = None,
    out: Annotated[Path | None, typer.Option(help="Save the table here: .parquet or .npz.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Count images, ViT patches and LLM tokens of every sample of DATA, from image headers and the tokenizer."""
    from trimtab.cli.data import Reading, size_data
    from trimtab.models.describe import describe
    from trimtab.samples.table import save_sizing

    result = size_data(
        describe(model, preprocessor=preprocessor, max_pixels=max_pixels, max_tiles=max_tiles),
        data,
        Reading(
            tokenizer=tokenizer,
            chat_template=chat_template,
            special_tokens=special_tokens,
            media_root=media_root,
            allow_outside=allow_outside,
            exif=exif,
            on_bad=on_bad,
            max_length=max_length,
            source_key=source_key,
            number_ids=number_ids,
            workers=workers,
            engine=engine,
            resume=resume,
        ),
    )
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
                "bad": [asdict(bad) for bad in result.bad],
                "num_images": int(table.num_images.sum()),
                "num_patches": int(table.num_patches.sum()),
                "num_tokens": int(table.num_tokens.sum()),
                "max_patches": int(table.num_patches.max(initial=0)),
                "max_tokens": int(table.num_tokens.max(initial=0)),
                "patch_unit": table.patch_unit,
                "tokens_exact": table.tokens_exact,
                "assumptions": result.assumptions,
                "table": None if out is None else str(out),
            }
        )
        return
    from trimtab.report.tables import print_sizes

    print_sizes(result, console())
