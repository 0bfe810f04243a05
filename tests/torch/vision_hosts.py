"""What surrounds shared images: a sequence-parallel host, conventions, pooling, ranks that disagree. Needs torch."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from rounding import BOUNDS, assert_close
from tiny_models import IMAGE_TOKEN
from torch import Tensor, nn
from vision_odd_uses import (
    run_calls_that_differ,
    run_odd_uses,
    run_problems_of_one_rank,
    run_verified_dispatch,
)
from vision_runs import (
    VIDEO_TOKEN,
    Case,
    fully_shard_model,
    make_case,
    make_rank_case,
    run_both_gathers,
    run_dispatched,
    run_groups,
    run_mode,
    run_modes,
    run_routed,
    shard,
    sum_over_ranks,
)

from trimtab.errors import TrimtabError
from trimtab.runtime.vision import encode_pooled, rows_of_shards, verify_vision_dp, vision_dp
from trimtab.runtime.vision.gradients import KAPPA_IS_N

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
        for exchange in ("gather", "routed"):
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
            changes: dict[str, Any] = {}
            context: Any = contextlib.nullcontext()
            with vision_dp(case.model, exchange=exchange, timeout_s=60) as handle:
                if exchange == "gather":
                    language.register_forward_pre_hook(slice_sequence, with_kwargs=True)
                else:  # tokens are divided before the embedding, so that each rank needs its own rows only
                    shards = [shard(r, num_ranks, ids.shape[1]) for r in range(num_ranks)]
                    changes = {"input_ids": ids[:, mine], "position_ids": positions[..., mine]}
                    image, video = (rows_of_shards(ids == token, shards) for token in (IMAGE_TOKEN, VIDEO_TOKEN))
                    context = handle.wanting(image=image, video=video)
                with context:
                    own = case.forward(**changes)
                (own * case.weights[:, mine]).sum().div(case.num_tokens).backward()
            assert_close(own, logits[:, mine], (family, exchange))
            found = sum_over_ranks(case.gradients())
            for part in ("visual", "language_model"):
                assert_close(found, expected, (family, exchange), part=part)


# -- conventions, verification, pooling -----------------------------------------------------------------------------


def own_loss(case: Case, kind: str) -> Tensor:
    """What a rank back-propagates under a convention."""
    num_ranks = dist.get_world_size()
    if kind == "replicated":
        return case.loss(case.forward())
    mine = shard(dist.get_rank(), num_ranks, case.num_tokens)
    return case.loss(case.forward(), mine) * (num_ranks if KAPPA_IS_N[kind] else 1)


def reduce(case: Case, how: str) -> None:
    """What a host does to all gradients."""
    for p in case.model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size() if how == "mean" else 1


def run_conventions(rank: int) -> None:
    """Every way losses and gradients add up: right, or refused by name."""
    case = make_case("qwen3_vl", "images")
    case.loss(case.forward()).backward()
    expected = case.gradients()
    refused = []
    for loss in KAPPA_IS_N:
        for how in ("sum", "mean", "none"):
            try:
                handle = vision_dp(case.model, loss=loss, reduction=how, timeout_s=60)
            except TrimtabError as error:
                refused.append((loss, how, "leaves every gradient, of text and of vision, " in str(error)))
                continue
            with handle:
                own_loss(case, loss).backward()
                if how == "none":
                    handle.reduce_gradients()
                    held = [p.grad for p in handle.vision_parameters()]
                    for p in handle.vision_parameters():
                        p.grad = None
                    with pytest.raises(TrimtabError, match="no vision parameter has one: call this behind the back"):
                        handle.reduce_gradients()
                    for p, gradient in zip(handle.vision_parameters(), held, strict=True):
                        p.grad = gradient
                else:
                    reduce(case, how)
                assert_close(case.gradients(), expected, (loss, how), part="visual")
                host = None if how == "none" else functools.partial(reduce, case, how)
                check = verify_vision_dp(handle, functools.partial(own_loss, case, loss), reduce_gradients=host)
                assert check.gradient_error <= BOUNDS[torch.float32], (loss, how, check)
                assert 0.9 < check.gradient_scale < 1.1, (loss, how, check)
    assert refused == [
        ("sharded", "mean", True),
        ("sharded", "none", True),
        ("sharded x N", "sum", True),
        ("sharded x N", "none", True),
        ("replicated", "sum", True),
    ]


def run_verified(rank: int) -> None:
    """What verify_vision_dp finds where a host does otherwise than declared, and under FSDP2."""
    num_ranks = dist.get_world_size()
    case = make_case("qwen3_vl", "images")
    with vision_dp(case.model, loss="sharded", reduction="sum", timeout_s=60) as handle:
        with pytest.raises(TrimtabError, match=r"gradients are 0.3\d+ times the true ones: losses or reduction are"):
            verify_vision_dp(handle, lambda: own_loss(case, "sharded"), reduce_gradients=lambda: reduce(case, "mean"))
        with pytest.raises(TrimtabError, match="doing it twice changes them: make the handle with reduction='none'"):
            handle.reduce_gradients()
    with vision_dp(case.model, timeout_s=60) as handle, pytest.raises(TrimtabError, match="known how losses add up"):
        verify_vision_dp(handle, lambda: own_loss(case, "sharded"))
    sharded = make_case("qwen3_vl", "images and clip")
    fully_shard_model(sharded.model)
    tokens = shard(rank, num_ranks, sharded.num_tokens)
    with vision_dp(sharded.model, loss="sharded x N", reduction="mean", timeout_s=60) as handle:
        check = verify_vision_dp(handle, lambda: num_ranks * sharded.loss(sharded.forward(), tokens))
        assert 0.9 < check.gradient_scale < 1.1, check
        wrong = verify_vision_dp(handle, lambda: sharded.loss(sharded.forward(), tokens), raise_problems=False)
        assert wrong.gradient_scale == pytest.approx(1.0, rel=0.02)  # a loss is what it is said to be


def run_pooled(rank: int) -> None:
    """Four micro-batches through one call of the tower: the gradient of four calls."""
    num_ranks = dist.get_world_size()
    cases = [make_rank_case("qwen3_vl", batch) for batch in ("one image", "images and clip", "text", "clip")]
    for case in cases:
        case.model = cases[0].model
        case.loss(case.forward()).backward()
    expected = cases[0].gradients()
    with vision_dp(cases[0].model, timeout_s=60) as handle:
        pooled = encode_pooled(handle, [case.inputs for case in cases])
        assert handle.load.calls == 2  # images, then clips
        for case, outputs in zip(cases, pooled.outputs, strict=True):
            inputs = {name: value for name, value in case.inputs.items() if not name.startswith("pixel")}
            logits = case.model(**inputs, mm_encoder_outputs=outputs or None).logits
            case.loss(logits, shard(rank, num_ranks, case.num_tokens)).backward()
        pooled.backward()
        assert_close(sum_over_ranks(cases[0].gradients()), expected)
        # a rank to whose loss no image contributes takes part in the tower's backward all the same
        pooled = encode_pooled(handle, [case.inputs for case in cases])
        for case, outputs in zip(cases, pooled.outputs, strict=True):
            inputs = {name: value for name, value in case.inputs.items() if not name.startswith("pixel")}
            logits = case.model(**inputs, mm_encoder_outputs=outputs or None).logits
            if rank == 0:
                case.loss(logits).backward()
        pooled.backward()
        found, expected = ({n: g for n, g in x.items() if "visual" in n} for x in (cases[0].gradients(), expected))
        assert_close(sum_over_ranks(found), expected)


# -- disagreement ---------------------------------------------------------------------------------------------------


def run_disagreements(rank: int) -> None:
    """Whatever one rank does otherwise raises on all, and the group works on; last, a rank that does not come."""
    case = make_case("qwen3_vl", "images")
    inner, inputs = case.model.model, case.inputs
    odd = rank == 1

    def features(pixels: Tensor | None = None, **more: Any) -> Any:
        pixels = inputs["pixel_values"] if pixels is None else pixels
        return inner.get_image_features(pixels, inputs["image_grid_thw"], return_dict=True, **more)

    alone = features()
    with vision_dp(case.model, timeout_s=60):
        with pytest.raises(TrimtabError, match=r"rank 1 of the group called get_image_features with other images"):
            features(inputs["pixel_values"] + odd)
        message = "asks the vision tower for the states" if odd else "rank 1 refused what get_image_features was given"
        with pytest.raises(TrimtabError, match=message):
            features(**({"output_hidden_states": True} if odd else {}))
        case.tower.requires_grad_(not odd)
        with pytest.raises(TrimtabError, match=r"rank 1 of the group has image features of another need of gradients"):
            features()
        case.tower.requires_grad_(True)
        hook = case.tower.register_forward_pre_hook(_fail) if odd else None
        with pytest.raises((TrimtabError, ArithmeticError), match=r"failed on rank 1: that|out of patience"):
            features()
        if hook is not None:
            hook.remove()
        for a, b in zip(features().pooler_output, alone.pooler_output, strict=True):
            assert_close(a, b, "features after all that")
        as_tuple = inner.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=False)
        assert isinstance(as_tuple, tuple)
    assert "last_hidden_state" in features()  # the module's own function again

    with vision_dp(case.model, timeout_s=2):
        if not odd:
            with pytest.raises(TrimtabError, match=r"rank 0 of 2 waited 2 s at get_image_features for rank 1"):
                features()
        dist.barrier()
        if odd:  # late: it is told as well
            with pytest.raises(TrimtabError, match=r"rank 1 of 2 waited \d s at get_image_features for "):
                features()
    with vision_dp(case.model):  # of ten minutes; a rank that leaves is missed at once
        if not odd:
            with pytest.raises(TrimtabError, match=r"rank 0 of 2 waited \d s at get_image_features for "):
                features()
    dist.barrier()


def _fail(*_: Any) -> None:
    raise ArithmeticError("out of patience")


# -- one start of the processes for many of the above ---------------------------------------------------------------


def run_in_short(rank: int) -> None:
    """Each exchange once, a rank without images, and what one rank does otherwise."""
    run_mode("qwen3_vl", "images and clip", "plain")
    run_mode("qwen2_5_vl", "one image", "frozen")
    run_routed("qwen3_vl", "one image")
    run_dispatched("qwen3_vl", ["text", "images and clip"])
    run_pooled(rank)
    run_calls_that_differ(rank)
    run_problems_of_one_rank(rank)
    run_verified_dispatch(rank)


def run_on_two(rank: int) -> None:
    """The last leaves a group that a rank did not come to."""
    run_modes("qwen2_5_vl", "one image")
    run_modes("qwen3_vl", "images and clip")
    run_ulysses(rank)
    run_odd_uses(rank)
    run_disagreements(rank)


def run_on_three(rank: int) -> None:
    run_both_gathers()
    run_routed("qwen2_vl", "images")
    run_routed("qwen3_vl", "images and clip")
    per_rank = ["one image", "text", "images and clip"]
    for wrapped, family in (("plain", "qwen2_5_vl"), ("fsdp2", "qwen3_vl"), ("ddp", "qwen3_vl")):
        for order in (per_rank, per_rank[::-1], ["text"] * 3):
            run_dispatched(family, order, wrapped)
    run_conventions(rank)
    run_verified(rank)


def run_on_four(rank: int) -> None:
    run_groups(rank, "qwen2_5_vl", "plain")
    run_groups(rank, "qwen3_vl", "fsdp2")
