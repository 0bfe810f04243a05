"""The pass over a data set: every sample's images, patches and tokens, and every sample that has none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

import trimtab
from trimtab.errors import ImageError, SampleError
from trimtab.files import blake2b, fingerprint_file
from trimtab.models.images.asked import AskedImages
from trimtab.models.images.clips import NO_CLIPS, AskedClips
from trimtab.models.images.written import write_rule
from trimtab.options import Exif, SpecialTokens
from trimtab.samples.chunks import Chunk, Record
from trimtab.samples.headers import MAX_PIXELS
from trimtab.samples.lengths import SizesAlone, holds_lengths, image_counter, read_length_parts, sizes_in
from trimtab.samples.media import MediaFolder, MediaFolders
from trimtab.samples.problems import BadRecordError, BadSample, refuse_bad, shorten
from trimtab.samples.records import list_chunks, read_chunk
from trimtab.samples.resume import chunk_path, load_part, save_part
from trimtab.samples.rows import Conversation, read_conversation, record_id
from trimtab.samples.sources import MediaRoot, SourceFile, find_sources, source_labels, whole_root
from trimtab.samples.table import COLUMNS, Part, SizedFile, SizingResult, join_parts, numbers_of
from trimtab.samples.tokens import Rendered, TokenCounter, TokenizerFiles, read_tokenizer
from trimtab.samples.whole_files import refuse_long, refuse_repeated, repeat_samples
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
    media_root: MediaRoot = None,
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
    shard: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> SizingResult:
    """Sizes of every sample of the data, in its order.

    Use this before you plan or pack. It reads the headers of images and counts tokens; no picture is decoded. The
    result's `table` has a row for every sample; without a tokenizer tokens are estimated.

    `data` is what `find_sources` takes: files, folders, addresses such as s3://, names of hub data sets in the cache.
    Image paths are taken below `media_root` (None: the folder of the data file; FILE=FOLDER: of that file). Bad samples
    raise one `SampleError` that lists them, or are left out and returned (`on_bad="skip"`); a file that cannot be read
    at all always raises. `unique_ids=False` numbers a repeated id instead of refusing the sample. `source_key` names
    the field that says which data set a record comes from (text, at most 80 characters); without it what was named is
    the source. `progress` is called with bytes of data files done and in all. With `resume_dir` finished chunks are
    kept there: a killed pass started again takes them over, unless data file, tokenizer or settings have changed
    (images are not looked at again). With `shard` (i, n) only every n-th chunk from the i-th is sized and kept there,
    for any scheduler to spread over machines; the result holds no samples, and a last call without `shard` joins what
    is kept. `map_chunks` spreads the chunks over processes of this machine, or elsewhere (`adapters.ray_data`). The
    result does not depend on `workers`, `map_chunks` nor on interruptions.

    >>> import json, tempfile
    >>> from trimtab import describe
    >>> path = Path(tempfile.mkdtemp()) / "data.jsonl"
    >>> talk = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good morning"}]
    >>> _ = path.write_text(json.dumps({"id": "a", "conversations": talk}))
    >>> size_samples(path, image_rule=describe("Qwen2.5-VL-7B").image_rule, tokenizer=None).table.num_tokens.tolist()
    [13]
    """
    sources = find_sources(data, media_root)
    files = [source.file for source in sources]
    _refuse_other_tiles(sources, image_rule)
    assumptions = list(dict.fromkeys(source.note for source in sources if source.note))
    ready = _hold_lengths(files)
    _refuse_shard(shard, resume_dir, ready=ready)
    if ready:
        parts = [[part] for part in read_length_parts(files, image_rule)]
    else:
        how: dict[str, Any] = {"chat_template": chat_template, "markup": image_markup, "special_tokens": special_tokens}
        settings = _Settings(
            image_rule=image_rule,
            source_key=source_key,
            tokenizer=None if tokenizer is None else read_tokenizer(Path(tokenizer), **how),
            media_root=whole_root(sources, media_root),
            allow_outside=allow_outside,
            exif=exif,
            max_pixels=max_pixels,
            clip_rule=clip_rule,
        )
        assumptions += TokenCounter(settings.tokenizer).assumptions  # refuses a tokenizer before any process starts
        parts = _size_conversations(sources, settings, workers, map_chunks, resume_dir, shard, progress)
        if shard is not None:
            return _kept_shard(sources, shard, sum(map(len, parts)))
        if any(part.numbers[:, 0].any() for file_parts in parts for part in file_parts):
            assumptions.append(_EXIF_ASSUMPTION[exif])
        if isinstance(clip_rule, AskedClips) and (asked := clip_rule.sampling.shown()):
            assumptions.append(f"videos are sampled with {asked}: train with the same")
    parts = [
        repeat_samples(
            refuse_repeated(source.file, [refuse_long(source.file, p, max_tokens) for p in file_parts], unique_ids),
            source.repeat,
        )
        for source, file_parts in zip(sources, parts, strict=True)
    ]
    every = [part for file_parts in parts for part in file_parts]
    bad, num_read = [sample for part in every for sample in part.bad], sum(part.num_read for part in every)
    if on_bad == "error" or len(bad) == num_read:
        refuse_bad(bad, num_read)
    if not num_read:
        raise SampleError(f"no sample in {', '.join(map(str, files))}: name files that hold some")
    return SizingResult(
        table=join_parts([source.label for source in sources], parts, source_labels(sources)),
        bad=tuple(bad),
        assumptions=tuple(assumptions),
        image_rule=None if ready else write_rule(image_rule),
        files=() if ready else tuple(map(_sized_file, sources)),
    )


def _refuse_shard(shard: tuple[int, int] | None, resume_dir: Path | None, *, ready: bool) -> None:
    if shard is None:
        return
    number, count = shard
    if not 1 <= number <= count:
        raise SampleError(f"shard {number} of {count} was asked for: give I/N with I from 1 to N")
    if resume_dir is None:
        raise SampleError("a shard was asked for without a folder that keeps it: give resume_dir (--resume)")
    if ready:
        raise SampleError("a shard of ready-made lengths was asked for, which are read at once: leave the shard out")


def _kept_shard(sources: Sequence[SourceFile], shard: tuple[int, int], num_chunks: int) -> SizingResult:
    """No samples: a shard does not know on which lines of its file its own stand."""
    files = [source.label for source in sources]
    told = f"shard {shard[0]} of {shard[1]} is sized: {num_chunks} chunks are kept"
    return SizingResult(table=join_parts(files, [[] for _ in files], source_labels(sources)), assumptions=(told,))


def _sized_file(source: SourceFile) -> SizedFile:
    root = None if source.media_root is None else str(source.media_root)
    return SizedFile(path=str(source.file), blake2b=fingerprint_file(source.file), media_root=root)


def _refuse_other_tiles(sources: Sequence[SourceFile], rule: ImageRule) -> None:
    """`SampleError` where a list of data sets has a limit of tiles of its own, which training would not keep to."""
    own = getattr(rule, "max_tiles", None)
    other = [source for source in sources if source.max_tiles not in (None, own)]
    if other:
        raise SampleError(
            f"{other[0].named}: data set {shorten(str(other[0].name))!r} has max_dynamic_patch {other[0].max_tiles}, "
            f"and images are counted with max_tiles {own}: give the same to every data set and to --max-tiles"
        )


def _hold_lengths(files: Sequence[Path]) -> bool:
    """Whether the files hold ready-made lengths, and not conversations."""
    ready = [holds_lengths(file) for file in files]
    if any(ready) and not all(ready):
        odd = files[ready.index(not ready[0])]
        raise SampleError(f"{odd} and {files[0]} are not both conversations nor both lengths: size each kind by itself")
    return ready[0]


def _size_conversations(
    sources: Sequence[SourceFile],
    settings: _Settings,
    workers: int,
    map_chunks: MapChunks,
    resume_dir: Path | None,
    shard: tuple[int, int] | None,
    progress: Progress | None,
) -> list[list[Part]]:
    rule = settings.image_rule
    if isinstance(rule, AskedImages):  # one question about all images, before any text is encoded
        alone = replace(settings, image_rule=SizesAlone(), clip_rule=None, tokenizer=None)
        seen = _size_files(sources, alone, workers, map_chunks, resume_dir, shard, None)
        rule.prepare(sizes_in([part for file_parts in seen for part in file_parts]))
    return _size_files(sources, settings, workers, map_chunks, resume_dir, shard, progress)


_EXIF_ASSUMPTION: dict[Exif, str] = {
    "ignore": "EXIF orientation is ignored, as by Image.open(...).convert('RGB')",
    "apply": "EXIF orientation is applied, as by ImageOps.exif_transpose",
}


# -- chunks -----------------------------------------------------------------------------------------------------------


def _size_files(
    sources: Sequence[SourceFile],
    settings: _Settings,
    workers: int,
    map_chunks: MapChunks,
    resume_dir: Path | None,
    shard: tuple[int, int] | None,
    progress: Progress | None,
) -> list[list[Part]]:
    """Parts of every file, lines numbered within the file; of a shard its own parts alone."""
    files = [source.file for source in sources]
    total = sum(file.stat().st_size for file in files)
    done = 0

    def advance(chunk: Chunk, _part: Part) -> None:
        nonlocal done
        done += chunk.num_bytes
        if progress is not None:
            progress(min(done, total), total)

    order: list[int] = []
    turn, num_shards = (1, 1) if shard is None else shard

    def chunks() -> Iterator[Chunk]:
        every = ((number, chunk) for number, file in enumerate(files) for chunk in list_chunks(file))
        for number, chunk in islice(every, turn - 1, None, num_shards):
            order.append(number)
            yield replace(chunk, media_root=sources[number].media_root)

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
        num_lines, key, media = 0, self._settings.source_key, self._media.of(chunk.file, chunk.media_root)
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
