"""verl and ROLL: a workload for their sequence balancing that knows the model at hand, and its vision tower.

Both price a sequence of L tokens as 24576 L + L^2, for every model and without images: verl in
`verl.utils.seqlen_balancing.calculate_workload`, ROLL in the `calculate_workload` of its sequence packer. `VlmWorkload`
has verl's signature and scale, and coefficients from a cost table. Nothing of verl or ROLL is imported. Three modules
of verl 0.9 import its function by name (its trainer of `use_v1`, the older one, the one of SFT), so that setting it in
a module changes nothing there: `stand_in_for` changes the function itself. Tested with verl 0.9.1's own module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType

import torch

from trimtab.errors import ConfigError, ImageError, PackingError
from trimtab.specs import WORK_TERMS, ImageRule, Profile

TOKEN_UNITS = 24576
"""Units of a token's linear work in verl's formula (6 x 4096, of a 7B model); ours keeps it, so logs compare."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchCounts:
    """Vision work of a batch, one number a sequence."""

    num_patches: torch.Tensor
    patches_sq: torch.Tensor  # sum over frames of patches squared
    patches_windowed: torch.Tensor  # sum over attention windows of patches squared


@dataclass(frozen=True, slots=True, kw_only=True)
class VlmWorkload:
    """Call it with token counts, and with the vision work where there is some; get whole numbers proportional to time.

    seconds / unit, rounded, where seconds = a patches + b patches_sq + c patches_windowed + d tokens + e tokens^2 +
    f tokens_windowed (forward and backward of all layers) and unit = d / 24576. Not counted: what a micro-batch costs
    whatever is in it. Ranks that see the same numbers compute the same workload.
    """

    coefficients: tuple[float, ...]  # seconds per WORK_TERMS
    token_window: int | None = None  # sliding window of the language model's windowed layers

    def __call__(
        self, seqlen_list: torch.Tensor | Sequence[int] | int, vision: PatchCounts | None = None
    ) -> torch.Tensor:
        """Return (n,) int64 workload of `seqlen_list` tokens a sequence (tensor, list or number), with image tokens."""
        tokens = torch.as_tensor(seqlen_list).to(torch.float64)
        factor = dict(zip(WORK_TERMS, self.coefficients, strict=True))
        windowed = tokens * tokens
        if self.token_window is not None:
            W = float(self.token_window)
            windowed = torch.where(tokens <= W, windowed, 2.0 * tokens * W - W * W)
        seconds = factor["tokens"] * tokens + factor["tokens_sq"] * tokens * tokens
        seconds = seconds + factor["tokens_windowed"] * windowed
        if vision is not None:
            for name, count in (
                ("patches", vision.num_patches),
                ("patches_sq", vision.patches_sq),
                ("patches_windowed", vision.patches_windowed),
            ):
                if count.shape != tokens.shape:
                    raise PackingError(f"{name} has {tuple(count.shape)}, not {tuple(tokens.shape)}: one a sequence")
                seconds = seconds + factor[name] * count.to(tokens)
        return torch.round(seconds * (TOKEN_UNITS / factor["tokens"])).to(torch.int64)

    def with_vision(self, vision: PatchCounts) -> Callable[[torch.Tensor], torch.Tensor]:
        """The workload of one batch as a function of its token counts, for a caller that passes nothing else."""
        return lambda seqlen_list: self(seqlen_list, vision)


def vlm_workload(profile: Profile, *, token_window: int | None = None) -> VlmWorkload:
    """The workload that a cost table gives: `vlm_workload(profile_model(model, device), token_window=...)`.

    Use it where verl or ROLL balance sequences of images and text; docs/howto-verl.md shows it.

    `token_window` is `model.token_window`. A profile of any device and degree will do: the scale falls out, and vision
    against language is the model's own ratio.
    """
    per_term = profile.matrix("forward_s").sum(axis=0) + profile.matrix("backward_s").sum(axis=0)
    workload = VlmWorkload(coefficients=tuple(per_term.tolist()), token_window=token_window)
    if not workload.coefficients[WORK_TERMS.index("tokens")] > 0:
        raise ConfigError("no layer of the profile takes time per token: profile the language model too")
    return workload


def stand_in_for(original: FunctionType, workload: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let `original` compute `workload` of its one argument, wherever it was or will be imported by name.

    Use it where a trainer imports its own function by name: once in every process, before or after the trainer's
    imports, and again with another workload at any time, such as
    `workload.with_vision(...)` before each batch. Raises `ConfigError` for a function of another signature.

    >>> def calculate_workload(seqlen_list):
    ...     return 24576 * seqlen_list + seqlen_list**2
    >>> by_name = calculate_workload
    >>> stand_in_for(calculate_workload, lambda tokens: 2 * tokens)
    >>> by_name(7)
    14
    """

    def stand_in(seqlen_list):  # type: ignore[no-untyped-def]
        return _trimtab_workload(seqlen_list)  # type: ignore[name-defined]  # noqa: F821  # of the module of `original`

    if original.__code__.co_argcount != 1 or original.__code__.co_freevars:
        raise ConfigError(
            f"{original.__qualname__} is not replaced ({original.__code__.co_argcount} arguments, or made inside "
            "another function): change the call in its own source"
        )
    original.__globals__["_trimtab_workload"] = workload
    original.__code__ = stand_in.__code__


def count_grids(image_rule: ImageRule, grids: Sequence[torch.Tensor | None]) -> PatchCounts:
    """Return the vision work of sequences from their `image_grid_thw`, (images, 3) each, or None without images.

    Use it for `VlmWorkload.with_vision`; docs/howto-verl.md shows it.
    For the Qwen-VL families, whose processors return frames, rows and columns of patches; t frames count as t images.
    """
    side = getattr(image_rule, "patch_size", None)
    if not isinstance(side, int):
        raise ConfigError(f"image rule {image_rule.name} makes no grids: give PatchCounts of your own")
    counts = torch.zeros((3, len(grids)), dtype=torch.int64)
    for i, grid in enumerate(grids):
        for frames, rows, columns in [] if grid is None else grid.tolist():
            image = image_rule.count(columns * side, rows * side)
            if image.patches != rows * columns:
                raise ImageError(f"sequence {i} has {rows} x {columns} patches, not {image.patches}: give max_pixels")
            counts[:, i] += frames * torch.tensor([image.patches, image.patches_sq, image.patches_windowed])
    return PatchCounts(num_patches=counts[0], patches_sq=counts[1], patches_windowed=counts[2])
