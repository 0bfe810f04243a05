"""The pass over a data set: every sample's images, patches and tokens, and every sample that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from trimtab.address import Address, Allowed, place_of
from trimtab.errors import SampleError, shorten
from trimtab.files import fingerprint_file
from trimtab.models.images.asked import AskedClips, AskedImages
from trimtab.models.images.rules import write_rule
from trimtab.options import Exif, SpecialTokens
from trimtab.samples.lengths import SizesAlone, holds_lengths, read_length_parts, sizes_in
from trimtab.samples.problems import BadSample, Chunk, refuse_bad
from trimtab.samples.records import list_chunks
from trimtab.samples.shapes import read_columns
from trimtab.samples.sizer import SizerSettings, ask_assumptions, size_chunks
from trimtab.samples.sources import SourceFile, find_sources, source_labels
from trimtab.samples.table import (
    Part,
    SizedFile,
    SizingResult,
    join_parts,
    leave_out_long,
    number_repeated,
    repeat_samples,
)
from trimtab.samples.tokens import read_tokenizer
from trimtab.specs import ClipRule, ImageMarkup, ImageRule

_MOST_NAMED = 12  # fields in one assumption
_MAX_BAD = 1000  # samples: when so many are bad, something is wrong with all of them
Progress = Callable[[int, int], None]


def size_samples(
    data: Path | str | Sequence[Path | str],
    *,
    image_rule: ImageRule,
    clip_rule: ClipRule | None = None,
    tokenizer: Path | str | None,
    chat_template: Path | None = None,
    image_markup: ImageMarkup | None = None,
    special_tokens: SpecialTokens = "template",
    media_root: Path | str | None = None,
    allow_outside: bool = False,
    allow_remote: bool = False,
    exif: Exif = "ignore",
    max_tokens: int | None = None,
    source_key: str | None = None,
    columns: str | None = None,
    on_bad: Literal["error", "skip"] = "error",
    workers: int = 1,
    resume_dir: Path | str | None = None,
    progress: Progress | None = None,
) -> SizingResult:
    """Return the sizes of every sample of the data, in its order.

    Use this before you plan or pack. It reads the headers of images and counts tokens; no picture is decoded. The
    result's `table` has a row for every sample; without a tokenizer tokens are estimated.

    `data` is what `find_sources` takes: files, folders, addresses such as s3://, InternVL's meta file.
    Image paths are taken below `media_root` (None: the folder of the data file). What a record or a list of data sets
    names lies below its folder or `media_root`, unless `allow_outside`, and is no address unless `allow_remote`. Bad
    samples raise one `SampleError` that lists them, or are left out and returned (`on_bad="skip"`); a file that cannot
    be read at all always raises. `source_key` names the field that says which data set a record comes from (text, at
    most 80 characters); without it what was named is the source. `columns` says what fields of another shape mean, as
    in question=query,answer=label,image=img.
    `progress` is called with bytes of data files done and in all. With `resume_dir` finished chunks are
    kept there: a killed pass started again takes them over, unless data file, images (by size and time; not those
    behind an address), tokenizer or settings have changed. The result does not depend on `workers` nor interruptions.

    >>> import json, tempfile
    >>> from trimtab import describe
    >>> path = Path(tempfile.mkdtemp()) / "data.jsonl"
    >>> talk = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good morning"}]
    >>> _ = path.write_text(json.dumps({"id": "a", "conversations": talk}))
    >>> size_samples(path, image_rule=describe("Qwen2.5-VL-7B").image_rule, tokenizer=None).table.num_tokens.tolist()
    [13]
    """
    allowed = Allowed(outside=allow_outside, remote=allow_remote)
    sources = find_sources(data, media_root, allowed)
    kept_in, root = (None if given is None else place_of(given) for given in (resume_dir, media_root))
    _refuse_other_tiles(sources, image_rule)
    assumptions = list(dict.fromkeys(source.note for source in sources if source.note))
    ready = _hold_lengths([source.file for source in sources])
    if ready:
        parts = [[part] for part in read_length_parts([source.file for source in sources], image_rule)]
    else:
        how: dict[str, Any] = {"chat_template": chat_template, "markup": image_markup, "special_tokens": special_tokens}
        settings = SizerSettings(
            image_rule=image_rule,
            source_key=source_key,
            tokenizer=None if tokenizer is None else read_tokenizer(Path(tokenizer), **how),
            media_root=root,
            allowed=allowed,
            exif=exif,
            clip_rule=clip_rule,
            columns=read_columns(columns),
            network=allow_remote or _is_remote(sources, root),
        )
        assumptions += ask_assumptions(settings)  # refuses a tokenizer before anything is read
        most_bad = _MAX_BAD if on_bad == "error" else None
        size_all = partial(_size_files, sources, workers=workers, kept_in=kept_in, most_bad=most_bad)
        if isinstance(image_rule, AskedImages):  # one question about all images, before any text is encoded
            seen = size_all(replace(settings, image_rule=SizesAlone(), clip_rule=None, tokenizer=None))
            image_rule.prepare(sizes_in([part for file_parts in seen for part in file_parts]))
        parts = size_all(settings, progress=progress)
        assumptions += _said_of([part for file_parts in parts for part in file_parts], exif)
        if isinstance(clip_rule, AskedClips) and (asked := clip_rule.sampling.shown()):
            assumptions.append(f"videos are sampled with {asked}: train with the same")
    parts = [_left_in(source, file_parts, max_tokens) for source, file_parts in zip(sources, parts, strict=True)]
    named = [number_repeated(file_parts) for file_parts in parts]
    if num := _num_renamed(parts, named):
        assumptions.append(f"{num:,} samples have the id of an earlier one, and are numbered, as in a, a#2")
    parts = named
    return _result(sources, parts, on_bad, assumptions, None if ready else write_rule(image_rule))


def _num_renamed(before: list[list[Part]], after: list[list[Part]]) -> int:
    pairs = zip(chain(*before), chain(*after), strict=True)
    return sum(one != other for a, b in pairs for one, other in zip(a.ids or (), b.ids or (), strict=True))


def _said_of(parts: Sequence[Part], exif: Exif) -> Iterator[str]:
    """Yield what the sizes of these records assume."""
    unused = sorted({name for part in parts for name in part.unused})
    if unused:
        named = ", ".join(map(shorten, unused[:_MOST_NAMED])) + (", ..." if len(unused) > _MOST_NAMED else "")
        yield f"fields that are not read: {named} (--columns says what a field means)"
    if num_pairs := sum(part.num_pairs for part in parts):
        yield f"{num_pairs:,} samples are pairs of answers: each is two sequences, with its images twice"
    if any(part.numbers[:, 0].any() for part in parts):
        yield _EXIF_ASSUMPTION[exif]


def _is_remote(sources: Sequence[SourceFile], root: Path | None) -> bool:
    """Return whether the user named an address: then a process that reads has a network."""
    places = [place for source in sources for place in (source.file, source.media_root)]
    return any(isinstance(place, Address) for place in [*places, root])


def _left_in(source: SourceFile, parts: list[Part], max_tokens: int | None) -> list[Part]:
    """Return a file's parts without samples that are too long, as often as a list asks for it."""
    return repeat_samples([leave_out_long(source.file, part, max_tokens) for part in parts], source.repeat)


def _result(
    sources: Sequence[SourceFile],
    parts: list[list[Part]],
    on_bad: Literal["error", "skip"],
    assumptions: Sequence[str],
    image_rule: str | None,
) -> SizingResult:
    """Return what was sized as one table; `image_rule`: by which, None for lengths that were there."""
    every = [part for file_parts in parts for part in file_parts]
    bad, num_read = [sample for part in every for sample in part.bad], sum(part.num_read for part in every)
    if on_bad == "error" or len(bad) == num_read:
        refuse_bad(bad, num_read)
    if not num_read:
        raise SampleError(f"no sample in {', '.join(str(x.file) for x in sources)}: name files that hold some")
    return SizingResult(
        table=join_parts([source.file for source in sources], parts, source_labels(sources)),
        bad=tuple(bad),
        assumptions=tuple(assumptions),
        image_rule=image_rule,
        files=() if image_rule is None else tuple(map(_sized_file, sources)),
    )


def _sized_file(source: SourceFile) -> SizedFile:
    root = None if source.media_root is None else str(source.media_root)
    return SizedFile(path=str(source.file), blake2b=fingerprint_file(source.file), media_root=root)


def _refuse_other_tiles(sources: Sequence[SourceFile], rule: ImageRule) -> None:
    """Refuse a list of data sets with a limit of tiles of its own, which training would not keep to."""
    own = getattr(rule, "max_tiles", None)
    other = [source for source in sources if source.max_tiles not in (None, own)]
    if other:
        raise SampleError(
            f"{other[0].named}: {shorten(str(other[0].name))!r} has max_dynamic_patch {other[0].max_tiles}, not "
            f"max_tiles {own}: give one to all"
        )


def _hold_lengths(files: Sequence[Path]) -> bool:
    """Return whether the files hold ready-made lengths, and not conversations."""
    ready = [holds_lengths(file) for file in files]
    if any(ready) and not all(ready):
        odd = files[ready.index(not ready[0])]
        raise SampleError(f"{odd} and {files[0]} are not both conversations nor both lengths: size each kind by itself")
    return ready[0]


_EXIF_ASSUMPTION: dict[Exif, str] = {
    "ignore": "EXIF orientation is ignored, as by Image.open(...).convert('RGB')",
    "apply": "EXIF orientation is applied, as by ImageOps.exif_transpose",
}


# -- chunks -----------------------------------------------------------------------------------------------------------


def _size_files(
    sources: Sequence[SourceFile],
    settings: SizerSettings,
    *,
    workers: int,
    kept_in: Path | None,
    most_bad: int | None,
    progress: Progress | None = None,
) -> list[list[Part]]:
    """Return the parts of every file, lines numbered within the file.

    Where they hold more than `most_bad` bad samples nothing more is read, and all that there are so far are raised.
    """
    files = [source.file for source in sources]
    total = sum(file.stat().st_size for file in files)
    done = 0

    def advance(chunk: Chunk) -> None:
        nonlocal done
        done += chunk.num_bytes
        if progress is not None:
            progress(min(done, total), total)

    order: list[int] = []

    def chunks() -> Iterator[Chunk]:
        for number, source in enumerate(sources):
            for chunk in list_chunks(source.file):
                order.append(number)
                yield replace(chunk, media_root=source.media_root, columns=source.columns)

    parts: list[list[Part]] = [[] for _ in files]
    lines = [0] * len(files)
    bad: list[BadSample] = []
    how: dict[str, Any] = {"kept_in": kept_in, "most_bad": most_bad, "on_result": advance}
    for position, part in enumerate(size_chunks(settings, chunks(), workers, **how)):
        number = order[position]
        parts[number].append(_place(part, files[number], lines[number]))
        lines[number] += part.num_lines
        bad += parts[number][-1].bad
        if most_bad is not None and len(bad) > most_bad:
            num_read = sum(part.num_read for file_parts in parts for part in file_parts)
            refuse_bad(bad, num_read, of="the first ")
    return parts


def _place(part: Part, file: Path, offset: int) -> Part:
    """Return lines numbered within the file instead of the chunk, and the file named as the caller did."""
    bad = tuple(replace(sample, file=str(file), line=(sample.line or 0) + offset) for sample in part.bad)
    return replace(part, lines=part.lines + offset, bad=bad)
