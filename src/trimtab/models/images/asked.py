"""Counts of images and videos as the model's own processor gives them: asked once for each size, and remembered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trimtab.ask import INSTALL, ask, is_installed
from trimtab.errors import ConfigError, ImageError
from trimtab.models.images.rules import SmartResize, check_size, windowed_squares
from trimtab.options import VideoOptions
from trimtab.specs import Clip, ClipCounts, ClipRule, ImageCounts, ImageMarkup, ModelSpec

SIDES = (224, 336, 448, 512, 640, 768, 1024, 1280)
PHOTOS = (
    *((640, 480), (800, 600), (1024, 768), (1280, 960), (1600, 1200), (2048, 1536), (4032, 3024), (1280, 720)),
    *((1920, 1080), (2560, 1440), (3840, 2160), (1500, 1000), (1200, 800), (2000, 1333), (500, 375), (500, 333)),
    *((640, 427), (640, 426), (595, 842), (827, 1169), (1240, 1754), (1654, 2339), (1080, 2400), (1170, 2532)),
)
ODD = (
    *((1, 1), (13, 17), (57, 31), (100, 1000), (1000, 90), (333, 777), (1013, 619), (225, 223), (1399, 1401)),
    (90, 3000),
)
STANDARD = tuple(dict.fromkeys((*((x, x) for x in SIDES), *PHOTOS, *((h, w) for w, h in PHOTOS), *ODD)))
"""(width, height) that a description file holds, and on which a formula is judged."""
MAX_ASKED = 2048  # sizes of one question: 60 s of CPU time are enough for them

Files = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedImages:
    """What the processor answered, by size; `prepare` asks for many sizes at once, `count` for one that is missing.

    A machine without Transformers knows only the sizes of `table`.
    """

    question: str  # JSON: the files that the processor is made of
    patch_size: int | None  # of the tower, in pixels
    extra_rows: int  # class tokens of each input of the tower
    by_sample: bool = False  # images that share a sample are treated otherwise than a lone one
    copies: int = 1  # images alike in the sample: 2 stands for several
    table: tuple[tuple[int, ...], ...] = field(default=(), repr=False, compare=False)  # size, row, number of the text
    texts: tuple[str, ...] = field(default=("",), repr=False, compare=False)
    name: str = "asked"
    _known: dict[tuple[int, int, int], ImageCounts | str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if any(len(row) != 7 or not 1 <= row[6] <= len(self.texts) for row in self.table):
            raise ConfigError("a row of its table is not width, height, four counts and the number of a text")
        known = {(self.copies, row[0], row[1]): _counts(row[2:], self.texts) for row in self.table}
        object.__setattr__(self, "_known", known)

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        if (self.copies, width, height) not in self._known:
            self.prepare([(width, height)])
        found = self._known[self.copies, width, height]
        if isinstance(found, str):
            raise ImageError(f"cannot count an image of {width} x {height} pixels: {found}")
        return found

    def in_sample(self, num_images: int) -> AskedImages:
        """The rule for each image of a sample that holds `num_images`."""
        if not self.by_sample or num_images == 1 or self.copies > 1:
            return self
        shared = replace(self, copies=2, table=())
        object.__setattr__(shared, "_known", self._known)  # what is asked once is known to both
        return shared

    def prepare(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Asks for all (width, height) that are not known yet, one child process for 2,048 of them."""
        sizes = list(sizes)
        if self.by_sample and self.copies == 1:
            self.in_sample(2).prepare(sizes)
        missing = [x for x in dict.fromkeys(sizes) if (self.copies, *x) not in self._known]
        if missing and not is_installed():
            width, height = missing[0]
            raise ConfigError(f"{width} x {height} is none of {len(self._known)} known sizes: {INSTALL}")
        for first in range(0, len(missing), MAX_ASKED):
            part = missing[first : first + MAX_ASKED]
            tower = {"patch_size": self.patch_size, "extra_rows": self.extra_rows}
            answer = ask({**json.loads(self.question), **tower, "copies": self.copies, "sizes": part}, "images")
            for size, row in zip(part, answer["rows"], strict=True):
                self._known[self.copies, *size] = row if isinstance(row, str) else _counts(row, answer["texts"])


def ask_images(files: Files, config: Mapping[str, object]) -> tuple[AskedImages, ImageMarkup | None]:
    """The rule of a model by its processor's files, and how an image stands in its text where that is always the same.

    Raises `ConfigError` where Transformers has no such processor, or it takes no image.
    """
    question = question_of(config, files)
    answer = ask({**json.loads(question), "config": config, "sizes": STANDARD}, "images")
    rows = [(*size, *row) for size, row in zip(STANDARD, answer["rows"], strict=True) if not isinstance(row, str)]
    rule = AskedImages(
        question=question,
        patch_size=answer["patch_size"],
        extra_rows=answer["extra_rows"],
        by_sample=answer["by_sample"],
        table=tuple(rows),
        texts=tuple(answer["texts"]),
    )
    markup = answer["markup"]
    if markup is None and len(answer["texts"]) > 1:
        markup = {"placeholder": answer["token"], "soft": answer["soft"]}
    return rule, None if markup is None else ImageMarkup(**markup)


def question_of(model: Mapping[str, object], files: Files, **more: object) -> str:
    """Return what the processor is made of, as one string."""
    asked = {"model_type": model.get("model_type"), "files": files, **more}
    return json.dumps(asked, sort_keys=True, separators=(",", ":"), default=dict)


def _counts(row: Iterable[int], texts: Iterable[str]) -> ImageCounts:
    patches, tokens, tiles, squares, text = row
    return ImageCounts(
        patches=patches,
        tokens=tokens,
        tiles=tiles,
        patches_sq=squares,
        patches_windowed=squares,
        text=tuple(texts)[text - 1] or None,
    )


# -- videos -----------------------------------------------------------------------------------------------------------


MAX_CLIPS = 128  # clips of one question: 5 to 120 ms of CPU time each, and 40 KB of text where frames carry times

NO_CLIPS = (
    "the files of its processor were not given: name the model's folder, with preprocessor_config.json or "
    "processor_config.json (and video_preprocessor_config.json) next to config.json"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedClips:
    """What the video processor of a model makes of clips: it is run on blank ones, by its own rules of sampling."""

    question: str  # JSON: the files that the processor is made of, and the configuration of the tower
    windows: tuple[int, int] | None = None  # patches a side that are merged, merged patches a side of a window
    sampling: VideoOptions = field(default_factory=VideoOptions)
    _known: dict[Clip, ClipCounts | str] = field(init=False, repr=False, compare=False, default_factory=dict)

    def count_clip(self, clip: Clip) -> ClipCounts:
        check_size(clip.width, clip.height)
        if clip not in self._known:
            self.prepare([clip])
        found = self._known[clip]
        if isinstance(found, str):
            raise ImageError(f"cannot count a video of {clip.num_frames} x {clip.width} x {clip.height}: {found}")
        return found

    def prepare(self, clips: Iterable[Clip]) -> None:
        """Asks for all that are not known yet, one child process for 128 of them."""
        missing = [clip for clip in dict.fromkeys(clips) if clip not in self._known]
        if not missing:
            return
        if not is_installed():
            raise ConfigError(f"videos are counted by the model's own processor: {INSTALL}, or leave them out")
        whole = json.loads(self.question)
        tower = ask({**whole, "sizes": []}, "images")
        asked = {k: v for k, v in whole.items() if k != "config"}
        asked |= {"patch_size": tower["patch_size"], "extra_rows": tower["extra_rows"]}
        asked |= {"sampling": asdict(self.sampling)}
        for first in range(0, len(missing), MAX_CLIPS):
            part = missing[first : first + MAX_CLIPS]
            answer = ask({**asked, "clips": [asdict(clip) for clip in part]}, "clips")
            for clip, row in zip(part, answer["rows"], strict=True):
                self._known[clip] = row if isinstance(row, str) else self._counts(row, answer)

    def _counts(self, row: list[int], answer: Mapping[str, Any]) -> ClipCounts:
        patches, tokens, tiles, squares, text, height, width = row
        windowed = squares
        if self.windows is not None and height * width * tiles == patches:
            merge, side = self.windows
            windowed = tiles * windowed_squares(height // merge, width // merge, merge, side)
        counts = ImageCounts(
            patches=patches,
            tokens=tokens,
            tiles=tiles,
            patches_sq=squares,
            patches_windowed=windowed,
            text=answer["texts"][text - 1],
        )
        return ClipCounts(image=counts, placeholder=answer["clip_token"], soft=answer["soft"])


def ask_clips(config: Mapping[str, object], files: Files) -> AskedClips | None:
    """The rule of a model by its processor's files, which is asked when the first video is to be counted."""
    return AskedClips(question=question_of(config, files, config=config)) if files else None


def clip_rule_of(model: ModelSpec, sampling: VideoOptions) -> ClipRule | None:
    """The rule of a model under the user's own sampling; None where the files of its processor are not known.

    Use it for `size_samples(clip_rule=...)` with other frames or pixels than the model's own files ask for, as
    examples/video_samples.py does.
    """
    clips, images = model.clip_rule, model.image_rule
    if not isinstance(clips, AskedClips):
        return clips
    windows = None
    if isinstance(images, SmartResize) and images.window_side is not None:
        windows = images.merge_size, images.window_side
    return replace(clips, windows=windows, sampling=sampling)
