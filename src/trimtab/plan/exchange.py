"""What a step costs beside its micro-batches: the gradient exchange of data parallelism and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.specs import ClusterSpec, Profile, Stage

_GRAD_BYTES = 4  # gradients are summed in fp32
_WEIGHT_BYTES = 2  # and the updated bf16 weights gathered, where the optimizer is sharded
_OPTIMIZER_TRAFFIC_BYTES = 28  # per parameter of this rank's share: read and write two moments and a master copy, fp32


def step_overhead_s(profile: Profile, stages: Sequence[Stage], cluster: ClusterSpec, zero_stage: int) -> float:
    """Seconds of the slowest pipeline rank after its last backward; nothing is overlapped.

    Ring exchange of N ranks: reduce-scatter and all-gather move (N - 1)/N of the bytes each. Gradients are
    reduce-scattered; then the weights are gathered (ZeRO 1-3) or the gradients (ZeRO 0). The optimizer is bound by
    memory traffic. Not counted: gradient norm, loss scale.
    """
    dims = profile.dims
    link = cluster.device.link_bytes_per_s if cluster.num_nodes == 1 else cluster.node_link_bytes_per_s
    share = (dims.dp - 1) / dims.dp
    gathered_bytes = _WEIGHT_BYTES if zero_stage > 0 else _GRAD_BYTES
    sharded_by = dims.dp if zero_stage > 0 else 1
    per_rank = [0.0] * dims.pp
    for stage in stages:
        trained = (layer for layer in profile.layers[stage.start : stage.stop] if any(layer.backward_s))
        per_rank[stage.index % dims.pp] += sum(layer.num_params for layer in trained)
    most = max(per_rank)
    exchange_s = share * most * (_GRAD_BYTES + gathered_bytes) / link
    optimizer_s = most / sharded_by * _OPTIMIZER_TRAFFIC_BYTES / cluster.device.memory_bytes_per_s
    return exchange_s + optimizer_s
