"""Uses of shared images that nobody plans: ranks at different calls, copies, compilers, handles over handles."""

import io
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rounding import BOUNDS, assert_close
from vision_runs import Case, make_case, make_rank_case, shard, sum_over_ranks

from refusals import refused
from trimtab import LinearCost, TrimtabError
from trimtab.runtime.vision import exchange
from trimtab.runtime.vision.apply import VisionDataParallel, verify_vision_dp, vision_dp, vision_heartbeat


def run_odd_uses(rank: int) -> None:
    """All but `run_uses_of_one_model`, which takes as long as the rest."""
    run_calls_that_differ(rank)
    run_problems_of_one_rank(rank)
    run_a_late_rank(rank)
    run_handles_over_handles(rank)
    run_failed_forward(rank)
    run_verified_dispatch(rank)
    run_unequal_groups(rank)


def features(case: Case, **more: Any) -> Any:
    given = {"pixel_values": case.inputs["pixel_values"], "image_grid_thw": case.inputs["image_grid_thw"]}
    return case.model.model.get_image_features(**{**given, "return_dict": True, **more})


def run_calls_that_differ(rank: int) -> None:
    """Every rank raises, and none waits for its ten minutes to end."""
    case = make_case("qwen2_5_vl", "images")
    modes = refused(TrimtabError)
    with vision_dp(case.model, exchange="dispatch"), torch.set_grad_enabled(bool(rank)), modes:
        case.forward()
    forms = refused(TrimtabError, "1", "get_image_features")
    pixels = case.inputs["pixel_values"]
    with vision_dp(case.model, exchange="dispatch"), forms:
        case.forward(pixel_values=pixels.double() if rank else pixels)
    costs = refused(TrimtabError)
    with vision_dp(case.model, exchange="dispatch", cost=LinearCost(patches=1.0 + rank)), costs:
        case.forward()


def run_problems_of_one_rank(rank: int) -> None:
    """What goes wrong before the exchange on one rank is told to the other."""
    case = make_case("qwen2_5_vl", "images")
    told = "rank 1 .*get_image_features"
    with vision_dp(case.model):
        with pytest.raises(TrimtabError, match="pixel_values is int" if rank else told):
            features(case, **({"pixel_values": 1} if rank else {}))
        wrong = {"image_grid_thw": torch.ones(2, 2, dtype=torch.int64)} if rank else {}
        with pytest.raises((IndexError, ValueError, TrimtabError), match=None if rank else told):
            features(case, **wrong)
        assert len(features(case).pooler_output) == 3


def run_a_late_rank(rank: int) -> None:
    """Whom a rank waits for is said long before it gives up, and a rank that comes late is not too late."""
    store = dist.distributed_c10d._get_default_store()
    for how in ("gather", "dispatch"):
        case, said = make_case("qwen2_5_vl", "images"), Says(store, how)
        with vision_dp(case.model, exchange=how, timeout_s=60) as handle, redirect_stderr(said):
            handle.sharing.control.watch.patience_s = 0.5
            if rank:
                store.wait([how])
            case.forward().sum().backward()


class Says(io.StringIO):
    """As stderr: sets `key` once rank 1 is named in it."""

    def __init__(self, store: Any, key: str) -> None:
        super().__init__()
        self.store, self.key = store, key

    def write(self, text: str) -> int:
        if "rank 1 of 2" in text:
            self.store.set(self.key, "")
        return super().write(text)


def run_handles_over_handles(rank: int) -> None:
    case = make_case("qwen2_5_vl", "images")
    for first, second in ((vision_dp, vision_heartbeat), (vision_heartbeat, vision_dp)):
        with first(case.model) as handle:
            for again in (first, second):
                with refused(TrimtabError, "remove()"):
                    again(case.model.model)
    _assert_no_trace(case, handle)


def _assert_no_trace(case: Case, handle: VisionDataParallel) -> None:
    handle.remove()
    for module in case.model.modules():
        assert not {"get_image_features", "get_video_features", "forward"} & module.__dict__.keys()
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def run_uses_of_one_model(rank: int) -> None:
    """Evaluation, inference mode, generation, a compiled caller, gradients over several micro-batches."""
    case = make_case("qwen2_5_vl", "images")
    case.loss(case.forward()).backward()
    case.loss(case.forward()).backward()
    expected = case.gradients()
    mine = shard(rank, 2, case.num_tokens)
    prompt = {name: value for name, value in case.inputs.items() if name != "position_ids"}
    case.model.eval()
    said = case.model.generate(**prompt, max_new_tokens=4, do_sample=False)
    plain = case.forward().detach()
    with vision_dp(case.model) as handle:
        assert torch.equal(case.model.generate(**prompt, max_new_tokens=4, do_sample=False), said)
        with torch.inference_mode():
            assert_close(case.forward(), plain)
        assert handle.load.calls == 2
        case.model.train()
        for _ in range(2):
            case.loss(case.forward(), mine).backward()
        assert_close(sum_over_ranks(case.gradients()), expected)
        expected_rows = features(case).pooler_output[0]
        doubled = torch.compile(lambda: 2 * features(case).pooler_output[0], backend="eager")
        assert torch.equal(doubled(), 2 * expected_rows)
        assert handle.load.calls == 6
        torch.compiler.reset()
    _assert_no_trace(case, handle)


def run_failed_forward(rank: int) -> None:
    """A forward that fails between the heartbeat and the embedding leaves nothing behind for the next."""
    cases = [make_rank_case("qwen2_5_vl", batch) for batch in ("one image", "text")]
    case = cases[rank]
    case.model = cases[0].model
    plain = case.forward().detach()
    embedding = case.model.get_input_embeddings()
    with vision_dp(case.model, exchange="dispatch") as handle:
        hook = embedding.register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            case.forward()
        hook.remove()
        assert_close(case.forward(), plain)
        hook = embedding.register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            case.forward()
        hook.remove()
    _assert_no_trace(case, handle)


def fail(*_: Any) -> None:
    raise ArithmeticError("out of patience")


def run_verified_dispatch(rank: int) -> None:
    """Ranks with images of their own, one of them without, are verified too; gradients that get lost are found."""
    cases = [make_rank_case("qwen2_5_vl", batch) for batch in ("text", "images and clip")]
    case = cases[rank]
    with vision_dp(case.model, exchange="dispatch") as handle:
        check = verify_vision_dp(handle, lambda: case.loss(case.forward()))
        assert max(check.loss_error, check.gradient_error) <= BOUNDS[torch.float32], check
        right = exchange._RouteRows.backward
        exchange._RouteRows.backward = staticmethod(lambda ctx, grad: (0 * right(ctx, grad)[0], *[None] * 4))
        with refused(TrimtabError, "1"):
            verify_vision_dp(handle, lambda: case.loss(case.forward()))
        exchange._RouteRows.backward = right


def run_unequal_groups(rank: int) -> None:
    """Ranks that are in unequally many groups find one another all the same; a group of one replaces nothing."""
    case = make_case("qwen2_5_vl", "one image")
    if rank:
        alone = dist.new_group([rank], use_local_synchronization=True)
        vision_dp(case.model, alone, heartbeat=alone)
        assert "get_image_features" not in case.model.model.__dict__
    with vision_dp(case.model, timeout_s=20):
        features(case)
