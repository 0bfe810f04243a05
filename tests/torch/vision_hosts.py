"""What surrounds shared images: a sequence-parallel host, conventions, pooling, ranks that disagree. Needs torch."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from rounding import BOUNDS, assert_close
from torch import Tensor, nn
from vision_context import run_context
from vision_odd_uses import fail, features, run_odd_uses, run_uses_of_one_model
from vision_runs import (
    Case,
    fully_shard_model,
    make_case,
    make_rank_case,
    run_both_gathers,
    run_dispatched,
    run_groups,
    run_mode,
    run_modes,
    shard,
    sum_over_ranks,
)

from refusals import refused
from trimtab.errors import TrimtabError
from trimtab.runtime.vision.apply import encode_pooled, verify_vision_dp, vision_dp

# -- sequence parallel, end to end ----------------------------------------------------------------------------------


class _Swap(torch.autograd.Function):
    """All-to-all of equal blocks along the first dimension; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor) -> Tensor:
        out = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, blocks.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Swap.forward(ctx, grad)


def heads_for_tokens(x: Tensor) -> Tensor:
    """(B, H, T / N, D) of this rank's tokens to (B, H / N, T, D) of its heads."""
    n = dist.get_world_size()
    b, h, t, d = x.shape
    blocks = _Swap.apply(x.reshape(b, n, h // n, t, d).transpose(0, 1))
    return blocks.permute(1, 2, 0, 3, 4).reshape(b, h // n, n * t, d)


def tokens_for_heads(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    b, h, t, d = x.shape
    blocks = _Swap.apply(x.reshape(b, h, n, t // n, d).permute(2, 0, 1, 3, 4))
    return blocks.transpose(0, 1).reshape(b, n * h, t // n, d)


def ulysses_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
    """Causal attention over the whole sequence, each rank with its share of the heads."""
    query, key, value = (heads_for_tokens(x) for x in (query, key, value))
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=kw.get("scaling"))
    return tokens_for_heads(out).transpose(1, 2), None


def slice_sequence(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a sequence-parallel trainer does behind the embeddings: every rank goes on with its part of the tokens."""
    mine = shard(dist.get_rank(), dist.get_world_size(), kwargs["inputs_embeds"].shape[1])
    kwargs["inputs_embeds"] = kwargs["inputs_embeds"][:, mine]
    kwargs["position_ids"] = kwargs["position_ids"][..., mine]
    if kwargs.get("visual_pos_masks") is not None:
        mask = kwargs["visual_pos_masks"]
        before, inside = int(mask[:, : mine.start].sum()), int(mask[:, mine].sum())
        layers = kwargs["deepstack_visual_embeds"]
        kwargs["deepstack_visual_embeds"] = [rows[before : before + inside] for rows in layers]
        kwargs["visual_pos_masks"] = mask[:, mine]
    return args, kwargs


def run_ulysses(rank: int) -> None:
    """Attention over all tokens by all-to-all, loss of the own tokens, gradients summed: the honest test of the sum."""
    transformers.AttentionInterface.register("ulysses", ulysses_attention)
    num_ranks = dist.get_world_size()
    for family in ("qwen2_5_vl", "qwen3_vl"):
        case = make_case(family, "images and clip")
        spare = -case.num_tokens % num_ranks
        ids = torch.cat([case.inputs["input_ids"], torch.full((1, spare), 9)], 1)
        case.weights = torch.cat([case.weights, torch.ones(1, spare, 203)], 1)
        positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
        case.inputs |= {"input_ids": ids, "position_ids": positions, "mm_token_type_ids": torch.zeros_like(ids)}
        logits = case.forward()
        case.loss(logits).backward()
        expected = case.gradients()

        language = case.model.model.language_model
        language.config._attn_implementation = "ulysses"
        mine = shard(rank, num_ranks, ids.shape[1])
        with vision_dp(case.model, timeout_s=60):
            language.register_forward_pre_hook(slice_sequence, with_kwargs=True)
            own = case.forward()
            (own * case.weights[:, mine]).sum().div(case.num_tokens).backward()
        assert_close(own, logits[:, mine], family)
        found = sum_over_ranks(case.gradients())
        for part in ("visual", "language_model"):
            assert_close(found, expected, family, part=part)


# -- conventions, verification, pooling -----------------------------------------------------------------------------


def own_loss(case: Case, times: int = 1) -> Tensor:
    """The loss of this rank's tokens."""
    return times * case.loss(case.forward(), shard(dist.get_rank(), dist.get_world_size(), case.num_tokens))


def reduce(case: Case, how: str) -> None:
    """What a host does to all gradients."""
    for p in case.model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size() if how == "mean" else 1


def run_conventions(rank: int) -> None:
    """Every way losses and gradients add up that gives the whole gradient."""
    case, N = make_case("qwen3_vl", "images"), dist.get_world_size()
    case.loss(case.forward()).backward()
    expected = case.gradients()
    whole = lambda: case.loss(case.forward())  # noqa: E731
    with vision_dp(case.model, timeout_s=60) as handle:
        for loss, host in (
            (functools.partial(own_loss, case), functools.partial(reduce, case, "sum")),
            (functools.partial(own_loss, case, N), functools.partial(reduce, case, "mean")),
            (whole, functools.partial(reduce, case, "mean")),
            (whole, handle.reduce_gradients),
        ):
            loss().backward()
            host()
            assert_close(case.gradients(), expected, part="visual")
            check = verify_vision_dp(handle, loss, reduce_gradients=host)
            assert check.gradient_error <= BOUNDS[torch.float32], check
        with refused(TrimtabError, "main_grad"):
            handle.reduce_gradients()  # cleared by the check


def run_verified(rank: int) -> None:
    """verify_vision_dp under FSDP2."""
    sharded = make_case("qwen3_vl", "images and clip")
    fully_shard_model(sharded.model)
    with vision_dp(sharded.model, timeout_s=60) as handle:
        check = verify_vision_dp(handle, lambda: own_loss(sharded, dist.get_world_size()))
        assert check.gradient_error <= BOUNDS[torch.float32], check


def run_pooled(rank: int) -> None:
    """Four micro-batches through one call of the tower: the gradient of four calls."""
    num_ranks = dist.get_world_size()
    cases = [make_rank_case("qwen3_vl", batch) for batch in ("one image", "images and clip", "text", "clip")]
    for case in cases:
        case.model = cases[0].model
        case.loss(case.forward()).backward()
    expected = cases[0].gradients()
    with vision_dp(cases[0].model, timeout_s=60) as handle:
        # each rank its part of every loss; then the first all, and the other takes part in the tower's backward alone
        for parts in ([rank / num_ranks, (rank + 1) / num_ranks], [0.0, 1.0 - rank]):
            pooled = encode_pooled(handle, [case.inputs for case in cases])
            for case, outputs in zip(cases, pooled.outputs, strict=True):
                inputs = {name: value for name, value in case.inputs.items() if not name.startswith("pixel")}
                logits = case.model(**inputs, mm_encoder_outputs=outputs or None).logits
                own = slice(*(int(part * case.num_tokens) for part in parts))
                if own.stop:
                    case.loss(logits, own).backward()
            pooled.backward()
            visual = {name: p.grad for name, p in cases[0].model.named_parameters() if "visual" in name}
            assert_close(sum_over_ranks(visual), {name: expected[name] for name in visual})
            cases[0].model.zero_grad()
        assert handle.load.calls == 4  # images, then clips, twice


# -- disagreement ---------------------------------------------------------------------------------------------------


def run_disagreements(rank: int) -> None:
    """Whatever one rank does otherwise raises on all, and the group works on; last, a rank that does not come."""
    case = make_case("qwen3_vl", "images")
    pixels, odd = case.inputs["pixel_values"], rank == 1
    alone = features(case)
    with vision_dp(case.model, timeout_s=60):
        with refused(TrimtabError, "1", "get_image_features"):
            features(case, pixel_values=pixels + odd)
        case.tower.requires_grad_(not odd)
        with refused(TrimtabError, "1"):
            features(case)
        case.tower.requires_grad_(True)
        hook = case.tower.register_forward_pre_hook(fail) if odd else None
        with pytest.raises((TrimtabError, ArithmeticError), match=r"rank 1|out of patience"):
            features(case)
        if hook is not None:
            hook.remove()
        for a, b in zip(features(case).pooler_output, alone.pooler_output, strict=True):
            assert_close(a, b, "features after all that")
        assert isinstance(features(case, return_dict=False), tuple)
    assert "last_hidden_state" in features(case)  # the module's own function again

    with vision_dp(case.model, timeout_s=2):
        if not odd:
            with refused(TrimtabError, "0", "2", "get_image_features", "1"):
                features(case)
        dist.barrier()
        if odd:  # late: it is told as well
            with refused(TrimtabError, "1", "2", "get_image_features"):
                features(case)
    with vision_dp(case.model):  # of ten minutes; a rank that leaves is missed at once
        if not odd:
            with refused(TrimtabError, "0", "2", "get_image_features", "1"):
                features(case)
    dist.barrier()


# -- one start of the processes for many of the above ---------------------------------------------------------------


def run_in_short(rank: int) -> None:
    """Each exchange once, a rank without images, and what one rank does otherwise."""
    run_mode("qwen3_vl", "images and clip", "plain")
    run_mode("qwen2_5_vl", "one image", "frozen")
    run_dispatched("qwen3_vl", ["text", "images and clip"])
    run_pooled(rank)
    run_odd_uses(rank)


def run_on_two(rank: int) -> None:
    """The last leaves a group that a rank did not come to."""
    run_modes("qwen2_5_vl", "one image")
    run_modes("qwen3_vl", "images and clip")
    run_ulysses(rank)
    run_uses_of_one_model(rank)
    run_disagreements(rank)


def run_on_three(rank: int) -> None:
    run_both_gathers()
    per_rank = ["one image", "text", "images and clip"]
    for wrapped, family in (("plain", "qwen2_5_vl"), ("fsdp2", "qwen3_vl"), ("ddp", "qwen3_vl")):
        for order in (per_rank, per_rank[::-1], ["text"] * 3):
            run_dispatched(family, order, wrapped)
    run_conventions(rank)
    run_verified(rank)


def run_on_four(rank: int) -> None:
    run_groups(rank, "qwen2_5_vl", "plain")
    run_groups(rank, "qwen3_vl", "fsdp2")
    run_context(rank)
