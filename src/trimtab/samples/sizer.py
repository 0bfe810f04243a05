"""Chunks of records as sizes, each in a limited child: media read and counted, texts encoded together."""

from __future__ import annotations

import json
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from queue import LifoQueue

import numpy as np

import trimtab
from trimtab.address import Allowed
from trimtab.errors import ConfigError, ImageError, SampleError, shorten
from trimtab.files import blake2b
from trimtab.limited import STEP_CPU_S, ChildEndedError, LimitedChild, at, limited_child
from trimtab.models.images.asked import NO_CLIPS
from trimtab.options import Exif
from trimtab.samples.encode import learnt_spans
from trimtab.samples.lengths import SizesAlone, image_counter
from trimtab.samples.media import MediaFolder, MediaFolders, has_changed
from trimtab.samples.problems import TOO_DEEP, BadRecordError, BadSample, Broken, Chunk, Record
from trimtab.samples.records import names_of, read_chunk
from trimtab.samples.rows import HARMLESS_KEYS, KNOWN_KEYS, Conversation, read_conversation, record_id
from trimtab.samples.shapes import Columns
from trimtab.samples.table import PART_COLUMNS, ChunkFile, Part, load_part, numbers_of, part_bytes, part_from, save_part
from trimtab.samples.tokens import Rendered, TokenCounter, TokenizerFiles
from trimtab.specs import Clip, ClipRule, ImageCounts, ImageRule

_BATCH = 512  # chats encoded together
_BATCH_CPU_S = 120
_MOST_UNUSED = 20  # fields that are named of one chunk
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
    allowed: Allowed
    exif: Exif
    clip_rule: ClipRule | None
    columns: Columns = ()
    network: bool = False  # data or media lie behind an address that the user named

    def key(self) -> str:
        """Changes when a setting does. An image rule is a frozen dataclass, so its repr tells its settings."""
        tokenizer = self.tokenizer and replace(self.tokenizer, tokenizer_json=b"", added=())
        content = blake2b(self.tokenizer.tokenizer_json + repr(self.tokenizer.added).encode()) if self.tokenizer else ""
        own = replace(self, tokenizer=tokenizer)
        return repr((trimtab.__version__, own, type(self.image_rule).__name__, content))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """One record of a chunk whose images and videos can be read; with `chats` its text is ready to be encoded."""

    line: int
    name: str | None
    source: str
    conversation: Conversation
    images: list[ImageCounts]  # with `chats`, and videos after them
    clips: list[Clip]
    chats: tuple[Rendered, ...] = ()  # two of a pair of answers, which is trained as two sequences


class Sizer:
    """Sizes chunks; holds the tokenizer, the resolved folders and the counts of image sizes met before."""

    def __init__(self, settings: SizerSettings) -> None:
        self._settings = settings
        self._counter = TokenCounter(settings.tokenizer)
        self._count_image = image_counter(settings.image_rule)
        self._clip_rule = settings.clip_rule
        self._harmless = {*HARMLESS_KEYS, settings.source_key}
        self._media = MediaFolders(settings.media_root, allowed=settings.allowed, exif=settings.exif)

    @property
    def assumptions(self) -> list[str]:
        """Return what the tokenizer and its template make sizes assume."""
        return self._counter.assumptions

    def size(self, chunk: Chunk, most_bad: int | None = None, broken: Broken = Broken()) -> Part:  # noqa: B008 - frozen
        """The chunk's samples; of its bad ones no more than one above `most_bad`, behind which nothing is read."""
        sized: list[_Read] = []
        columns = self._settings.columns or chunk.columns
        more_columns = tuple(name for _, name in columns)
        unused = set(names_of(chunk)) - {*KNOWN_KEYS, *more_columns}
        num_pairs = 0
        with_videos: list[_Read] = []
        bad: list[BadSample] = []
        num_lines, key, media = 0, self._settings.source_key, self._media.of(chunk.file, chunk.media_root)
        for record in self._records(chunk, broken, more_columns):
            if most_bad is not None and len(bad) > most_bad:
                break
            num_lines += 1
            if record.blank:
                continue
            name = record.key
            try:
                name = record_id(record.value) or record.key
                read = self._read(record, name, media, columns)
                unused.update(read.conversation.unread)
                num_pairs += read.conversation.rejected is not None
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
        sized.sort(key=lambda x: x.line)
        both = list(zip(sized, self._count_all(sized, broken), strict=True))
        bad += [_bad(chunk, x.line, x.name, error) for x, error in both if isinstance(error, BadRecordError)]
        bad.sort(key=lambda sample: sample.line or 0)
        counts = [(x, own) for x, own in both if not isinstance(own, BadRecordError)]
        sized, rows = [x for x, _ in counts], [numbers_of(x.images, sum(own), sum(own[1:])) for x, own in counts]
        codes: dict[str, int] = {}
        source = np.array([codes.setdefault(x.source, len(codes)) for x in sized], np.int32)
        return Part(
            numbers=np.array(rows, np.int64).reshape(-1, len(PART_COLUMNS)),
            image_patches=np.array([image.patches for x in sized for image in x.images], np.int64),
            lines=np.array([x.line for x in sized], np.int64),
            ids=tuple(x.name for x in sized) if any(x.name is not None for x in sized) else None,
            bad=tuple(bad),
            num_lines=num_lines if chunk.first_line is None else 0,
            source=source if key is not None else None,
            source_names=tuple(codes),
            patch_unit="patches",
            tokens_exact=self._counter.exact,
            unused=tuple(sorted(str(name) for name in unused if name not in self._harmless)[:_MOST_UNUSED]),
            num_pairs=num_pairs,
            media=media.take_seen(),
        )

    def _count_all(self, sized: list[_Read], broken: Broken) -> list[list[int] | BadRecordError]:
        counted: list[list[int] | BadRecordError] = []
        batch = 1 if broken.one_by_one else _BATCH
        for first in range(0, len(sized), batch):
            place, cpu_s = (f"record {sized[first].line}", STEP_CPU_S) if broken.one_by_one else ("texts", _BATCH_CPU_S)
            at(place, cpu_s=cpu_s)
            counted += self._count(sized[first : first + batch])
        return counted

    def _count(self, batch: list[_Read]) -> Iterator[list[int] | BadRecordError]:
        """Yield the tokens of each sample's sequence, of both of a pair, or why the tokenizer refuses it."""
        counts = iter(self._counter.count([chat for x in batch for chat in x.chats]))
        for x in batch:
            own = [next(counts) for _ in x.chats]
            refused = [count for count in own if isinstance(count, BadRecordError)]
            yield refused[0] if refused else [count for count in own if isinstance(count, int)]

    def _records(self, chunk: Chunk, broken: Broken, more_columns: tuple[str, ...]) -> Iterator[Record]:
        """The records, each announced before it is read."""
        line = chunk.first_line or 1
        key = () if self._settings.source_key is None else (self._settings.source_key,)
        records = read_chunk(chunk, more_columns=(*key, *more_columns))
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
                record = record._replace(problem=BadRecordError("reader", reason))
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

    def _read(self, record: Record, name: str | None, media: MediaFolder, columns: Columns) -> _Read:
        if record.problem is not None:
            raise record.problem
        if record.value == TOO_DEEP:
            raise BadRecordError("json", f"{TOO_DEEP}: {_MADE_TO_FAIL}")
        source = self._source(record)
        conversation = read_conversation(record.value, images=record.images, columns=columns)
        try:
            num_images = len(conversation.images)
            sizes = [media.image_size(image) for image in conversation.images]
            for i, own in enumerate(conversation.own_sizes):
                sizes[i] = sizes[i] if own is None else own.of(*sizes[i], self._settings.image_rule)
            images = [self._count_image(num_images, *size) for size in sizes]
        except ImageError as error:
            raise BadRecordError("image", str(error)) from None
        clips: list[Clip] = []
        if conversation.videos and not isinstance(self._settings.image_rule, SizesAlone):
            if self._clip_rule is None:
                raise BadRecordError("video", f"videos of this model cannot be counted: {NO_CLIPS}")
            clips = [media.clip(video) for video in conversation.videos]
        conversation = replace(conversation, images=(), videos=())  # their bytes are not held
        return _Read(line=record.line, name=name, source=source, conversation=conversation, images=images, clips=clips)

    def _rendered(self, read: _Read) -> _Read:
        try:
            videos = [self._clip_rule.count_clip(clip) for clip in read.clips] if self._clip_rule is not None else []
        except ImageError as error:
            raise BadRecordError("video", str(error)) from None
        both = [x for x in (read.conversation, read.conversation.rejected) if x is not None]
        chats = tuple(self._counter.render(conversation, read.images, videos) for conversation in both)
        for conversation in both:
            if sum(message.role == "assistant" for message in conversation.messages) > 1:  # a lone one is found
                learnt_spans(self._counter, conversation)
        images = [*read.images, *(video.image for video in videos)] * len(both)
        return replace(read, images=images, chats=chats)


def _bad(chunk: Chunk, line: int, name: str | None, error: BaseException) -> BadSample:
    if isinstance(error, BadRecordError):
        return BadSample.of(chunk.file, line, name, error.kind, str(error))
    reason = "it takes too much memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
    return BadSample.of(chunk.file, line, name, "reader", f"{shorten(reason, 160)}; {_MADE_TO_FAIL}")


# -- the parent: chunks spread over children, parts in order -----------------------------------------------------------


_TOKENIZER_CPU_S = 10  # the largest take 2
_HERE = "trimtab.samples.sizer"


def size_chunks(
    settings: SizerSettings,
    chunks: Iterable[Chunk],
    num_workers: int,
    *,
    kept_in: Path | None = None,
    most_bad: int | None = None,
    on_result: Callable[[Chunk], None] = lambda _: None,
) -> Iterator[Part]:
    """The part of every chunk, in order; `on_result` sees each chunk before its part is given.

    Parts lie in `kept_in` (None: nowhere), and those that are there already are taken over.
    """
    queue = iter(chunks)
    with ExitStack() as stack:
        children = [_SizingChild(settings, stack) for _ in range(max(1, num_workers))]
        idle: LifoQueue[_SizingChild] = LifoQueue()
        for child in children:
            idle.put(child)

        def work(chunk: Chunk) -> Part:
            child = idle.get()
            try:
                return _part_of(child, chunk, kept_in, most_bad)
            finally:
                idle.put(child)

        pool = ThreadPoolExecutor(len(children))
        try:
            # a slow chunk must not let the parts behind it pile up
            running = deque((chunk, pool.submit(work, chunk)) for chunk in islice(queue, 8 * len(children)))
            while running:
                chunk, future = running.popleft()
                part = future.result()
                running.extend((chunk, pool.submit(work, chunk)) for chunk in islice(queue, 1))
                on_result(chunk)
                yield part
        except BaseException:  # whatever is running has no reader any more
            for child in children:
                child.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _part_of(child: _SizingChild, chunk: Chunk, kept_in: Path | None, most_bad: int | None) -> Part:
    if kept_in is None:
        return child.size(chunk, most_bad)
    file = ChunkFile.of_chunk(kept_in, chunk, child.settings.key())
    part = load_part(file)
    if part is not None and any(map(has_changed, part.media)):
        warnings.warn("images or videos changed since they were sized: they are sized again", stacklevel=2)
        part = None
    if part is None:
        part = child.size(chunk, most_bad)
        if most_bad is None or len(part.bad) <= most_bad:  # else it is not whole
            save_part(file, part)
    return part


def ask_assumptions(settings: SizerSettings) -> list[str]:
    """Return what the tokenizer and its template make sizes assume; `ConfigError` where they cannot be used."""
    with ExitStack() as stack:
        return _SizingChild(settings, stack).start()


class _SizingChild:
    """One limited child that sizes; another takes its place when it ends."""

    def __init__(self, settings: SizerSettings, stack: ExitStack) -> None:
        self.settings, self._stack = settings, stack
        self._child: LimitedChild | None = None
        self._is_stopped = False

    def start(self) -> list[str]:
        """Begin a pass in a child."""
        if self._is_stopped:
            raise SampleError("the pass was stopped: start it again")
        self._child = self._stack.enter_context(limited_child(network=self.settings.network))
        try:
            assumptions: list[str] = json.loads(self._child.ask(f"{_HERE}:start", self.settings))
        except ChildEndedError as error:
            self._child = None
            raise ConfigError(f"the tokenizer or its chat template fails: {error.reason}: name another") from None
        return assumptions

    def stop(self) -> None:
        self._is_stopped = True
        if self._child is not None:
            self._child.close()

    def size(self, chunk: Chunk, most_bad: int | None) -> Part:
        """The chunk's samples; one that ends the child is bad, and where reading ends it the chunk is cut."""
        broken = Broken()
        while True:
            if self._child is None:
                self.start()
            assert self._child is not None
            try:
                return part_from(self._ask(self._child, chunk, most_bad, broken))
            except ChildEndedError as error:
                self._child = None
                broken = _after(broken, error)

    def _ask(self, child: LimitedChild, chunk: Chunk, most_bad: int | None, broken: Broken) -> bytes:
        try:
            return child.ask(f"{_HERE}:size", chunk, most_bad, broken)
        except RecursionError:  # a row of a JSON list that is nested deeper than pickle goes
            rows = tuple(row if _can_be_sent(row) else TOO_DEEP for row in chunk.rows)
            return child.ask(f"{_HERE}:size", replace(chunk, rows=rows), most_bad, broken)


def _can_be_sent(row: object) -> bool:
    try:
        pickle.dumps(row)
    except RecursionError:
        return False
    return True


def _after(broken: Broken, error: ChildEndedError) -> Broken:
    """Return what is known of a chunk once a child has ended over it."""
    kind, _, line = error.place.partition(" ")
    if kind == "texts":
        return replace(broken, one_by_one=True)
    if kind != "record":
        raise SampleError(f"the data cannot be sized: {error.reason}; give fewer workers or more memory") from None
    if int(line) in broken.records:  # not its content: what is read to get there
        return replace(broken, ends_at=int(line))
    return replace(broken, records={**broken.records, int(line): error.reason})


# -- in the child -----------------------------------------------------------------------------------------------------


class _Pass:
    """The pass that this child takes part in."""

    sizer: Sizer | None = None


def start(settings: SizerSettings) -> bytes:
    """Make ready for the chunks of a pass; the answer is what tokenizer and template make it assume."""
    at("the tokenizer", cpu_s=_TOKENIZER_CPU_S)
    warnings.filterwarnings("ignore", module="PIL")  # of strange files; what decides is named as a bad sample
    _Pass.sizer = Sizer(settings)
    return json.dumps(_Pass.sizer.assumptions).encode()


def size(chunk: Chunk, most_bad: int | None, broken: Broken) -> bytes:
    """The chunk's part."""
    assert _Pass.sizer is not None, "the pass has begun"
    return part_bytes(_Pass.sizer.size(chunk, most_bad, broken))
