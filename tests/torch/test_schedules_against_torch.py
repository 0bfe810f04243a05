"""Our orders of blocks are those of torch.distributed.pipelining's schedules, rank by rank. Needs torch."""

from unittest import mock

import pytest
from torch.distributed.pipelining import PipelineStage, _schedule_visualizer, schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from trimtab.partition.schedules import BACKWARD, FORWARD, WEIGHT, block_order, device_of_stage

KINDS = {
    schedules._ComputationType.FORWARD: FORWARD,
    schedules._ComputationType.FULL_BACKWARD: BACKWARD,
    schedules._ComputationType.BACKWARD_INPUT: BACKWARD,
    schedules._ComputationType.BACKWARD_WEIGHT: WEIGHT,
}
MULTI_STAGE = [
    ("Interleaved1F1B", P, V, M)
    for P, V, M in ((1, 2, 3), (2, 2, 4), (2, 3, 8), (4, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 32))
] + [("ZBVZeroBubble", P, 2, M) for P, M in ((1, 1), (1, 4), (2, 1), (2, 3), (2, 8), (3, 4), (4, 2), (4, 7), (4, 16))]


def torch_order(name, P, V, M):
    """(stage, micro-batch, kind) of each rank's blocks as torch's own schedule lists them."""
    ranks = _schedule_visualizer.get_schedule_ops(name, P, M, num_stages_per_rank=V)
    return [
        [
            (a.stage_index, a.microbatch_index, KINDS[a.computation_type])
            for a in rank
            if a and a.computation_type in KINDS
        ]
        for rank in ranks
    ]


def our_order(name, P, V, M):
    order = block_order(name, num_devices=P, num_chunks=V, num_microbatches=M)
    return [
        list(zip(order.stage[d].tolist(), order.microbatch[d].tolist(), order.kind[d].tolist(), strict=True))
        for d in range(P)
    ]


@pytest.mark.parametrize(("name", "P", "V", "M"), MULTI_STAGE)
def test_orders_of_several_stages_a_rank_are_torchs(name, P, V, M):
    assert our_order(name, P, V, M) == torch_order(name, P, V, M)


class RecordingStage:
    """Notes what a schedule runs; sends and computes nothing."""

    def __init__(self, index, num_stages):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, num_stages, num_stages, index
        self.submod, self.has_backward, self.blocks = None, True, []

    is_first = is_last = False

    def forward_one_chunk(self, microbatch, *_, **__):
        self.blocks.append((self.stage_index, microbatch, FORWARD))

    def backward_one_chunk(self, microbatch, **__):
        self.blocks.append((self.stage_index, microbatch, BACKWARD))

    def _nothing(self, *_, **__):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing
    perform_reduce_grad = release_fwd_send_outputs = _nothing  # the second since torch 2.15


# torch's 1F1B refuses fewer micro-batches than stages; the order it lists for display numbers the last rank's
# forwards from 1 (torch 2.13), so these two are compared with what they run
@pytest.mark.parametrize(("P", "M"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 32)])
@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_orders_of_one_stage_a_rank_are_torchs(name, P, M, monkeypatch):
    ran = []
    for rank in range(P):
        stage = RecordingStage(rank, P)
        schedule = schedules.get_schedule_class(name)(stage, M)
        for ready in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            monkeypatch.setattr(schedule, ready, lambda *_, **__: None)
        schedule._step_microbatches([()] * M, [{}] * M)
        ran.append(stage.blocks)
    assert our_order(name, P, 1, M) == ran


@pytest.mark.parametrize(("P", "M"), [(1, 3), (2, 2), (4, 4), (4, 8), (8, 32), (4, 3)])
def test_zbh1_is_torchs_interleaved_zero_bubble_with_one_stage_a_rank(P, M):
    # torch's lister asks for two stages a rank; the schedule itself does not
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, P, P, None
    made = schedules.ScheduleInterleavedZeroBubble([stage], M)
    listed = [
        [(a.stage_index, a.microbatch_index, KINDS[a.computation_type]) for a in made.pipeline_order[d] if a]
        for d in range(P)
    ]
    assert our_order("ZBH1", P, 1, M) == listed


@pytest.mark.parametrize(("P", "V"), [(1, 2), (2, 2), (4, 2), (3, 2)])
def test_stages_lie_on_torchs_ranks(P, V):
    for name, style in (("Interleaved1F1B", "loop"), ("ZBVZeroBubble", "v")):
        mapping = generate_stage_to_rank_mapping(P, P * V, style=style)
        assert mapping == {s: device_of_stage(name, s, num_devices=P, num_chunks=V) for s in range(P * V)}
