"""What a Transformers processor gives for one conversation, checked and brought to one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import SampleError, join_problems
from trimtab.models.asking.inputs import image_token
from trimtab.models.families import PackFormat
from trimtab.runtime.data.formats import GRIDS, TOKEN_TYPE_KEYS
from trimtab.runtime.data.loss import IGNORED
from trimtab.runtime.data.smallest_images import tile_tokens

_OWN_KEYS = frozenset(
    {"input_ids", "labels", "assistant_masks", "attention_mask", "loss_weight", "id", *TOKEN_TYPE_KEYS}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedSample:
    """One sample of a pack; vectors are (tokens,) int64."""

    input_ids: Tensor
    labels: Tensor
    token_types: Tensor  # 0 text, 1 image, 2 video
    weight: float
    images: Mapping[str, Tensor]  # the family's keys, first dimension images, patches or frames

    @property
    def grids(self) -> dict[str, Tensor]:
        """What M-RoPE positions depend on beside the token types."""
        return {key: self.images[key] for key in GRIDS if key in self.images}


def read_processed(samples: Sequence[Mapping[str, Any]], config: Any, family: PackFormat) -> list[ProcessedSample]:
    """Raises `SampleError` with all problems of all samples, each named by its `id` or its place in the pack."""
    per_tile = tile_tokens(config) if family.counts == "tiles" else None
    read, problems = [], []
    for place, sample in enumerate(samples):
        name = f"sample {sample['id']}" if "id" in sample else f"sample {place} of the pack"
        try:
            read.append(_read_one(sample, family, config, per_tile))
        except SampleError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise SampleError(join_problems(problems))
    return read


def _read_one(sample: Mapping[str, Any], family: PackFormat, config: Any, per_tile: int | None) -> ProcessedSample:
    unknown = sorted(set(sample) - _OWN_KEYS - set(family.joined))
    if unknown:
        raise SampleError(
            f"it holds {', '.join(unknown)}, which packs of {config.model_type} have no place for: "
            "remove what the model does not need"
        )
    if "input_ids" not in sample:
        raise SampleError("it was to be packed, but has no input_ids: give what the processor returns")
    ids = _vector(sample, "input_ids")
    if len(ids) == 0:
        raise SampleError("it was to be packed, but has no tokens: leave it out, or give a filler")
    for key in ("labels", "assistant_masks", "attention_mask", *TOKEN_TYPE_KEYS):
        if sample.get(key) is not None and len(_vector(sample, key)) != len(ids):
            raise SampleError(
                f"{key} has {len(_vector(sample, key))} entries for {len(ids)} input_ids: give one a token"
            )
    if sample.get("attention_mask") is not None and not bool((_vector(sample, "attention_mask") == 1).all()):
        raise SampleError("it is padded, but packs hold none: process samples with padding=False")
    weight = float(sample.get("loss_weight", 1.0))
    if not 0 <= weight < float("inf"):
        raise SampleError(f"loss_weight is {weight}, but weights are finite and not negative: give 0 to leave it out")
    images = {key: _stack(sample[key]) for key in family.joined if sample.get(key) is not None and len(sample[key]) > 0}
    types = _token_types(sample, ids, config)
    _check_images(images, types, family, config, per_tile)
    if "batch_num_images" in family.joined and "image_sizes" in images and "batch_num_images" not in images:
        images["batch_num_images"] = torch.ones(len(images["image_sizes"]), dtype=torch.int64)
    return ProcessedSample(input_ids=ids, labels=_labels(sample, ids), token_types=types, weight=weight, images=images)


def _labels(sample: Mapping[str, Any], ids: Tensor) -> Tensor:
    if sample.get("labels") is not None:
        return _vector(sample, "labels")
    if sample.get("assistant_masks") is not None:
        return torch.where(_vector(sample, "assistant_masks") == 1, ids, IGNORED)
    raise SampleError(
        "nothing says which tokens are to be learnt: give labels, or assistant_masks from the chat template"
    )


def _token_types(sample: Mapping[str, Any], ids: Tensor, config: Any) -> Tensor:
    for key in TOKEN_TYPE_KEYS:
        if sample.get(key) is not None:
            return _vector(sample, key)
    image = image_token(config)
    types = torch.zeros_like(ids) if image is None else (ids == image).long()
    video = getattr(config, "video_token_id", None)
    return types if video is None else torch.where(ids == video, 2, types)


def _check_images(
    images: Mapping[str, Tensor], types: Tensor, family: PackFormat, config: Any, per_tile: int | None
) -> None:
    """Image tokens and image features must be as many: truncation in the middle of an image breaks this."""
    if family.counts in ("sizes", "model"):
        if family.counts == "sizes":
            _check_sized_images(images)
        if image_token(config) is not None:  # else images have no place of their own in the text
            _check_both(images, has_tokens=bool((types == 1).any()))
        return
    found = [int((types == 1).sum()), int((types == 2).sum())]
    if family.counts == "grid":
        merge = config.vision_config.spatial_merge_size**2
        _check_patches(images, "pixel_values", "image_grid_thw")
        _check_patches(images, "pixel_values_videos", "video_grid_thw")
        expected = [_patches(images.get(grid)) // merge for grid in ("image_grid_thw", "video_grid_thw")]
    else:
        assert per_tile is not None
        pixels = images.get("pixel_values")
        if pixels is not None and pixels.dim() != 4:
            raise SampleError(f"pixel_values are {tuple(pixels.shape)}: give (tiles, channels, height, width)")
        expected = [0 if pixels is None else len(pixels) * per_tile, 0]
    if expected != found:
        raise SampleError(
            f"its images make {sum(expected)} tokens, but it has {sum(found)} image tokens: "
            "do not truncate inside an image"
        )


def _check_sized_images(images: Mapping[str, Tensor]) -> None:
    pixels, sizes = images.get("pixel_values"), images.get("image_sizes")
    if pixels is not None and (pixels.dim() < 4 or sizes is None or len(pixels) != len(sizes)):
        raise SampleError(
            f"pixel_values are {tuple(pixels.shape)}: "
            "give (images, tiles, channels, height, width) with a row of image_sizes each"
        )


def _check_both(images: Mapping[str, Tensor], *, has_tokens: bool) -> None:
    """How many tokens an image makes is left to the model, which checks it on the whole pack."""
    pixels = images.get("pixel_values")
    if (pixels is not None) != has_tokens:
        what = "an image but no image tokens" if pixels is not None else "image tokens but no image"
        raise SampleError(f"it has {what}: give both, and do not truncate inside an image")


def _check_patches(images: Mapping[str, Tensor], pixels: str, grid: str) -> None:
    found, expected = len(images.get(pixels, ())), _patches(images.get(grid))
    if found != expected:
        raise SampleError(f"{pixels} has {found} rows, but {grid} names {expected} patches: give both as processed")


def _patches(grid: Tensor | None) -> int:
    return 0 if grid is None else int(grid.prod(-1).sum())


def _vector(sample: Mapping[str, Any], key: str) -> Tensor:
    tensor = torch.as_tensor(sample[key])
    if tensor.dim() == 2 and tensor.shape[0] == 1:  # a processor's batch of one
        tensor = tensor[0]
    if tensor.dim() != 1:
        raise SampleError(f"{key} is {tuple(tensor.shape)}, but a sample has one row: give each conversation by itself")
    return tensor.long()


def _stack(value: Any) -> Tensor:
    if isinstance(value, (list, tuple)) and not isinstance(value[0], (int, float)):
        return torch.stack([torch.as_tensor(part) for part in value])
    return torch.as_tensor(value)
