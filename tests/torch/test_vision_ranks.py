"""Ranks that share images against one process: the hard cases. Needs torch, gloo, Transformers 5.

Tests of runtime/vision/ (agree, apply, control, dispatch, exchange, gradients, handle, heartbeat, inputs, outputs,
pooled, functions, verify). Each test starts its processes once and runs all cases of that many ranks in them.
"""

import pytest

pytest.importorskip("transformers", minversion="5", reason="holds the models")

import vision_hosts
from gloo_ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


def test_two_ranks_in_short() -> None:
    """Each exchange once, pooled micro-batches, a rank without images, ranks that disagree, what a check finds."""
    on_ranks(vision_hosts.run_in_short)


@pytest.mark.integration
def test_two_ranks() -> None:
    """Fewer images than ranks, clips; frozen, merger alone, autocast, bf16, DDP, FSDP2, recompute, no_grad; a
    sequence-parallel host end to end; copies, compilers, odd uses; ranks that are late or do not come."""
    on_ranks(vision_hosts.run_on_two)


@pytest.mark.integration
def test_three_ranks() -> None:
    """Both gathers, dispatch between ranks with other images or none, conventions of gradients."""
    on_ranks(vision_hosts.run_on_three, num_ranks=3)


@pytest.mark.integration
def test_four_ranks() -> None:
    """A group without images beside one with some; cp, and tp x cp, in four families."""
    on_ranks(vision_hosts.run_on_four, num_ranks=4)
