"""What `size` and `plan` share: the options that say how a data set is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trimtab.errors import SampleError

if TYPE_CHECKING:
    from trimtab.samples.table import SizingResult
    from trimtab.specs import ModelSpec

DataArgument = Annotated[
    list[Path], typer.Argument(help="JSONL, JSON, Parquet, WebDataset tar, ready-made lengths, or a saved table.")
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="tokenizer.json or its folder; without it tokens are estimated."),
]
TemplateOption = Annotated[Path | None, typer.Option(help="Chat template, where it does not lie beside the tokenizer.")]
MediaRootOption = Annotated[Path | None, typer.Option(help="Folder that image paths start from; else the data file's.")]
AllowOutsideOption = Annotated[bool, typer.Option("--allow-outside", help="Read images outside the media root too.")]
ExifOption = Annotated[
    Literal["ignore", "apply"], typer.Option(help="Turn images as their EXIF flag says; most trainers ignore it.")
]
OnBadOption = Annotated[Literal["error", "skip"], typer.Option(help="Stop at bad samples, or leave them out, listed.")]
MaxLengthOption = Annotated[int | None, typer.Option(min=1, help="A sample with more tokens is a bad one.")]
SourceKeyOption = Annotated[str | None, typer.Option(help="Field of a record that names its data set; else its file.")]
NumberIdsOption = Annotated[bool, typer.Option("--number-ids", help="Number repeated ids instead of refusing them.")]
SpecialTokensOption = Annotated[
    Literal["template", "processor"],
    typer.Option(help="Special tokens: as the chat template writes them, or as the model's processor adds them."),
]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Processes, one per core by default; never change a result.")
]
EngineOption = Annotated[
    Literal["local", "ray"],
    typer.Option(help="Where sizing runs: processes here, or a Ray cluster (RAY_ADDRESS); never changes a result."),
]
ResumeOption = Annotated[Path | None, typer.Option(help="Folder that keeps finished chunks, to go on after a kill.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a data set is read, as the user chose."""

    tokenizer: Path | None = None
    chat_template: Path | None = None
    special_tokens: Literal["template", "processor"] = "template"
    media_root: Path | None = None
    allow_outside: bool = False
    exif: Literal["ignore", "apply"] = "ignore"
    on_bad: Literal["error", "skip"] = "error"
    max_length: int | None = None
    source_key: str | None = None
    number_ids: bool = False
    workers: int | None = None
    engine: Literal["local", "ray"] = "local"
    resume: Path | None = None


def size_data(model: ModelSpec, data: Sequence[Path], reading: Reading) -> SizingResult:
    """Size DATA for a model with a progress bar, naming every skipped sample on stderr; or load saved tables."""
    import os

    from trimtab.cli.output import log, progress
    from trimtab.models.families.known import family_of
    from trimtab.samples.size import MapChunks, size_samples
    from trimtab.samples.table import is_saved_table
    from trimtab.samples.workers import map_in_order

    saved = [path.is_file() and is_saved_table(path) for path in data]
    if all(saved):
        return load_saved(model, data, reading)
    if any(saved):
        raise SampleError(
            f"{data[saved.index(True)]} is a saved table and {data[saved.index(False)]} is not: size the rest first"
        )
    workers = reading.workers or os.cpu_count() or 1
    map_chunks: MapChunks = map_in_order
    if reading.engine == "ray":
        from trimtab.adapters.ray_data import count_cpus, map_on_ray

        workers, map_chunks = reading.workers or count_cpus(), map_on_ray
    with progress("sizing") as advance:
        result = size_samples(
            data,
            image_rule=model.image_rule,
            tokenizer=reading.tokenizer,
            chat_template=reading.chat_template,
            image_markup=family_of(model.family).markup or model.image_markup,
            special_tokens=reading.special_tokens,
            media_root=reading.media_root,
            allow_outside=reading.allow_outside,
            exif=reading.exif,
            max_tokens=reading.max_length,
            unique_ids=not reading.number_ids,
            source_key=reading.source_key,
            on_bad=reading.on_bad,
            workers=workers,
            map_chunks=map_chunks,
            resume_dir=reading.resume,
            progress=advance,
        )
    for bad in result.bad:
        log(f"skipped {bad}")
    return result


def load_saved(model: ModelSpec, tables: Sequence[Path], reading: Reading) -> SizingResult:
    """Saved tables as one, with what was skipped and assumed when they were made; refused if for other image sizes."""
    from trimtab.cli.output import log
    from trimtab.samples.lengths import saved_part
    from trimtab.samples.table import SizingResult, join_parts, load_sizing

    ignored = [field.name for field in fields(reading) if getattr(reading, field.name) != field.default]
    if ignored:
        log(f"warning: {', '.join(ignored)} change nothing: {tables[0]} is sized already")
    results = [load_sizing(path) for path in tables]
    for path, result in zip(tables, results, strict=True):
        if result.image_rule not in (None, repr(model.image_rule)):
            raise SampleError(
                f"{path} was sized by the image rule {result.image_rule}, and {model.name} counts images by "
                f"{model.image_rule}: size the data for this model, with the same --max-tiles or --max-pixels"
            )
    return SizingResult(
        table=results[0].table if len(results) == 1 else join_parts(tables, [[saved_part(r.table)] for r in results]),
        bad=tuple(bad for result in results for bad in result.bad),
        assumptions=tuple(dict.fromkeys(sentence for result in results for sentence in result.assumptions)),
        num_read=sum(result.num_read for result in results),
        image_rule=results[0].image_rule,
    )
