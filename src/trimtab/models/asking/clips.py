"""What a model's own processor makes of videos: frames sampled, cut and written into the text by its own rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.models.asking.blank import blank
from trimtab.models.asking.images import Looker, Seen, fold_runs, tensors_in
from trimtab.options import VideoOptions
from trimtab.specs import Clip


def run_clip(looker: Looker, clip: Clip, make: Callable[[str, int, int], Any], **more: Any) -> tuple[Any, list[str]]:
    """The processor's output for one video, of which it samples what it will, and the text that it put in.

    `make` gives its frames (frames, 3, height, width), or the name of a file that `fetch_videos` of its video
    processor reads.
    """
    token = looker.processor_token("video")
    if token is None or not hasattr(looker.processor, "video_processor"):
        raise ConfigError("it takes no videos: leave such samples out")
    metadata = {
        "total_num_frames": clip.num_frames,
        "frames_indices": list(range(clip.num_frames)),
        "fps": clip.fps,
        "duration": None if clip.fps is None else clip.num_frames / clip.fps,
        "width": clip.width,
        "height": clip.height,
    }
    more |= {"video_metadata": [metadata], "return_metadata": True}
    if clip.listed:
        more["do_sample_frames"] = False
    return looker.call("videos", 1, [(clip.width, clip.height)], make, token=token, more=more)


def look_at_clip(looker: Looker, clip: Clip) -> Seen:
    """By blank frames, which take no memory."""
    return see_clip(looker, *run_clip(looker, clip, partial(_blank_frames, clip.num_frames)))


def see_clip(looker: Looker, output: Mapping[str, Any], texts: list[str]) -> Seen:
    """What `run_clip` made; its text always says something."""
    tokens, soft = looker.count_tokens(output)
    text = fold_runs(texts, soft)
    if not text or not tokens:
        raise ConfigError("it writes no tokens in the place of a video: leave such samples out")
    return Seen(segments=tuple(looker.segments(output, clip=True)), tokens=tokens, text=text)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of every clip asked for: rows as those of images, with rows and columns of patches of its first input.

    The two are 0 where no grid says them. A clip that the processor refuses has its sentence in place of a row.
    """
    looker = Looker(request["model_type"], request["files"], request["patch_size"])
    set_sampling(looker, VideoOptions(**request["sampling"]))
    texts: dict[str, int] = {}
    rows: list[list[int] | str] = []
    for asked in request["clips"]:
        clip = Clip(**asked)
        try:
            output, written = run_clip(looker, clip, partial(_blank_frames, clip.num_frames))
            seen = see_clip(looker, output, written)
            number = texts.setdefault(str(seen.text), len(texts) + 1)
            rows.append([*seen.counts(request["extra_rows"]), number, *_sides(output)])
        except Exception as error:  # a processor refuses what it likes
            rows.append(" ".join(str(error).split())[:300])
    return {"rows": rows, "texts": list(texts), "clip_token": looker.processor_token("video"), "soft": looker.soft}


def set_sampling(looker: Looker, sampling: VideoOptions) -> None:
    """The user's own settings in the place of those of the files; `ConfigError` where the processor has none such."""
    processor = getattr(looker.processor, "video_processor", None)
    asked = {name: value for name, value in asdict(sampling).items() if value is not None}
    if processor is None or not asked:
        return
    sides = {"video_min_pixels": "shortest_edge", "video_max_pixels": "longest_edge"}
    size = dict(processor.size or {})
    for name, value in asked.items():
        known = (
            sides[name] in size and len(size) == 2 if name in sides else name in processor.valid_kwargs.__annotations__
        )
        if not known:
            raise ConfigError(
                f"{name} {value} was asked for, and {type(processor).__name__} has no such setting: leave it out"
            )
        if name in sides:
            size[sides[name]] = value
        else:
            setattr(processor, name, value)
            processor.do_sample_frames = True
    if asked.keys() & sides.keys():
        processor.size = type(processor.size)(**size)
    for name, other in (("fps", "num_frames"), ("num_frames", "fps")):
        if name in asked and other not in asked and getattr(processor, other, None) is not None:
            try:  # most take one of the two, and the files may have set the other
                look_at_clip(looker, Clip(width=256, height=256, num_frames=96, fps=24.0))
            except ValueError as error:
                if "mutually exclusive" in str(error):
                    setattr(processor, other, None)


def _blank_frames(num_frames: int, device: str, width: int, height: int) -> Tensor:
    return blank(num_frames, 3, height, width, device="meta" if device == "meta" else "cpu")


def _sides(output: Mapping[str, Any]) -> tuple[int, int]:
    grids = [tensor for key, value in output.items() if key.endswith("grid_thw") for tensor in tensors_in(value)]
    return (int(grids[0].reshape(-1, 3)[0, 1]), int(grids[0].reshape(-1, 3)[0, 2])) if grids else (0, 0)
