"""Images of random numbers in the shape that a small model of any family takes, and samples with them. Needs torch."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trimtab.models.asking.inputs import first_int, image_token, vision_config
from trimtab.runtime.data.formats import ask_format
from trimtab.runtime.data.packing import text_ids


def draw_image_samples(model: Any) -> list[dict[str, torch.Tensor]] | None:
    """Samples with images inside, at the end and at the start, and one of text; None: no shape of image is taken."""
    token, core = image_token(model.config), getattr(model, "model", model)
    encode = getattr(model, "get_image_features", None) or getattr(core, "get_image_features", None)
    if token is None or encode is None:
        return None
    for number, image in enumerate(_shapes(model, set(ask_format(model.config).joined), 1)):
        try:
            with torch.no_grad():
                num_tokens = _count_rows(encode(**image))
        except Exception:  # another family's shape
            continue
        text = text_ids(model)
        ids = text[torch.randint(len(text), (20,), generator=torch.Generator().manual_seed(number))].tolist()
        rows = [token] * num_tokens
        parts = [[*ids[:4], *rows, *ids[4:6]], ids[6:13], [*ids[13:15], *rows], [*rows, *ids[15:]]]
        return [
            {
                "input_ids": torch.tensor(part),
                "labels": torch.tensor(part),
                **(_redrawn(image) if token in part else {}),
            }
            for part in parts
        ]
    return None


def draw_several_images(model: Any, encode: Callable[..., Any]) -> dict[str, torch.Tensor] | None:
    """Three images, of different sizes where the family takes such, in the first shape that `encode` takes."""
    for images in _shapes(model, set(inspect.signature(inspect.unwrap(encode)).parameters), 3):
        given = {key: x.to(model.dtype) if x.is_floating_point() else x for key, x in images.items()}
        try:
            with torch.no_grad():
                encode(**given)
        except Exception:  # another family's shape
            continue
        return given
    return None


def _shapes(model: Any, keys: set[str], num: int) -> Iterator[dict[str, torch.Tensor]]:
    """One image or three in each shape that processors give, those first whose keys the family takes."""
    vision = vision_config(model.config)
    patch, size = first_int(vision, "patch_size") or 14, first_int(vision, "image_size") or 56
    channels = first_int(vision, "in_channels", "num_channels") or 3
    torch.manual_seed(3)
    if "image_grid_thw" in keys:  # patches of all images in one tensor
        side = first_int(vision, "spatial_merge_size", "merge_kernel_size") or 2
        grids = torch.tensor([[1, side * h, side * w] for h, w in ((1, 2), (4, 4), (2, 4))[:num]])
        more = {"image_merge_sizes": torch.tensor([side] * num)} if "image_merge_sizes" in keys else {}
        frames = first_int(vision, "temporal_patch_size") or 1
        widths = dict.fromkeys(channels * x * patch**2 for x in (frames, 1, 2))
        for shape in (*((width,) for width in widths), (channels, patch, patch)):
            yield {"pixel_values": torch.randn(int(grids.prod(1).sum()), *shape), "image_grid_thw": grids, **more}
    if "spatial_shapes" in keys:  # of each image by itself, padded
        shapes = torch.tensor([[4, 4], [2, 4], [4, 2]][:num])
        mask = (torch.arange(16) < shapes.prod(1)[:, None]).long()
        pixels = torch.randn(num, 16, channels * patch**2)
        yield {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    tiles = torch.randn(num, channels, size, size)
    if "image_position_ids" in keys:
        where = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
        yield {"pixel_values": torch.randn(num, 16, channels * patch**2), "image_position_ids": where.repeat(num, 1, 1)}
    if "high_res_pixel_values" in keys:
        yield {"pixel_values": tiles, "high_res_pixel_values": torch.randn_like(tiles)}
    points = getattr(model.config, "image_grid_pinpoints", None)
    if points and "image_sizes" in keys:  # tiles of one canvas and the whole
        chosen = torch.tensor([*points, *points, *points][:num])
        most = max(high * wide for high, wide in points) // size**2 + 1
        yield {"pixel_values": torch.randn(num, most, channels, size, size), "image_sizes": chosen}
    if "image_sizes" in keys:
        sizes = torch.tensor([[size, size], [size // 2, size], [size, size // 2]][:num])
        yield {"pixel_values": tiles, "image_sizes": sizes}
        yield {"pixel_values": tiles[None], "image_sizes": sizes}
    if "pixel_attention_mask" in keys and num > 1:
        pixels = torch.randn(num, 2, channels, size, size)
        pixels[1, 1] = 0.0  # padding of a sample with one image
        yield {"pixel_values": pixels}
    yield {"pixel_values": tiles}
    yield {"pixel_values": tiles[:, None]}


def _redrawn(image: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.randn_like(value) if value.is_floating_point() else value for key, value in image.items()}


def _count_rows(features: Any) -> int:
    found = getattr(features, "pooler_output", None)
    found = features if found is None else found
    parts = found if isinstance(found, (list, tuple)) else [found]
    return sum(part.shape[:-1].numel() for part in parts)
