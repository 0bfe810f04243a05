"""Calls that a model's towers take: text of any length for the decoder, images in Transformers' conventions.

The one place that knows what an image of a family looks like: describing, tracing and timing read it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.models.asking.blocks import is_matmul
from trimtab.models.asking.forward import Weightless
from trimtab.models.asking.units import Unit

Values = dict[str, Any]
"""Keyword arguments of a call."""


class ImageSource:
    """Images of growing size or number for one model.

    The first of `image_calls` that `get_image_features` takes is asked for again at every size. A model without that
    function reads images in its own forward, where any of the calls may be right.
    """

    def __init__(self, model: Any, units: list[Unit], *, side: int = 4) -> None:
        self.model, self.units, self.side = model, units, side
        encode = find_encoder(model)
        self.asks = encode is not None and "features" in getattr(encode, "__name__", "")
        self.encode: Callable[..., Any] = encode if encode is not None and self.asks else model.forward
        self.dtype = next(x.dtype for x in model.parameters() if x.is_floating_point())

    def choices(self) -> Iterator[int]:
        """Yield the numbers of the calls with an image that may be right."""
        if not self.asks and not reads_images(self.model):
            return
        for number, images in enumerate(self._calls(1)):
            if not self.asks or self._encodes(images):
                yield number

    def draw(self, choice: int, times: int, *, copies: int = 1) -> Values:
        """Draw `times` the smallest images: a larger grid of patches (`copies`: so many images), or more images."""
        found = next(x for i, x in enumerate(self._calls(times)) if i == choice)
        return found if copies == 1 else {name: torch.cat([x] * copies) for name, x in found.items()}

    def has_grid(self, choice: int) -> bool:
        """Return whether patches of all images lie in one tensor, next to a table of their sizes."""
        return any("grid" in name for name in self.draw(choice, 1))

    def _calls(self, times: int) -> Iterator[Values]:
        for call in image_calls(self.model, self.units, self.encode, side=self.side, times=times):
            yield {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in call.items()}

    def _encodes(self, images: Values) -> bool:
        try:
            with torch.no_grad(), quietly(), Weightless():
                return self.encode(**images) is not None
        except Exception:  # of any class that the model's own code likes
            return False


def reads_images(model: Any) -> bool:
    """Return whether the model's own forward takes pixels or patches."""
    return bool(
        {"pixel_values", "flattened_patches", "image_patches"} & inspect.signature(model.forward).parameters.keys()
    )


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence the warnings of calls that are only tried."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def find_encoder(model: Any) -> Callable[..., Any] | None:
    """The function that makes language rows of one image, or else the vision tower's own forward."""
    found = [getattr(x, "get_image_features", None) for x in (model, getattr(model, "model", None))]
    named = [x for x in found if x is not None]
    if named:
        spelled = [x for x in named if "args" not in inspect.signature(x).parameters]
        chosen: Callable[..., Any] = (spelled or named)[0]
        return chosen
    tower = model.get_encoder(modality="image")
    if tower is model or tower is None:
        tower = getattr(model, "encoder", None)
    forward: Callable[..., Any] | None = getattr(tower, "forward", None)
    return forward


def image_token(config: Any) -> int | None:
    """The id that stands for a piece of an image, or of a clip; None: the configuration names none."""
    for name in ("image_token_id", "image_token_index", "image_patch_id", "video_token_id", "video_token_index"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def num_embeddings(model: Any) -> int:
    """Count the entries of the model's table of words; 4096 where it names none."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError):
        return 4096


def plain_ids(config: Any, vocab_size: int) -> Tensor:
    """Return ids below `vocab_size` that stand for plain text: none that the configuration or a part of it names."""
    known: set[int] = set()

    def collect(part: Any) -> None:
        for name, value in vars(part).items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                known.update(x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, int))
            elif hasattr(value, "to_dict"):
                collect(value)

    collect(config)
    return torch.tensor([x for x in range(min(vocab_size, 4096)) if x not in known])


def text_calls(model: Any, num_tokens: int) -> Iterator[Values]:
    """Yield the keyword arguments under which the whole model, or its decoder, may read `num_tokens` words."""
    word = int(plain_ids(model.config, 4096)[5])
    ids = torch.full((1, num_tokens), word)
    yield {"input_ids": ids, "use_cache": False}
    yield {"input_ids": ids}
    yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    yield {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids), "use_cache": False}
    yield {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}


def image_calls(model: Any, units: list[Unit], encode: Any, *, side: int = 16, times: int = 1) -> Iterator[Values]:
    """Yield arguments of `get_image_features`, or of a tower: what processors give, by the names that are taken.

    Where patches come next to a grid, one image of about `side`^2 x `times` patches; else `times` images of the
    configuration's size.
    """
    inner = getattr(
        getattr(model, "model", None), getattr(encode, "__name__", ""), encode
    )  # whose arguments are spelled
    taken = {*inspect.signature(encode).parameters, *inspect.signature(inner).parameters}
    shape = _Shape.of(model, units, side, times)
    extra = {name: value for name, value in other_words(model, times).items() if name in taken}
    for call in itertools.chain(_grids(shape, taken), _sized(shape, taken), _tiles(model, shape, taken), _bare(shape)):
        yield {**call, **extra}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Sizes of images and of their patches."""

    high: int  # of the grid, in patches
    wide: int
    patch: int
    merge: int
    channels: int
    frames: int
    values: tuple[int, ...]  # numbers of one patch, as the first matrices take them
    sizes: tuple[int, ...]  # sides of an image in pixels, the likeliest first
    tile_patches: int  # of an image of fixed size
    times: int

    @staticmethod
    def of(model: Any, units: list[Unit], side: int, times: int) -> _Shape:
        vision = vision_config(model.config)
        patch = first_int(vision, "patch_size", "spatial_patch_size", "encoder_patch_size") or 14
        merge = first_int(vision, "spatial_merge_size", "merge_size", "merge_kernel_size") or 2
        channels = first_int(vision, "in_channels", "num_channels", "in_chans") or 3
        frames = first_int(vision, "temporal_patch_size") or 1
        least = side * merge // 2 * 2
        high = least * max(1, round(times**0.5))
        own = [first_int(vision, "image_size"), first_int(model.config, "image_size")]
        own = own if any(own) else [side * patch, 768]
        return _Shape(
            high=high,
            wide=least * max(1, round(times * least / high)),
            patch=patch,
            merge=merge,
            channels=channels,
            frames=frames,
            values=_patch_values(units) or (channels * frames * patch * patch,),
            sizes=tuple(dict.fromkeys(x for x in own if x)),
            tile_patches=first_int(vision, "num_position_embeddings") or side * side,
            times=times,
        )

    def patches(self, width: int) -> Tensor:
        return torch.ones(self.high * self.wide, width, dtype=torch.bfloat16)

    def places(self) -> Tensor:
        """Return (1, patches, 2) column and row of every patch."""
        at = torch.meshgrid(torch.arange(self.wide), torch.arange(self.high), indexing="xy")
        return torch.stack(at, -1).reshape(1, -1, 2)


def _grids(s: _Shape, taken: set[str]) -> Iterator[Values]:
    """Yield patches of all images in one tensor, next to a table of (frames, height, width)."""
    one = s.channels * s.patch * s.patch
    widths = dict.fromkeys((*s.values, one * s.frames, one, one * s.merge**2, one * s.frames * s.merge**2))
    for name in ("image_grid_thw", "grid_thw", "image_grid_hw", "grid_thws"):
        if name not in taken:
            continue
        grid = torch.tensor([[1, s.high, s.wide]])[:, 1 if name == "image_grid_hw" else 0 :]
        merges = {"image_merge_sizes": torch.tensor([s.merge])} if "image_merge_sizes" in taken else {}
        for width in widths:
            yield {"pixel_values": s.patches(width), name: grid, **merges}
        yield {"pixel_values": s.patches(one).view(-1, s.channels, s.patch, s.patch), name: grid}
        merged = s.merge * s.patch  # of several patches each, channels last
        yield {"pixel_values": s.patches(one * s.merge**2).view(-1, merged, merged, s.channels), name: grid}


def _sized(s: _Shape, taken: set[str]) -> Iterator[Values]:
    """Yield patches of each image by itself, next to its sizes or the places of its patches."""
    one, rows = s.channels * s.patch * s.patch, s.high * s.wide
    patches = s.patches(one)[None]
    for name in ("spatial_shapes", "target_sizes", "tgt_sizes"):
        if name in taken:
            sizes = torch.tensor([[s.high, s.wide]])
            yield {"pixel_values": patches, name: sizes, "pixel_attention_mask": torch.ones(1, rows, dtype=torch.long)}
            yield {
                "pixel_values": torch.ones(1, s.channels, s.patch, rows * s.patch, dtype=torch.bfloat16),
                name: sizes,
            }
    for name in ("image_position_ids", "pixel_position_ids"):
        if name in taken:
            yield {"pixel_values": patches, name: s.places()}
    if "image_token_pooling" in taken:  # tiles of so many patches, four of which make a token
        tokens = s.tile_patches // 4
        yield {
            "pixel_values": torch.ones(s.times, 4 * tokens, one, dtype=torch.bfloat16),
            "image_token_pooling": torch.arange(4 * tokens * s.times).view(-1, 4),
            "image_grids": torch.tensor([[tokens, 1, 0, 0]] * s.times),
        }
    if "flattened_patches" in taken or "image_patches" in taken:
        name = "flattened_patches" if "flattened_patches" in taken else "image_patches"
        for width in s.values:
            yield {name: torch.cat([1 + s.places().flip(-1), s.patches(width)[None]], dim=-1)}
            yield {name: s.patches(width)[None]}


def _tiles(model: Any, s: _Shape, taken: set[str]) -> Iterator[Values]:
    """Yield images of a fixed size, one by one, as tiles of one image, or as images of one sample."""
    name = next((x for x in ("pixel_values", "images") if x in taken), "pixel_values")
    points = getattr(model.config, "image_grid_pinpoints", None)
    for size in s.sizes:
        tile = (s.channels, size, size)
        extra: Values = {}
        if "image_sizes" in taken:
            extra["image_sizes"] = torch.tensor([[size, size]] * s.times)
        if points:
            least = min(points, key=lambda x: (x[0] * x[1], x))
            tiles = max(1, (least[0] // size) * (least[1] // size)) + 1
            pixels = torch.ones(s.times, tiles, *tile, dtype=torch.bfloat16)
            yield {name: pixels, "image_sizes": torch.tensor([list(least)] * s.times)}
        if "high_res_pixel_values" in taken:
            high = first_int(getattr(model.config, "high_res_vision_config", None), "image_size") or size
            large = torch.ones(s.times, s.channels, high, high, dtype=torch.bfloat16)
            yield {name: torch.ones(s.times, *tile, dtype=torch.bfloat16), "high_res_pixel_values": large}
        if "aspect_ratio_ids" in taken:
            most = first_int(vision_config(model.config), "max_num_tiles") or 1
            real = torch.zeros(1, s.times, most, dtype=torch.long)
            real[..., 0] = 1
            pixels = torch.ones(1, s.times, most, *tile, dtype=torch.bfloat16)
            ids = torch.ones(1, s.times, dtype=torch.long)
            yield {name: pixels, "aspect_ratio_ids": ids, "aspect_ratio_mask": real}
        for leading in ((s.times,), (1, s.times), (s.times, 2), (2 * s.times,), (s.times, 1, 1), (s.times, 1)):
            yield {name: torch.ones(*leading, *tile, dtype=torch.bfloat16), **extra}
            if extra:
                yield {name: torch.ones(*leading, *tile, dtype=torch.bfloat16)}
            if "pixel_attention_mask" in taken:
                real = torch.ones(leading, dtype=torch.bool)
                yield {name: torch.ones(*leading, *tile, dtype=torch.bfloat16), "pixel_attention_mask": real}
        for key in ("num_local_patches", "num_local_crops"):
            if key in taken:
                none = torch.zeros(s.times, dtype=torch.long)
                yield {name: torch.ones(s.times, *tile, dtype=torch.bfloat16), key: none}


def _bare(s: _Shape) -> Iterator[Values]:
    """Yield patches of one image with nothing else: their numbers in a row, or frames of pixels, channels last."""
    for width in s.values:
        yield {"pixel_values": s.patches(width)[None]}
    one = (s.frames, s.patch, s.patch, s.channels)
    yield {"pixel_values": torch.ones(s.high * s.wide, *one, dtype=torch.bfloat16)}


def other_words(model: Any, num: int) -> Values:
    """Return text that some encoders of `num` images read too."""
    word = int(plain_ids(model.config, 4096)[5])
    return {"qformer_input_ids": torch.full((num, 4), word)}


def _patch_values(units: list[Unit]) -> tuple[int, ...]:
    """Shape the numbers of one patch, as the vision tower's first matrix takes them, or its parts before the blocks."""
    parts = [x for x in units if x.tower == "vision" and x.module is not None]
    firsts = [next((x for x in part.module.modules() if is_matmul(x)), None) for part in parts]
    return tuple(dict.fromkeys(int(x.weight[0].numel()) for x in firsts if x is not None))[:4]


def vision_config(config: Any) -> Any:
    for name in ("vision_config", "vision_encoder_config", "perception_config", "encoder"):
        found = getattr(config, name, None)
        if found is not None and not isinstance(found, dict):
            return found
    return config


def first_int(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, dict):
            value = value.get("height")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
