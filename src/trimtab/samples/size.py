"""The pass over a data set: every sample's images, patches and tokens, and every sample that has none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

import trimtab
from trimtab.errors import ImageError, SampleError
from trimtab.files import blake2b, fingerprint_file
from trimtab.models.images.asked import AskedImages
from trimtab.models.images.clips import NO_CLIPS, AskedClips
from trimtab.options import Exif, SpecialTokens
from trimtab.samples.headers import MAX_PIXELS
from trimtab.samples.lengths import SizesAlone, holds_lengths, image_counter, read_length_parts, sizes_in
from trimtab.samples.media import MediaFolder, MediaFolders
from trimtab.samples.problems import BadKind, BadRecordError, BadSample, refuse_bad
from trimtab.samples.records import Chunk, Record, list_chunks, read_chunk
from trimtab.samples.resume import chunk_path, load_part, save_part
from trimtab.samples.rows import Conversation, read_conversation, record_id
from trimtab.samples.table import COLUMNS, Part, SizingResult, join_parts, numbers_of
from trimtab.samples.tokens import Rendered, TokenCounter, TokenizerFiles, read_tokenizer
from trimtab.samples.workers import map_in_order
from trimtab.specs import Clip, ClipRule, ImageCounts, ImageMarkup, ImageRule

Progress = Callable[[int, int], None]
MapChunks = Callable[
    [Callable[[], Callable[[Chunk], Part]], Iterable[Chunk], int, Callable[[Chunk, Part], None]], Iterator[Part]
]
"""How chunks are spread: `map_in_order` over processes here, or another that gives the same results in order."""

_BATCH = 512  # chats encoded together


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What decides a sample's sizes; goes to every worker."""

    image_rule: ImageRule
    source_key: str | None
    tokenizer: TokenizerFiles | None
    media_root: Path | None
    allow_outside: bool
    exif: Exif
    max_pixels: int
    clip_rule: ClipRule | None

    def key(self) -> str:
        """Changes when a setting does. An image rule is a frozen dataclass, so its repr tells its settings."""
        tokenizer = self.tokenizer and replace(self.tokenizer, tokenizer_json=b"", added=())
        content = blake2b(self.tokenizer.tokenizer_json + repr(self.tokenizer.added).encode()) if self.tokenizer else ""
        own = replace(self, tokenizer=tokenizer)
        return repr((trimtab.__version__, own, type(self.image_rule).__name__, content))


def size_samples(
    data: Path | str | Sequence[Path | str],
    *,
    image_rule: ImageRule,
    clip_rule: ClipRule | None = None,
    tokenizer: Path | str | None,
    chat_template: Path | None = None,
    image_markup: ImageMarkup | None = None,
    special_tokens: SpecialTokens = "template",
    media_root: Path | None = None,
    allow_outside: bool = False,
    exif: Exif = "ignore",
    max_pixels: int = MAX_PIXELS,
    max_tokens: int | None = None,
    unique_ids: bool = True,
    source_key: str | None = None,
    on_bad: Literal["error", "skip"] = "error",
    workers: int = 1,
    map_chunks: MapChunks = map_in_order,
    resume_dir: Path | None = None,
    progress: Progress | None = None,
) -> SizingResult:
    """Sizes of every sample of the files, in their order.

    Image paths are taken below `media_root` (None: the folder of the data file). Bad samples raise one `SampleError`
    that lists them, or are left out and returned (`on_bad="skip"`); a file that cannot be read at all always raises.
    `unique_ids=False` numbers a repeated id instead of refusing the sample. `source_key` names the field that says
    which data set a record comes from (text, at most 80 characters); without it the file is the source. `progress` is
    called with bytes of data files done and in all. With `resume_dir` finished chunks are kept there: a killed pass
    started again takes them over, unless data file, tokenizer or settings have changed (images are not looked at
    again). `map_chunks` spreads the chunks over processes of this machine, or elsewhere (`adapters.ray_data`). The
    result does not depend on `workers`, `map_chunks` nor on interruptions.
    """
    files = [Path(data)] if isinstance(data, Path | str) else [Path(file) for file in data]
    assumptions: list[str] = []
    ready = _hold_lengths(files)
    if ready:
        parts = [[part] for part in read_length_parts(files, image_rule)]
    else:
        how: dict[str, Any] = {"chat_template": chat_template, "markup": image_markup, "special_tokens": special_tokens}
        settings = _Settings(
            image_rule=image_rule,
            source_key=source_key,
            tokenizer=None if tokenizer is None else read_tokenizer(Path(tokenizer), **how),
            media_root=media_root,
            allow_outside=allow_outside,
            exif=exif,
            max_pixels=max_pixels,
            clip_rule=clip_rule,
        )
        assumptions += TokenCounter(settings.tokenizer).assumptions  # refuses a tokenizer before any process starts
        parts = _size_conversations(files, settings, workers, map_chunks, resume_dir, progress)
        if any(part.numbers[:, 0].any() for file_parts in parts for part in file_parts):
            assumptions.append(_EXIF_ASSUMPTION[exif])
        if isinstance(clip_rule, AskedClips) and (asked := clip_rule.sampling.shown()):
            assumptions.append(f"videos are sampled with {asked}: train with the same")
    parts = [
        _refuse_repeated(file, [_refuse_long(file, part, max_tokens) for part in file_parts], unique_ids)
        for file, file_parts in zip(files, parts, strict=True)
    ]
    every = [part for file_parts in parts for part in file_parts]
    bad, num_read = [sample for part in every for sample in part.bad], sum(part.num_read for part in every)
    if on_bad == "error" or len(bad) == num_read:
        refuse_bad(bad, num_read)
    if not num_read:
        raise SampleError(f"no sample in {', '.join(map(str, files))}: name files that hold some")
    return SizingResult(
        table=join_parts(files, parts),
        bad=tuple(bad),
        assumptions=tuple(assumptions),
        image_rule=None if ready else repr(image_rule),
        files=() if ready else tuple((str(file), fingerprint_file(file)) for file in files),
    )


def _hold_lengths(files: Sequence[Path]) -> bool:
    """Whether the files hold ready-made lengths, and not conversations."""
    if not files:
        raise SampleError("no data file was named: name at least one")
    ready = [holds_lengths(file) for file in files]
    if any(ready) and not all(ready):
        odd = files[ready.index(not ready[0])]
        raise SampleError(f"{odd} and {files[0]} are not both conversations nor both lengths: size each kind by itself")
    return ready[0]


def _size_conversations(
    files: Sequence[Path],
    settings: _Settings,
    workers: int,
    map_chunks: MapChunks,
    resume_dir: Path | None,
    progress: Progress | None,
) -> list[list[Part]]:
    rule = settings.image_rule
    if isinstance(rule, AskedImages):  # one question about all images, before any text is encoded
        alone = replace(settings, image_rule=SizesAlone(), clip_rule=None, tokenizer=None)
        seen = _size_files(files, alone, workers, map_chunks, resume_dir, None)
        rule.prepare(sizes_in([part for file_parts in seen for part in file_parts]))
    return _size_files(files, settings, workers, map_chunks, resume_dir, progress)


_EXIF_ASSUMPTION: dict[Exif, str] = {
    "ignore": "EXIF orientation is ignored, as by Image.open(...).convert('RGB')",
    "apply": "EXIF orientation is applied, as by ImageOps.exif_transpose",
}


# -- chunks -----------------------------------------------------------------------------------------------------------


def _size_files(
    files: Sequence[Path],
    settings: _Settings,
    workers: int,
    map_chunks: MapChunks,
    resume_dir: Path | None,
    progress: Progress | None,
) -> list[list[Part]]:
    """Parts of every file, lines numbered within the file."""
    total = sum(file.stat().st_size for file in files)
    done = 0

    def advance(chunk: Chunk, _part: Part) -> None:
        nonlocal done
        done += chunk.num_bytes
        if progress is not None:
            progress(min(done, total), total)

    order: list[int] = []

    def chunks() -> Iterator[Chunk]:
        for number, file in enumerate(files):
            for chunk in list_chunks(file):
                order.append(number)
                yield chunk

    parts: list[list[Part]] = [[] for _ in files]
    lines = [0] * len(files)
    with _one_core_a_worker():
        results = map_chunks(partial(_make_work, settings, resume_dir), chunks(), workers, advance)
        for position, part in enumerate(results):
            number = order[position]
            parts[number].append(_place(part, files[number], lines[number]))
            lines[number] += part.num_lines
    return parts


def _make_work(settings: _Settings, resume_dir: Path | None) -> Callable[[Chunk], Part]:
    """What a worker does with a chunk: take it from the resume folder, else size it and put it there."""
    sizer, key = _Sizer(settings), settings.key()

    def work(chunk: Chunk) -> Part:
        if resume_dir is None:
            return sizer.size(chunk)
        path = chunk_path(resume_dir, chunk, key)
        part = load_part(path)
        if part is None:
            part = sizer.size(chunk)
            save_part(path, part)
        return part

    return work


@contextmanager
def _one_core_a_worker() -> Iterator[None]:
    """Keep the tokenizer's own threads away, which would take every core for each worker."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _place(part: Part, file: Path, offset: int) -> Part:
    """Lines numbered within the file instead of the chunk, and the file named as the caller did."""
    bad = tuple(replace(sample, file=str(file), line=(sample.line or 0) + offset) for sample in part.bad)
    return replace(part, lines=part.lines + offset, bad=bad)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """One record of a chunk whose images and videos can be read."""

    line: int
    name: str | None
    source: str
    conversation: Conversation
    images: list[ImageCounts]
    clips: list[Clip]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sized:
    """One good record of a chunk, its text yet to be encoded."""

    line: int
    name: str | None
    source: str
    images: list[ImageCounts]  # and videos behind them
    chat: Rendered


class _Sizer:
    """Sizes chunks; holds the tokenizer, the resolved folders and the counts of image sizes met before."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._counter = TokenCounter(settings.tokenizer)
        self._count_image = image_counter(settings.image_rule)
        self._clip_rule = settings.clip_rule
        self._media = MediaFolders(
            settings.media_root,
            allow_outside=settings.allow_outside,
            exif=settings.exif,
            max_pixels=settings.max_pixels,
        )

    def size(self, chunk: Chunk) -> Part:
        """The chunk's samples."""
        sized: list[_Sized] = []
        with_videos: list[_Read] = []
        bad: list[BadSample] = []
        num_lines, key, media = 0, self._settings.source_key, self._media.of(chunk.file)
        for record in read_chunk(chunk, more_columns=() if key is None else (key,)):
            num_lines += 1
            if record.blank:
                continue
            name = record.key
            try:
                name = record_id(record.value) or record.key
                read = self._read(record, name, media)
                if read.clips:
                    with_videos.append(read)
                else:
                    sized.append(self._rendered(read))
            except BadRecordError as error:
                bad.append(BadSample.of(chunk.file, record.line, name, error.kind, str(error)))
        if with_videos and self._clip_rule is not None:  # one question about all of them
            self._clip_rule.prepare(clip for read in with_videos for clip in read.clips)
        for read in with_videos:
            try:
                sized.append(self._rendered(read))
            except BadRecordError as error:
                bad.append(BadSample.of(chunk.file, read.line, read.name, error.kind, str(error)))
        if with_videos:
            sized.sort(key=lambda x: x.line)
            bad.sort(key=lambda x: x.line or 0)
        tokens: list[int] = []
        for first in range(0, len(sized), _BATCH):
            tokens += self._counter.count([x.chat for x in sized[first : first + _BATCH]])
        rows = [numbers_of(x.images, num) for x, num in zip(sized, tokens, strict=True)]
        codes: dict[str, int] = {}
        source = np.array([codes.setdefault(x.source, len(codes)) for x in sized], np.int32)
        return Part(
            numbers=np.array(rows, np.int64).reshape(-1, len(COLUMNS)),
            image_patches=np.array([image.patches for x in sized for image in x.images], np.int64),
            lines=np.array([x.line for x in sized], np.int64),
            ids=tuple(x.name for x in sized) if any(x.name is not None for x in sized) else None,
            bad=tuple(bad),
            num_lines=num_lines if chunk.first_line is None else 0,
            source=source if key is not None else None,
            source_names=tuple(codes),
            patch_unit="patches",
            tokens_exact=self._counter.exact,
        )

    def _source(self, record: Record) -> str:
        key = self._settings.source_key
        if key is None:
            return ""
        name = record.value.get(key) if isinstance(record.value, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= 80:
            raise BadRecordError("type", f"field {key!r} should name the record's source in 1 to 80 characters")
        return name

    def _read(self, record: Record, name: str | None, media: MediaFolder) -> _Read:
        if record.problem is not None:
            raise record.problem
        source, conversation = self._source(record), read_conversation(record.value, images=record.images)
        try:
            num_images = len(conversation.images)
            images = [self._count_image(num_images, *media.image_size(image)) for image in conversation.images]
        except ImageError as error:
            raise BadRecordError("image", str(error)) from None
        clips: list[Clip] = []
        if conversation.videos and not isinstance(self._settings.image_rule, SizesAlone):
            if self._clip_rule is None:
                raise BadRecordError("video", f"videos of this model cannot be counted: {NO_CLIPS}")
            clips = [media.clip(video) for video in conversation.videos]
        conversation = replace(conversation, images=(), videos=())  # their bytes are not held
        return _Read(line=record.line, name=name, source=source, conversation=conversation, images=images, clips=clips)

    def _rendered(self, read: _Read) -> _Sized:
        try:
            videos = [self._clip_rule.count_clip(clip) for clip in read.clips] if self._clip_rule is not None else []
        except ImageError as error:
            raise BadRecordError("video", str(error)) from None
        chat = self._counter.render(read.conversation, read.images, videos)
        images = [*read.images, *(video.image for video in videos)]
        return _Sized(line=read.line, name=read.name, source=read.source, images=images, chat=chat)


# -- what only the whole file tells ----------------------------------------------------------------------------------


def _refuse_long(file: Path, part: Part, max_tokens: int | None) -> Part:
    if max_tokens is None:
        return part
    advice = f"more than max_tokens {max_tokens}: shorten the sample or raise the limit"
    over = np.flatnonzero(part.numbers[:, 2] > max_tokens).tolist()
    return _leave_out(file, part, {row: f"{part.numbers[row, 2]} tokens, {advice}" for row in over}, "length")


def _refuse_repeated(file: Path, parts: Sequence[Part], unique_ids: bool) -> list[Part]:
    """Leave out, or number, samples whose id an earlier sample of the file has."""
    first: dict[str, int] = {}
    result = []
    for part in parts:
        if part.ids is None:
            result.append(part)
            continue
        ids, again = list(part.ids), dict[int, str]()
        for row, name in enumerate(part.ids):
            if name is None:
                continue
            line = int(part.lines[row])
            if name not in first:
                first[name] = line
            elif unique_ids:
                again[row] = f"line {first[name]} has this id too: make ids unique, or let unique_ids=False number them"
            else:
                numbered = _numbered(name, first)
                ids[row], first[numbered] = numbered, line
        result.append(_leave_out(file, replace(part, ids=tuple(ids)), again, "id"))
    return result


def _numbered(name: str, taken: dict[str, int]) -> str:
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


def _leave_out(file: Path, part: Part, reasons: dict[int, str], kind: BadKind) -> Part:
    if not reasons:
        return part
    keep = np.ones(len(part.lines), np.bool_)
    keep[list(reasons)] = False
    bad = [
        BadSample.of(file, int(part.lines[row]), part.ids[row] if part.ids else None, kind, reason)
        for row, reason in reasons.items()
    ]
    return replace(
        part,
        numbers=part.numbers[keep],
        image_patches=None if part.image_patches is None else part.image_patches[np.repeat(keep, part.numbers[:, 0])],
        lines=part.lines[keep],
        ids=tuple(name for name, kept in zip(part.ids, keep.tolist(), strict=True) if kept) if part.ids else None,
        source=part.source[keep] if part.source is not None else None,
        bad=tuple(sorted((*part.bad, *bad), key=lambda sample: sample.line or 0)),
    )
