"""Who may attend to whom in a pack: block-diagonal masks, sliding windows, image tokens that see their whole image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def cumulative_lengths(lengths: Sequence[int]) -> Tensor:
    """(samples + 1,) int32 offsets of the samples, as varlen attention kernels take them."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def sample_numbers(lengths: Sequence[int]) -> Tensor:
    """(1, tokens) int32 number of the sample each token belongs to, as convolution and scan kernels take it."""
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]


def prefix_numbers(token_types: Sequence[Tensor]) -> Tensor:
    """(tokens,) the number of its sample for each token of type 0 (PaliGemma's image and question), -1 elsewhere."""
    return torch.cat([torch.where(types == 0, sample, -1) for sample, types in enumerate(token_types)])


def image_numbers(token_types: Sequence[Tensor]) -> Tensor:
    """(tokens,) the run of image tokens each token belongs to, -1 for text; runs end where their sample does.

    Gemma 3's own numbering goes through the row and would take an image at a sample's end and one at the next
    sample's start for one image.
    """
    runs, count = [], 0
    for types in token_types:
        is_image = types == 1
        starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0), value=False)[:-1]
        runs.append(torch.where(is_image, starts.cumsum(0) - 1 + count, -1))
        count += int(starts.sum())
    return torch.cat(runs)


def pack_mask(lengths: Sequence[int], *, window: int | None = None, images: Tensor | None = None) -> Tensor:
    """(1, 1, tokens, tokens) True where query q may attend to key k.

    same sample and (k <= q, or both in one image) and k > q - window; `images` as `image_numbers` gives them.
    tokens^2 bytes; work goes into the samples' own blocks.
    """
    mask = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        own = torch.ones(length, length, dtype=torch.bool).tril_()
        if images is not None:
            number = images[here]
            own |= (number[:, None] == number[None, :]) & (number >= 0)
        mask[here, here] = own if window is None else own.triu_(1 - window)
        start += length
    return mask[None, None]


def additive(mask: Tensor) -> Tensor:
    """What eager attention adds to its scores: 0, or float32's smallest number; 4 tokens^2 bytes."""
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


def text_masks(text_config: Any, lengths: Sequence[int], *, images: Tensor | None = None) -> Tensor | dict[str, Tensor]:
    """The masks a text model of Transformers 5.23 takes as its `attention_mask`.

    One tensor where all layers see alike; one for each layer type where full and sliding layers alternate.
    """
    types = set(getattr(text_config, "layer_types", None) or ())
    window = getattr(text_config, "sliding_window", None)
    if not types:
        return pack_mask(lengths, window=window, images=images)
    if types == {"full_attention"} and images is None:
        return pack_mask(lengths)
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: pack_mask(lengths, window=windows[kind], images=images) for kind in sorted(types)}
