"""Stand-in for torchvision in the child: functions that make images of the right size and look at no pixel.

Of an image only its size is asked, so resizing is making a blank one. Numbers are one zero seen many times until an
operation of torch writes them. What Transformers' image and video processors call is here (5.23); nothing else is.
"""

from __future__ import annotations

import enum
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

VERSION = "0.28.0"  # of torch 2.13: which branches of Transformers run


class InterpolationMode(enum.Enum):
    """torchvision's names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def blank(*shape: int, dtype: torch.dtype = torch.uint8, device: Any = "cpu") -> Tensor:
    """Return an image or a clip of black pixels that takes no memory; on the meta device it has no pixels at all."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def install() -> None:
    """Puts the stand-in where `import torchvision` finds it; before Transformers is imported."""
    made = {name: _module(name) for name in _NAMES}
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    made["torchvision"].__version__ = VERSION  # type: ignore[attr-defined]
    for name in ("torchvision.transforms.v2.functional", "torchvision.transforms.functional"):
        for function in _FUNCTIONS:
            setattr(made[name], function.__name__, function)
        made[name].to_image = pil_to_tensor  # type: ignore[attr-defined]
        made[name].to_dtype_image = to_dtype  # type: ignore[attr-defined]
    made["torchvision.transforms"].InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    sys.modules.update(made)


_NAMES = (
    *("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"),
    *("torchvision.transforms.v2", "torchvision.transforms.v2.functional"),
)


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__file__ = __file__
    return module


def resize(
    inpt: Tensor,
    size: Sequence[int] | int,
    interpolation: Any = None,  # noqa: ARG001 - of pixels
    max_size: int | None = None,
    antialias: bool = True,  # noqa: ARG001 - of pixels
) -> Tensor:
    sides = [size] if isinstance(size, int) else [int(x) for x in size]
    if len(sides) == 1:  # the shorter side, as torchvision rounds it
        height, width = inpt.shape[-2:]
        short, long = min(height, width), max(height, width)
        other = int(sides[0] * long / short)
        if max_size is not None and other > max_size:
            sides[0], other = int(max_size * sides[0] / other), max_size
        sides = [sides[0], other] if height <= width else [other, sides[0]]
    return blank(*inpt.shape[:-2], *sides, dtype=inpt.dtype, device=inpt.device)


def pad(inpt: Tensor, padding: Sequence[int] | int, fill: Any = 0, padding_mode: str = "constant") -> Tensor:  # noqa: ARG001
    sides = [padding] * 4 if isinstance(padding, int) else [int(x) for x in padding]
    left, top, right, bottom = sides if len(sides) == 4 else [sides[0], sides[-1], sides[0], sides[-1]]
    height, width = inpt.shape[-2:]
    return blank(*inpt.shape[:-2], height + top + bottom, width + left + right, dtype=inpt.dtype, device=inpt.device)


def crop(inpt: Tensor, top: int, left: int, height: int, width: int) -> Tensor:  # noqa: ARG001
    return blank(*inpt.shape[:-2], height, width, dtype=inpt.dtype, device=inpt.device)


def center_crop(inpt: Tensor, output_size: Sequence[int]) -> Tensor:
    return blank(*inpt.shape[:-2], *output_size, dtype=inpt.dtype, device=inpt.device)


def normalize(inpt: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:  # noqa: ARG001
    return blank(*inpt.shape, dtype=inpt.dtype, device=inpt.device)


def grayscale_to_rgb(inpt: Tensor) -> Tensor:
    return (
        blank(*inpt.shape[:-3], 3, *inpt.shape[-2:], dtype=inpt.dtype, device=inpt.device)
        if inpt.shape[-3] == 1
        else inpt
    )


def rgb_to_grayscale(inpt: Tensor, num_output_channels: int = 1) -> Tensor:
    return blank(*inpt.shape[:-3], num_output_channels, *inpt.shape[-2:], dtype=inpt.dtype, device=inpt.device)


def to_dtype(inpt: Tensor, dtype: torch.dtype = torch.float32, scale: bool = False) -> Tensor:  # noqa: ARG001
    return blank(*inpt.shape, dtype=dtype, device=inpt.device)


def gaussian_blur(inpt: Tensor, kernel_size: Any, sigma: Any = None) -> Tensor:  # noqa: ARG001
    return inpt


def pil_to_tensor(pic: Any) -> Tensor:
    return blank(len(pic.getbands()), pic.height, pic.width)


def to_pil_image(pic: Tensor) -> Any:
    from PIL import Image

    return Image.new("RGB", (pic.shape[-1], pic.shape[-2]))


_FUNCTIONS: tuple[Any, ...] = (
    *(resize, pad, crop, center_crop, normalize, grayscale_to_rgb, rgb_to_grayscale, to_dtype, gaussian_blur),
    *(pil_to_tensor, to_pil_image, InterpolationMode),
)
