"""What a pack of each family must look like: asked of Transformers, unless `models.families` declares it.

A family that follows the conventions of Transformers 5 needs no declaration. Its masks come from positions that
restart, M-RoPE is known by `get_rope_index`, the keys of its images by the signatures of the functions that encode
them, and layers that carry a state along the row by their kinds.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.utils import is_torchvision_available
from transformers.video_utils import VideoMetadata

from trimtab.errors import ConfigError, ImageError, UnknownModelError, UnsupportedPlanError
from trimtab.models.asking.images import Looker, frames_of, run_clip, see_clip, set_sampling
from trimtab.models.asking.inputs import vision_config
from trimtab.models.describe import image_rule
from trimtab.models.families import PackFormat, Smallest, family_of
from trimtab.models.images.asked import NO_CLIPS, AskedClips
from trimtab.options import VideoOptions
from trimtab.samples.media import MediaFolder
from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import Video
from trimtab.specs import Clip, ClipCounts, ImageCounts, ModelSpec

# The smallest image that a family can be given: its LLM tokens, and what its processor would give. Black pixels.


SmallestImage = tuple[int, dict[str, Tensor]]
"""LLM tokens, and tensors by key."""


def has_blocks(config: Any) -> bool:
    """Return whether the vision configuration says what a block of patches that leaves one token looks like."""
    fields = ("spatial_merge_size", "in_channels", "temporal_patch_size", "patch_size")
    vision = vision_config(config)
    whole_frames = getattr(vision, "temporal_merge_size", 1) == 1
    return whole_frames and all(isinstance(getattr(vision, x, None), int) for x in fields)


def smallest_image(kind: Smallest | Callable[[Any], SmallestImage], config: Any) -> SmallestImage:
    """Return the smallest image of a kind known here, or as a function of your own makes it."""
    if callable(kind):
        return kind(config)
    return {"block": _one_block, "tile": _one_tile, "fewest tiles": _fewest_tiles}[kind](config)


def _one_block(config: Any) -> SmallestImage:
    """Return patches of all images in one tensor, next to a grid: the block that leaves one token."""
    vision = vision_config(config)
    merge = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return 1, {"pixel_values": torch.zeros(merge**2, width), "image_grid_thw": torch.tensor([[1, merge, merge]])}


def _one_tile(config: Any) -> SmallestImage:
    """Return tiles of one size, each with the same number of tokens."""
    return tile_tokens(config), {"pixel_values": torch.zeros(1, *_tile_shape(config))}


def _fewest_tiles(config: Any) -> SmallestImage:
    """Return (images, tiles, C, H, W): the tile grid of the configuration that leaves the fewest tokens."""
    choices = {(h, w): _count(config, w, h) for h, w in config.image_grid_pinpoints}
    size = min(choices, key=lambda choice: (choices[choice].tokens, choice))
    pixels = torch.zeros(1, choices[size].tiles, *_tile_shape(config))
    return choices[size].tokens, {"pixel_values": pixels, "image_sizes": torch.tensor([size])}


def tile_tokens(config: Any) -> int:
    """Return LLM tokens of one tile where every tile has the same number: internvl, llava, gemma3."""
    if hasattr(config, "mm_tokens_per_image"):
        return int(config.mm_tokens_per_image)
    if hasattr(config, "downsample_ratio"):
        vision = config.vision_config
        (height, width), (patch_h, patch_w) = _pair(vision.image_size), _pair(vision.patch_size)
        return int((height // patch_h) * (width // patch_w) * config.downsample_ratio**2)
    side = config.vision_config.image_size
    return _count(config, side, side).tokens


def _tile_shape(config: Any) -> tuple[int, int, int]:
    vision = config.vision_config
    return getattr(vision, "num_channels", 3), *_pair(vision.image_size)


def _count(config: Any, width: int, height: int) -> ImageCounts:
    written = json.loads(config.to_json_string(use_diff=False))
    written.pop("image_seq_length", None)  # the class's own default, whatever the sizes of this model
    return image_rule(written).count(width, height)


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


TOKEN_TYPE_KEYS: tuple[str, ...] = ("mm_token_type_ids", "token_type_ids")
"""What processors call 0 text, 1 image, 2 video per token; the second is Gemma's name."""

GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
_NO_IMAGE_KEYS = {
    *("self", "kwargs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "interpolate_pos_encoding")
}


def pack_format(config: Any) -> PackFormat:
    """The declared format of a Transformers configuration's family, or what its model class says."""
    return family_of(config.model_type).pack or ask_format(config)


def ask_format(config: Any) -> PackFormat:
    """Return what the classes of Transformers say of a family: no weights, no list of names.

    Use it to see what `PackedCollator(config)` found, or to change a field of it: docs/training-loop.md shows both.
    """
    core, outer = model_classes(config)
    keys: dict[str, None] = {}
    for encode in ("get_image_features", "get_video_features"):
        found = getattr(core, encode, None) or getattr(outer, encode, None)
        keys |= dict.fromkeys(_tensors_of(found)) if found is not None else {}
    mrope = hasattr(core, "get_rope_index")
    taken = inspect.signature(outer.forward).parameters
    types_key = next((key for key in TOKEN_TYPE_KEYS if key in taken and not mrope), None)
    own_side = any(key.endswith("merge_sizes") for key in keys)  # of the blocks of each image
    in_blocks = "image_grid_thw" in keys and not own_side and has_blocks(config) and _names_tokens(core, config)
    return PackFormat(
        joined=tuple(keys) + tuple(key for key in GRIDS if mrope and key not in keys and key in taken),
        mrope=mrope,
        stateful=has_state(config),
        types_key=types_key,
        smallest="block" if in_blocks else None,
    )


def _names_tokens(core: Any, config: Any) -> bool:
    """Return whether the configuration has the tokens that place an image: thinkers by themselves lack some."""
    placing = getattr(core, "get_rope_index", None)
    read = re.findall(r"config\.(\w+_token_id)", inspect.getsource(placing)) if placing is not None else ()
    return all(getattr(config, name, None) is not None for name in read)


def _tensors_of(encode: Callable[..., Any]) -> list[str]:
    """Return the arguments that hold something of each image: their annotation names a tensor."""
    parameters = inspect.signature(inspect.unwrap(encode)).parameters.values()
    return [
        p.name
        for p in parameters
        if p.name not in _NO_IMAGE_KEYS and ("Tensor" in str(p.annotation) or "pixel" in p.name)
    ]


def model_classes(config: Any) -> tuple[Any, Any]:
    """The class without a head that makes positions and encodes images, and the one that is trained."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            outer = mapping[type(config)]
            return next((MODEL_MAPPING[kind] for kind in type(config).__mro__ if kind in MODEL_MAPPING), outer), outer
    raise UnknownModelError(
        f"Transformers has no model {config.model_type!r}: register it, or give family=PackFormat(...)"
    )


def has_state(config: Any) -> bool:
    """Return whether a layer of the text model has a state along the row: its kind says so, or its code convolves."""
    from transformers import MODEL_MAPPING, masking_utils

    masks = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    recurrent = getattr(masking_utils, "create_recurrent_attention_mask", None)  # None: before 5.17 they had no mask

    text = config.get_text_config()
    for kind in set(getattr(text, "layer_types", None) or ()):
        made = masks.get(kind)
        if recurrent in (made.values() if isinstance(made, dict) else (made,)):
            return True
    if type(text) not in MODEL_MAPPING:
        return False
    return "causal_conv1d_fn" in vars(sys.modules[MODEL_MAPPING[type(text)].__module__])


# Videos of planned rows: frames that the model's own video processor samples, decoded by PyAV and cut by it.


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
        """Return what a video is in the text, and what the model reads of it; `decode` gives frames that are images.

        Raises `BadRecordError` where it cannot be decoded or the processor refuses it.
        """
        clip, source = media.clip(video), video.source
        if isinstance(source, tuple):
            frames = torch.from_numpy(np.stack([np.asarray(decode(media.read(frame))) for frame in source]))
            given: Any = frames.permute(0, 3, 1, 2)
        elif clip.own:
            given = self._own_frames(clip, source, media)
        else:
            given = "video"  # the name that the processor hands to `fetch_videos`
            self._looker.processor.video_processor.fetch_videos = _Fetch(
                clip, lambda indices: media.frames(source, indices)
            )
        try:
            output, texts = run_clip(self._looker, clip, given, return_tensors="pt")
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

    def _own_frames(self, clip: Clip, source: str | bytes, media: MediaFolder) -> Tensor:
        """Return the frames that a content part asks for, resized as qwen_vl_utils does."""
        from torchvision.transforms import InterpolationMode, functional  # type: ignore[import-not-found]

        try:
            own = frames_of(self._looker, clip)
        except (ConfigError, ImageError) as error:
            raise BadRecordError("video", str(error)) from None
        frames = torch.from_numpy(media.frames(source, own.indices)).permute(0, 3, 1, 2)
        size = [own.height, own.width]
        resized: Tensor = functional.resize(frames, size, interpolation=InterpolationMode.BICUBIC, antialias=True)
        return resized.float()


def alike_videos(key: str, parts: list[Tensor]) -> list[Tensor]:
    """Return `parts`, and refuse videos of several lengths for a model that takes them as (videos, frames, ...)."""
    lengths = sorted({part.shape[1] for part in parts}) if "videos" in key and parts[0].dim() > 4 else []
    if len(lengths) > 1:
        raise UnsupportedPlanError(
            f"one pack has videos of {lengths[0]} and {lengths[1]} frames: size with --set num_frames"
        )
    return parts


def pixel_keys(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return which of a processor's keys hold pixels."""
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
