"""Ranks that share images, for the tests of vision data parallel: functions that spawned processes call. Needs torch.

Each rank compares features and gradients with those of the same model alone; a case that fails is named.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rounding import assert_close, distance
from tiny_models import IMAGE_TOKEN, make_tiny_model
from torch import Tensor, nn

from trimtab.runtime.vision.apply import vision_dp

VIDEO_TOKEN = 198
BATCHES: dict[str, tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]] = {
    "one image": ([(1, 4, 8)], []),  # fewer images than ranks
    "images": ([(1, 8, 8), (1, 4, 4), (1, 4, 12)], []),
    "clip": ([], [(5, 4, 4)]),
    "images and clip": ([(1, 4, 4), (1, 8, 12)], [(3, 4, 8)]),
}
MODES = (
    *("plain", "frozen", "merger only", "autocast", "bf16"),
    *("ddp", "fsdp2", "layer recompute", "tower recompute", "no_grad"),
)


@dataclass
class Case:
    """A model, a batch for it, and what each token weighs in the loss."""

    model: nn.Module
    inputs: dict[str, Tensor]
    weights: Tensor

    @property
    def tower(self) -> nn.Module:
        return self.model.model.visual

    @property
    def num_tokens(self) -> int:
        return self.weights.shape[1]

    def forward(self, model: nn.Module | None = None, **changes: Any) -> Tensor:
        return (model or self.model)(**{**self.inputs, **changes}).logits

    def loss(self, logits: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Weighted sum of logits over some tokens: losses of disjoint slices add up to that of all."""
        return (logits.float() * self.weights)[:, tokens].sum() / self.num_tokens

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                found[name.replace("_checkpoint_wrapped_module.", "")] = grad.detach().clone().float()
        self.model.zero_grad(set_to_none=True)
        return found


@functools.cache
def _tiny(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = make_tiny_model(family).model
    model.config.video_token_id = model.model.config.video_token_id = VIDEO_TOKEN
    return model


def make_case(family: str, batch: str, dtype: torch.dtype = torch.float32) -> Case:
    model = copy.deepcopy(_tiny(family)).to(dtype)
    images, videos = BATCHES[batch]
    noise = torch.Generator().manual_seed(1)
    ids, inputs = [3, 4], {}
    for grids, token, pixels, table in (
        (images, IMAGE_TOKEN, "pixel_values", "image_grid_thw"),
        (videos, VIDEO_TOKEN, "pixel_values_videos", "video_grid_thw"),
    ):
        if grids:
            grid = torch.tensor(grids)
            width = 3 * 2 * 14 * 14
            inputs[pixels] = torch.randn(int(grid.prod(1).sum()), width, generator=noise).to(dtype)
            inputs[table] = grid
            for t, h, w in grids:
                ids += [token] * (t * h * w // 4) + [5, 6]
    tokens = len(ids)
    inputs["input_ids"] = torch.tensor([ids])
    inputs["position_ids"] = torch.arange(tokens).expand(3, 1, tokens)
    inputs["mm_token_type_ids"] = torch.zeros(1, tokens, dtype=torch.int64)
    return Case(model, inputs, torch.randn(1, tokens, 203, generator=noise))


def shard(rank: int, num_ranks: int, length: int) -> slice:
    return slice(length * rank // num_ranks, length * (rank + 1) // num_ranks)


def sum_over_ranks(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return gradients


def mean_over_ranks(found: dict[str, Tensor], expected: dict[str, Tensor], wrapped: str) -> dict[str, Tensor]:
    """Of gradients that a wrapper has averaged, or nobody; without those of a tower that no rank needed."""
    if wrapped == "plain":
        found = sum_over_ranks({n: found.get(n, torch.zeros_like(g)) for n, g in expected.items()})
        return {n: g / dist.get_world_size() for n, g in found.items()}
    return {n: g for n, g in found.items() if n in expected or g.any()}


def each_case(cases: list[tuple[str, Callable[[], None]]]) -> None:
    """Run all; raise with the names of those that failed."""
    failed = []
    for name, run in cases:
        try:
            run()
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            if "waited" in str(error) or "Connection" in str(error):
                break
    assert not failed, "\n".join(failed)


# -- the matrix of hard cases ---------------------------------------------------------------------------------------


def run_modes(family: str, batch: str) -> None:
    transformers.logging.set_verbosity_error()
    each_case([(f"{family}, {batch}, {mode}", functools.partial(run_mode, family, batch, mode)) for mode in MODES])


def run_mode(family: str, batch: str, mode: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = make_case(family, batch)
    mine = shard(rank, num_ranks, case.num_tokens)
    if mode in ("autocast", "bf16"):
        _run_bf16(case, mode, mine)
        return
    if mode == "frozen":
        case.tower.requires_grad_(False)
    if mode == "merger only":
        case.tower.requires_grad_(False)
        case.tower.merger.requires_grad_(True)
    expected_logits = case.forward()
    case.loss(expected_logits).backward()
    expected = case.gradients()

    model, kappa, reduce = case.model, 1, True
    if mode == "layer recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    if mode == "tower recompute":
        _recompute_whole(case.model.model)
    if mode == "ddp":
        model = nn.parallel.DistributedDataParallel(case.model)
    if mode == "fsdp2":
        fully_shard_model(case.model)
    if mode in ("ddp", "fsdp2"):
        kappa, reduce = num_ranks, False
    with vision_dp(case.model, timeout_s=60) as handle:
        for _ in range(2):
            if mode == "no_grad":
                with torch.no_grad():
                    logits = case.forward(model)
                assert not logits.requires_grad
            else:
                logits = case.forward(model)
                (kappa * case.loss(logits, mine)).backward()
            assert_close(logits, expected_logits, "logits")
            if mode != "no_grad":
                found = case.gradients()
                if reduce:
                    sum_over_ranks(found)
                for part in ("language_model",) if mode == "frozen" else ("visual", "language_model"):
                    assert_close(found, expected, "gradients", part=part)
        assert handle.load.calls >= 2
    assert "get_image_features" not in case.model.model.__dict__


def _run_bf16(case: Case, mode: str, mine: slice) -> None:
    """No farther from float32 than one process's own bf16 gradient is, times 1.5."""
    case.loss(case.forward()).backward()
    exact = case.gradients()
    context: Callable[[], Any] = contextlib.nullcontext
    if mode == "autocast":
        context = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    else:
        case.model.bfloat16()
        case.inputs = {n: t.bfloat16() if t.is_floating_point() else t for n, t in case.inputs.items()}
    with context():
        logits = case.forward()
    case.loss(logits).backward()
    alone = distance(case.gradients(), exact, "visual")
    with vision_dp(case.model, timeout_s=60):
        with context():
            shared = case.forward()
        case.loss(shared, mine).backward()
    together = distance(sum_over_ranks(case.gradients()), exact, "visual")
    assert_close(shared, logits, "logits", dtype=torch.bfloat16)
    assert together <= 1.5 * alone, f"{together} from float32, one process {alone}"


def _recompute_whole(inner: nn.Module) -> None:
    """The tower, as the model calls it, recomputed as one."""
    from torch.utils.checkpoint import checkpoint

    forward = inner.visual.forward
    inner.visual.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def fully_shard_model(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in model.model.visual.blocks:
            fully_shard(block)
        for layer in model.model.language_model.layers:
            fully_shard(layer)
        fully_shard(model)


def run_both_gathers() -> None:
    """Padded all-gather and unpadded all-to-all give the same."""
    from trimtab.runtime.vision import exchange

    for exchange.MAX_PADDING in (0.0, 100.0):
        for batch in ("one image", "images and clip"):
            run_mode("qwen3_vl", batch, "plain")


# -- exchanges ------------------------------------------------------------------------------------------------------


def run_dispatched(family: str, order: list[str], wrapped: str = "plain") -> None:
    """Every rank has a batch of its own, some without images; parameters' gradients are averaged over the ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    cases = [make_rank_case(family, batch) for batch in order]
    whole = cases[0].model
    for case in cases:
        case.model = whole
        (case.loss(case.forward()) / num_ranks).backward()
    expected = cases[0].gradients()
    case = cases[rank]
    alone = case.forward().detach()
    if wrapped == "fsdp2":
        fully_shard_model(whole)
    elif wrapped == "ddp":
        case.model = nn.parallel.DistributedDataParallel(whole, find_unused_parameters=order[-1] == "text")
    with vision_dp(whole, exchange="dispatch", timeout_s=60) as handle:
        logits = case.forward()
        case.loss(logits).backward()
        assert handle.load.calls == sum(any(BATCHES[b][i] for b in order if b != "text") for i in (0, 1))
    assert_close(logits, alone, (family, order))
    assert_close(mean_over_ranks(cases[rank - 1].gradients(), expected, wrapped), expected, (family, order))


def make_rank_case(family: str, batch: str) -> Case:
    if batch != "text":
        return make_case(family, batch)
    case = make_case(family, "one image")
    for name in ("pixel_values", "image_grid_thw"):
        del case.inputs[name]
    case.inputs["input_ids"] = torch.where(case.inputs["input_ids"] == IMAGE_TOKEN, 7, case.inputs["input_ids"])
    return case


# -- groups beside groups -------------------------------------------------------------------------------------------


def run_groups(rank: int, family: str, wrapped: str) -> None:
    """Two sequence-parallel groups of two; the parameters' group is all four. One group's batch has no image."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, half = pairs[rank // 2], rank // 2
    for batches in (("images and clip", "text"), ("clip", "one image"), ("text", "text")):
        cases = [make_rank_case(family, batch) for batch in batches]
        whole = cases[0].model
        for case in cases:
            case.model = whole
            (case.loss(case.forward()) / 2).backward()
        expected = cases[0].gradients()
        case = cases[half]
        if wrapped == "fsdp2":
            fully_shard_model(whole)
        mine = shard(rank % 2, 2, case.num_tokens)
        with vision_dp(whole, group, heartbeat=dist.group.WORLD, timeout_s=60):
            (2 * case.loss(case.forward(), mine)).backward()  # the mean over 4 ranks: kappa = 2 in each group
        assert_close(mean_over_ranks(case.gradients(), expected, wrapped), expected, (family, batches))
