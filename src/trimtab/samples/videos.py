"""Videos as records give them: a file, or frames as images, and what the record says of either."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from trimtab.samples.problems import BadRecordError, wrong
from trimtab.specs import Clip

VIDEO_KINDS = ("video", "video_url", "input_video")
_FPS = ("fps", "video_fps", "sample_fps")  # the last: of frames that were given as images (Qwen)
_FRAMES = ("num_frames", "nframes", "total_frames")
_DURATION = ("duration", "video_duration")
VIDEO_FACTS = ("width", "height", *_FPS, *_FRAMES, *_DURATION)
_OWN_SAMPLING = (
    *("fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"),
    *("resized_height", "resized_width", "video_start", "video_end"),
)
"""What a Qwen content part asks of its own video; `fps` and `nframes` only where no facts of a file are given."""
_FRAME_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """One video of a sample."""

    source: str | bytes | tuple[str | bytes, ...]  # a file, its bytes, or its frames as images
    fps: float | None = None  # of frames given as images
    clip: Clip | None = None  # what the record says of a file, so that its header need not be read


def column_videos(record: Mapping[str, object]) -> list[Video]:
    """The videos of `video` or `videos`: a path each, or a list of frames; facts beside a lone one are its own."""
    present = [key for key in ("video", "videos") if record.get(key) not in (None, "", [])]
    if len(present) == 2 and record["video"] != record["videos"]:
        raise BadRecordError("type", "the record has both 'video' and 'videos', and they differ: keep one of them")
    if not present:
        return []
    value, where = record[present[0]], f"'{present[0]}'"
    given = list(value) if isinstance(value, (list, tuple)) and not _are_frames(value) else [value]
    return [_video(item, where, record if len(given) == 1 else {}) for item in given]


def part_video(part: Mapping[str, object]) -> Video | None:
    """The video that a content part carries; None: it takes the next one of the record's field."""
    for key in ("video", "video_url", "url", "path"):
        value = part.get(key)
        if value is None:
            continue
        if key == "video_url" and isinstance(value, dict):
            value = value.get("url")
        video = _video(value, f"'{key}' of a content part", part)
        own = [name for name in _OWN_SAMPLING if part.get(name) is not None]
        if video.clip is not None or isinstance(video.source, tuple):
            own = [name for name in own if name not in ("fps", "nframes")]
        if own:
            raise BadRecordError(
                "type",
                f"a content part asks for a sampling of its own ({', '.join(own)}), and all videos are sampled alike: "
                "give --fps, --set num_frames or --set video_max_pixels instead, and leave these out",
            )
        return video
    return None


def _video(value: object, where: str, facts: Mapping[str, object]) -> Video:
    if isinstance(value, (list, tuple)):
        frames = tuple(_file(frame, f"a frame of {where}") for frame in value)
        if not frames:
            raise wrong(where, value, "a path, or a list of at least one frame")
        return Video(source=frames, fps=_number(facts, _FPS))
    return Video(source=_file(value, where), clip=_clip(facts))


def _clip(facts: Mapping[str, object]) -> Clip | None:
    """Width, height, frames a second, and frames or seconds; None where one of them is missing."""
    width, height, fps = _number(facts, ("width",)), _number(facts, ("height",)), _number(facts, _FPS[:2])
    frames, duration = _number(facts, _FRAMES), _number(facts, _DURATION)
    if frames is None and fps is not None and duration is not None:
        frames = round(duration * fps)
    if width is None or height is None or fps is None or frames is None:
        return None
    return Clip(width=int(width), height=int(height), num_frames=int(frames), fps=fps)


def _number(facts: Mapping[str, object], names: tuple[str, ...]) -> float | None:
    """The first that is a number above 0, also as text; what is none is not believed."""
    for name in names:
        value = facts.get(name)
        if isinstance(value, (int, float, str)):
            with contextlib.suppress(ValueError):
                if 0 < (number := float(value)) < 2**31:
                    return number
    return None


def _file(value: object, where: str) -> str | bytes:
    if isinstance(value, dict):  # a video of Hugging Face datasets: bytes, or else a path
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, bytes)) and value:
        return value
    raise wrong(where, value, "a path, an object with 'bytes' or 'path', or a list of frames")


def _are_frames(values: list[object] | tuple[object, ...]) -> bool:
    """Whether a list is one video's frames: all of it are names of images."""
    names: Iterator[object] = (value.get("path") if isinstance(value, dict) else value for value in values)
    return all(isinstance(x, str) and PurePosixPath(x).suffix.lower() in _FRAME_SUFFIXES for x in names)
