"""Counts of videos as the model's own processor gives them, asked once for each kind of clip and remembered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trimtab.errors import ConfigError, ImageError
from trimtab.models.ask import INSTALL, ask, is_installed
from trimtab.models.images.asked import Files, question_of
from trimtab.models.images.native import SmartResize, windowed_squares
from trimtab.models.images.size import check_size
from trimtab.options import VideoOptions
from trimtab.specs import Clip, ClipCounts, ClipRule, ImageCounts, ModelSpec

MAX_ASKED = 128  # clips of one question: 5 to 120 ms of CPU time each, and 40 KB of text where frames carry times

NO_CLIPS = (
    "the files of its processor were not given: name the model's folder, with preprocessor_config.json or "
    "processor_config.json (and video_preprocessor_config.json) beside config.json"
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
            raise ImageError(
                f"cannot count a video of {clip.num_frames} frames of {clip.width} x {clip.height} pixels, its "
                f"processor says: {found}"
            )
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
        for first in range(0, len(missing), MAX_ASKED):
            part = missing[first : first + MAX_ASKED]
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
