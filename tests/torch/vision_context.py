"""Four ranks of cp, or of tp x cp, that share images: spawned processes call `run_context`. Needs torch.

The text is cut zig-zag, as hosts cut it, and every token's loss depends on its own embedding alone: so a rank of cp has
the loss of its own tokens, and ranks of tp that of all their tokens each. All of it equals one process.
"""

import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from drawn_images import draw_several_images
from rounding import distance
from shrunk_models import make_shrunk
from torch import Tensor, nn

from trimtab.runtime.vision.apply import VisionDataParallel, verify_vision_dp, vision_dp
from trimtab.runtime.vision.exchange import zigzag_rows
from trimtab.runtime.vision.hooks import find_functions
from trimtab.runtime.vision.inputs import rows_of

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "glm4v", "internvl")  # qwen3_vl: DeepStack; internvl: tiles of one size
CLOSE = 1e-7  # some towers compute positions or a norm in float32, whatever their own type
TEXT = 24  # tokens of a document's text


class Host:
    """A model's tower, and a text part that works token by token; micro-batches of three images, of none, of one."""

    def __init__(self, family: str, cp: int) -> None:
        self.model = make_shrunk(family, attention="eager").double()
        several = draw_several_images(self.model, find_functions(self.model)[0].original)
        assert several is not None
        self.batches: list[dict[str, Tensor] | None] = [several, None, self._first_of(several)]
        with torch.no_grad():
            counts = [0 if batch is None else len(self._rows(batch)) for batch in self.batches]
            width = self._rows(several).shape[1]
        draw = torch.Generator().manual_seed(2)
        self.head = nn.Linear(width, 5).double()
        with torch.no_grad():
            self.head.weight.normal_(std=0.3, generator=draw)
            self.head.bias.zero_()
        # two documents a pack: the second holds no image, the first all of them in its middle
        self.lengths = [[-(-(TEXT + n) // (2 * cp)) * 2 * cp, 4 * cp] for n in counts]
        self.is_image = [np.zeros(sum(lengths), np.bool_) for lengths in self.lengths]
        for image, n in zip(self.is_image, counts, strict=True):
            image[7 : 7 + n] = True
        self.texts = [torch.randn(len(x), width, generator=draw).double() for x in self.is_image]
        self.weights = [torch.randn(len(x), 5, generator=draw).double() for x in self.is_image]
        self.at = 0  # the micro-batch at hand

    def _first_of(self, several: dict[str, Tensor]) -> dict[str, Tensor]:
        if "image_grid_thw" not in several:
            return {name: x[:1] for name, x in several.items()}
        grid = several["image_grid_thw"][:1]
        own = {"pixel_values": several["pixel_values"][: int(grid.prod())], "image_grid_thw": grid}
        return {name: own.get(name, x[:1]) for name, x in several.items()}

    def _rows(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.cat(rows_of(self.model.get_image_features(**batch)), dim=-1)

    def loss(self, tokens: np.ndarray, *, cut: bool) -> Tensor:
        """Of `tokens` of the micro-batch at hand; `cut`: features are those of these tokens alone."""
        text, image, batch = self.texts[self.at][tokens], self.is_image[self.at], self.batches[self.at]
        if batch is not None:
            rows = self._rows(batch)
            place = np.cumsum(image) - 1
            own = rows if cut else rows[torch.from_numpy(place[tokens[image[tokens]]])]
            text = text.masked_scatter(torch.from_numpy(image[tokens])[:, None], own)
        return (torch.tanh(self.head(text)) * self.weights[self.at][tokens]).sum()

    def tokens_of(self, rank: int, cp: int) -> np.ndarray:
        """Positions that a rank of cp holds: of every document two pieces."""
        found, start = [], 0
        for length in self.lengths[self.at]:
            pieces = np.array_split(start + np.arange(length), 2 * cp)
            found += [pieces[rank], pieces[2 * cp - 1 - rank]]
            start += length
        return np.concatenate(found)

    def gradients(self) -> dict[str, Tensor]:
        named = itertools.chain(self.model.named_parameters(), self.head.named_parameters(prefix="head"))
        found = {name: p.grad.clone() for name, p in named if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        self.head.zero_grad(set_to_none=True)
        return found


def run_context(rank: int) -> None:
    """Both ways to bring features together, over cp 4 and over tp 2 x cp 2, trained and frozen."""
    tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    cp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for family in FAMILIES:
        for tp, cut, frozen in itertools.product((1, 2), (False, True), (False, True)):
            host = Host(family, dist.get_world_size() // tp)
            if frozen:
                host.model.requires_grad_(False)
            groups = None if tp == 1 else (tp_groups[rank // 2], cp_groups[rank % 2])
            _run(host, groups, tp, cut, (family, f"tp {tp}", "cut" if cut else "whole", "frozen" * frozen))


def _run(host: Host, groups: Any, tp: int, cut: bool, what: object) -> None:
    rank, cp = dist.get_rank() // tp, dist.get_world_size() // tp
    # 1. one process, all micro-batches
    for number in range(3):
        host.at = number
        host.loss(np.arange(len(host.is_image[host.at])), cut=False).backward()
    expected = host.gradients()

    # 2. every rank its tokens; gradients of tp replicas are averaged, those of cp ranks added up
    def rows() -> list[np.ndarray]:
        own = zigzag_rows(host.is_image[host.at], host.lengths[host.at], cp)
        return [own[r // tp] for r in range(cp * tp)]

    def reduce(handle: VisionDataParallel) -> None:
        if groups is not None and any(p.grad is not None for p in handle.vision_parameters()):
            handle.reduce_gradients(groups[0])
        for p in itertools.chain(host.model.parameters(), host.head.parameters()):
            if p.grad is not None:
                dist.all_reduce(p.grad, group=None if groups is None else groups[1])

    with vision_dp(host.model, rows=rows if cut else None, timeout_s=60) as handle:
        for number in range(3):
            host.at = number
            tokens = host.tokens_of(rank, cp)
            host.loss(np.sort(tokens), cut=cut).backward()
        reduce(handle)
        found = host.gradients()
        assert handle.load.calls == 2
        assert distance(found, expected) <= CLOSE, what
        if not cut and "head.weight" in found and len(found) > 2:
            host.at = 0
            tokens = host.tokens_of(rank, cp)
            check = verify_vision_dp(
                handle,
                lambda: host.loss(np.sort(tokens), cut=False),
                reduce_gradients=lambda: reduce(handle),
            )
            assert max(check.loss_error, check.gradient_error) <= CLOSE, (what, check)
