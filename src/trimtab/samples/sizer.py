"""One chunk of records as sizes: images and videos read and counted, texts encoded together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import trimtab
from trimtab.errors import ImageError
from trimtab.files import blake2b
from trimtab.limited import at
from trimtab.models.images.asked import NO_CLIPS
from trimtab.options import Exif
from trimtab.samples.chunks import TOO_DEEP, Broken, Chunk, Record
from trimtab.samples.lengths import SizesAlone, image_counter
from trimtab.samples.media import MediaFolder
from trimtab.samples.media_folders import MediaFolders
from trimtab.samples.problems import BadRecordError, BadSample, shorten
from trimtab.samples.records import read_chunk
from trimtab.samples.rows import Conversation, read_conversation, record_id
from trimtab.samples.table import COLUMNS, Part, numbers_of
from trimtab.samples.tokens import Rendered, TokenCounter, TokenizerFiles
from trimtab.specs import Clip, ClipRule, ImageCounts, ImageRule

_BATCH = 512  # chats encoded together
_BATCH_CPU_S = 120
_MADE_TO_FAIL = "fix or drop it"


_FAILURES = (BadRecordError, MemoryError, SystemError, RecursionError)
"""What reading a stranger's record may raise; the last three by libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizerSettings:
    """What decides a sample's sizes; goes to every worker."""

    image_rule: ImageRule
    source_key: str | None
    tokenizer: TokenizerFiles | None
    media_root: Path | None
    allow_outside: bool
    exif: Exif
    clip_rule: ClipRule | None
    network: bool = False  # data or media lie behind an address that the user named

    def key(self) -> str:
        """Changes when a setting does. An image rule is a frozen dataclass, so its repr tells its settings."""
        tokenizer = self.tokenizer and replace(self.tokenizer, tokenizer_json=b"", added=())
        content = blake2b(self.tokenizer.tokenizer_json + repr(self.tokenizer.added).encode()) if self.tokenizer else ""
        own = replace(self, tokenizer=tokenizer)
        return repr((trimtab.__version__, own, type(self.image_rule).__name__, content))


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
    images: list[ImageCounts]  # and videos after them
    chat: Rendered


class Sizer:
    """Sizes chunks; holds the tokenizer, the resolved folders and the counts of image sizes met before."""

    def __init__(self, settings: SizerSettings) -> None:
        self._settings = settings
        self._counter = TokenCounter(settings.tokenizer)
        self._count_image = image_counter(settings.image_rule)
        self._clip_rule = settings.clip_rule
        self._media = MediaFolders(settings.media_root, allow_outside=settings.allow_outside, exif=settings.exif)

    @property
    def assumptions(self) -> list[str]:
        """What the tokenizer and its template make sizes assume."""
        return self._counter.assumptions

    def size(self, chunk: Chunk, most_bad: int | None = None, broken: Broken = Broken()) -> Part:  # noqa: B008 - frozen
        """The chunk's samples; of its bad ones no more than one above `most_bad`, behind which nothing is read."""
        sized: list[_Sized] = []
        with_videos: list[_Read] = []
        bad: list[BadSample] = []
        num_lines, key, media = 0, self._settings.source_key, self._media.of(chunk.file, chunk.media_root)
        for record in self._records(chunk, broken):
            if most_bad is not None and len(bad) > most_bad:
                break
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
            except _FAILURES as error:
                bad.append(_bad(chunk, record.line, name, error))
        if with_videos and self._clip_rule is not None:  # one question about all of them
            at("videos", cpu_s=_BATCH_CPU_S)
            self._clip_rule.prepare(clip for read in with_videos for clip in read.clips)
        for read in with_videos:
            at(f"record {read.line}")
            try:
                sized.append(self._rendered(read))
            except _FAILURES as error:
                bad.append(_bad(chunk, read.line, read.name, error))
        if with_videos:
            sized.sort(key=lambda x: x.line)
            bad.sort(key=lambda x: x.line or 0)
        counted: list[int | BadRecordError] = []
        batch = 1 if broken.one_by_one else _BATCH
        for first in range(0, len(sized), batch):
            if broken.one_by_one:
                at(f"record {sized[first].line}")
            else:
                at("texts", cpu_s=_BATCH_CPU_S)
            counted += self._counter.count([x.chat for x in sized[first : first + batch]])
        refused = [(x, error) for x, error in zip(sized, counted, strict=True) if isinstance(error, BadRecordError)]
        if refused:
            bad += [_bad(chunk, x.line, x.name, error) for x, error in refused]
            bad.sort(key=lambda sample: sample.line or 0)
        counts = [(x, num) for x, num in zip(sized, counted, strict=True) if isinstance(num, int)]
        sized, rows = [x for x, _ in counts], [numbers_of(x.images, num) for x, num in counts]
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

    def _records(self, chunk: Chunk, broken: Broken) -> Iterator[Record]:
        """The records, each announced before it is read."""
        key, line = self._settings.source_key, chunk.first_line or 1
        records = read_chunk(chunk, more_columns=() if key is None else (key,))
        while True:
            at(f"record {line}")
            if line == broken.ends_at:
                reason = f"{broken.records[line]}, and what comes behind it is not read: write the file again"
                yield Record(line=line, problem=BadRecordError("reader", reason))
                return
            record = next(records, None)
            if record is None:
                return
            if record.line in broken.records:
                reason = f"{broken.records[record.line]}: {_MADE_TO_FAIL}"
                record = replace(record, problem=BadRecordError("reader", reason))
            yield record
            line = record.line + 1

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
        if record.value == TOO_DEEP:
            raise BadRecordError("json", f"{TOO_DEEP}: {_MADE_TO_FAIL}")
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


def _bad(chunk: Chunk, line: int, name: str | None, error: BaseException) -> BadSample:
    if isinstance(error, BadRecordError):
        return BadSample.of(chunk.file, line, name, error.kind, str(error))
    told = "it takes too much memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
    return BadSample.of(chunk.file, line, name, "reader", f"{shorten(told, 160)}; {_MADE_TO_FAIL}")
