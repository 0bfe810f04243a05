"""Videos of planned rows: frames that the model's own video processor samples, decoded by PyAV and cut by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.utils import is_torchvision_available
from transformers.video_utils import VideoMetadata

from trimtab.errors import ConfigError, UnsupportedPlanError
from trimtab.models.asking.clips import run_clip, see_clip, set_sampling
from trimtab.models.asking.images import Looker
from trimtab.models.images.clips import NO_CLIPS, AskedClips
from trimtab.options import VideoOptions
from trimtab.samples.media import MediaFolder
from trimtab.samples.problems import BadRecordError
from trimtab.samples.videos import Video
from trimtab.specs import Clip, ClipCounts, ImageCounts, ModelSpec

Frames = npt.NDArray[np.uint8]
"""(frames, height, width, 3)."""


class VideoReader:
    """Reads videos as sizing counted them: the same processor, files and sampling, on real frames."""

    def __init__(self, model: ModelSpec, sampling: VideoOptions) -> None:
        if not isinstance(model.clip_rule, AskedClips):
            raise ConfigError(f"videos of {model.name} cannot be read: {NO_CLIPS}")
        if not is_torchvision_available():
            raise ConfigError("videos are cut by torchvision, which is not installed: pip install torchvision")
        question = json.loads(model.clip_rule.question)
        self._looker = Looker(question["model_type"], question["files"], None)
        set_sampling(self._looker, sampling)

    def read(
        self, video: Video, media: MediaFolder, decode: Callable[[bytes], Any]
    ) -> tuple[ClipCounts, dict[str, Tensor]]:
        """What a video is in the text, and what the model reads of it; `decode` gives frames that are images.

        Raises `BadRecordError` where it cannot be decoded or the processor refuses it.
        """
        clip, source = media.clip(video), video.source
        if isinstance(source, tuple):
            frames = torch.from_numpy(np.stack([np.asarray(decode(media.read(frame))) for frame in source]))
            given: Any = frames.permute(0, 3, 1, 2)
        else:
            given = "video"  # the name that the processor hands to `fetch_videos`
            self._looker.processor.video_processor.fetch_videos = _Fetch(
                clip, lambda indices: media.frames(source, indices)
            )
        try:
            output, texts = run_clip(self._looker, clip, lambda *_: given, return_tensors="pt")
            seen = see_clip(self._looker, output, texts)
        except (BadRecordError, ConfigError):
            raise
        except Exception as error:  # a processor refuses what it likes
            raise BadRecordError("video", f"its processor refuses a video: {' '.join(str(error).split())}") from None
        tokens = ImageCounts(
            patches=0, tokens=seen.tokens, tiles=1, patches_sq=0, patches_windowed=0, text=str(seen.text)
        )
        placeholder = str(self._looker.processor_token("video"))
        counts = ClipCounts(image=tokens, placeholder=placeholder, soft=self._looker.soft)
        return counts, {key: value for key, value in output.items() if isinstance(value, Tensor)}


def alike_videos(key: str, parts: list[Tensor]) -> list[Tensor]:
    """`parts`, which can be joined: a model that takes videos as (videos, frames, ...) takes none of other lengths."""
    lengths = sorted({part.shape[1] for part in parts}) if "videos" in key and parts[0].dim() > 4 else []
    if len(lengths) > 1:
        raise UnsupportedPlanError(
            f"videos of {lengths[0]} and {lengths[1]} frames were put in one pack, and this model takes videos of one "
            "length: size and train with --set num_frames, so that all have as many"
        )
    return parts


def pixel_keys(tensors: Mapping[str, Tensor]) -> set[str]:
    """Which of a processor's keys hold pixels."""
    return {key for key in tensors if key.startswith("pixel_values")}


class _Fetch:
    """In the place of a video processor's `fetch_videos`: the frames that it samples, decoded by us.

    A failure is remembered: a processor is tried in several ways, and decodes once.
    """

    def __init__(self, clip: Clip, read: Callable[[Sequence[int]], Frames]) -> None:
        self._clip, self._read = clip, read
        self._failed: BadRecordError | None = None

    def __call__(
        self, _names: Any, sample_indices_fn: Callable[..., Any] | None = None
    ) -> tuple[list[Frames], list[VideoMetadata]]:
        if self._failed is not None:
            raise self._failed
        clip = self._clip
        assert clip.fps is not None, "of a file"
        metadata = VideoMetadata(
            total_num_frames=clip.num_frames,
            fps=clip.fps,
            width=clip.width,
            height=clip.height,
            duration=clip.num_frames / clip.fps,
            video_backend="pyav",
        )
        everything = np.arange(clip.num_frames)
        indices = everything if sample_indices_fn is None else np.asarray(sample_indices_fn(metadata=metadata))
        try:
            frames = self._read([int(index) for index in indices])
        except BadRecordError as error:
            self._failed = error
            raise
        metadata.frames_indices = indices if sample_indices_fn is not None else indices.tolist()
        return [frames], [metadata]
