"""The loss of packs: weighted per token or per sample, right under gradient accumulation and over ranks.

Let S be the samples of one optimizer step, over all its micro-batches and ranks; c_st the cross-entropy of predicting
token t of sample s; n_s the number of tokens with a label in s, its first token not counted, since nothing predicts it.

    token:   L = sum_s sum_t c_st / sum_s n_s
    sample:  L = sum_s (1 / n_s) sum_t c_st / |{s : n_s > 0}|

Both are sum w c / W with W = sum w over the whole step: w = 1 per token, or w = 1 / n_s. So every pack adds its
sum w c / W, and it does not matter which pack, micro-batch or rank a sample is in. A mean of packs' means would weigh
it by its company.

`W` comes from `step_denominator`: one all-reduce of one number per step. DDP and FSDP average gradients over the dp
ranks, so each rank's loss is multiplied by dp: (1 / dp) sum_ranks dp sum w c / W = L.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.runtime.data.missing import IGNORED as IGNORED


def label_weights(batch: Mapping[str, Any]) -> Tensor:
    """(1, tokens) w of each label: the collator's `loss_weights`, or 1 wherever there is a label."""
    weights: Tensor | None = batch.get("loss_weights")
    return (batch["labels"] != IGNORED).float() if weights is None else weights


def step_denominator(batches: Iterable[Mapping[str, Any]], *, group: dist.ProcessGroup | None = None) -> Tensor:
    """W of one optimizer step: the weights of this rank's micro-batches, summed over the data-parallel `group`.

    Use it once a step, before the first `packed_loss`.

    A collective call where torch.distributed is initialised: every rank of the group must make it once a step, with at
    least one micro-batch, filler or not. float32: counts are exact to 2^24 labels, off by 6e-8 of themselves beyond.

    >>> step_denominator([{"labels": torch.tensor([[IGNORED, 5, 7]])}, {"labels": torch.tensor([[IGNORED, 3]])}])
    tensor(3.)
    """
    total = torch.stack([label_weights(batch).sum() for batch in batches]).sum()
    if dist.is_available() and dist.is_initialized():
        if dist.get_backend(group) == "nccl":
            total = total.cuda()
        dist.all_reduce(total, group=group)
    return total


def packed_loss(logits: Tensor, batch: Mapping[str, Any], *, denominator: Tensor | float, num_ranks: int = 1) -> Tensor:
    """num_ranks * sum w c / W of one pack, in float32; 0 with a zero gradient for a pack without labels.

    Use it in your own loop in place of `outputs.loss`, which would weigh tokens by the pack they lie in.

    `num_ranks`: ranks whose gradients are averaged afterwards, 1 where they are summed. Only rows with a label are cast
    to float32, so prompts and image tokens cost no vocabulary-wide copy.

    >>> batch = {"labels": torch.tensor([[IGNORED, 1, 2]])}
    >>> packed_loss(torch.zeros(1, 3, 4), batch, denominator=step_denominator([batch]))  # log(4): nothing is learnt yet
    tensor(1.3863)
    """
    targets = batch["labels"][:, 1:].to(logits.device)
    weights = label_weights(batch)[:, 1:].to(logits.device)
    kept = targets != IGNORED
    costs = torch.nn.functional.cross_entropy(logits[:, :-1][kept].float(), targets[kept], reduction="none")
    W = torch.as_tensor(denominator, device=logits.device, dtype=torch.float32)
    W = torch.where(W > 0, W, torch.ones_like(W))  # a step of nothing but fillers: 0 / 1
    return (costs * weights[kept]).sum() * num_ranks / W
