"""How ISF converges, iteration by iteration: the table of OmniBal (arXiv 2407.20761)."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.balance.bound import above_limits
from trimtab.balance.cost import LinearCost
from trimtab.balance.isf import count_kept
from trimtab.balance.packing import cost_column, limited_sizes, pack_samples, report_packing
from trimtab.options import Order, Oversize
from trimtab.specs import FloatArray, SampleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class IsfIteration:
    """What ISF has after one iteration, and how even the packs are if that is the last."""

    number: int  # from 1
    num_kept: int  # packs that a filter let pass, up to here
    share_left: float  # of the samples, for the next iteration
    num_packs: int  # if this is the last: what is left is packed too
    dist_ratio_vit: float
    dist_ratio_llm: float
    dist_ratio_cost: float


def isf_iterations(
    samples: SampleTable,
    *,
    limits: tuple[int, int],
    filters: tuple[int, int] | None = None,
    iterations: int = 10,
    dp: int = 1,
    num_microbatches: int = 1,
    order: Order = "random",
    oversize: Oversize = "error",
    cost: LinearCost | FloatArray | None = None,
    seed: int = 0,
) -> list[IsfIteration]:
    """Use it to choose how many iterations are worth their time: one entry each, for the arguments of `pack_samples`.

    `filters` (Q'_v, Q'_t); None: the paper's, Q_v and Q_t - 128. Samples above a limit are not counted. Packs T times,
    with 1 to T iterations, which begin alike.
    """
    per_sample = cost_column(samples, cost)
    sizes = limited_sizes(samples)
    fits = ~above_limits(sizes, limits)
    kept = count_kept(sizes[fits], limits=limits, filters=filters, iterations=iterations, seed=seed)
    found = []
    for number, (num_kept, num_samples) in enumerate(kept.tolist(), 1):
        result = pack_samples(
            samples,
            limits=limits,
            dp=dp,
            num_microbatches=num_microbatches,
            method="isf",
            order=order,
            cost=per_sample,
            seed=seed,
            oversize=oversize,
            filters=filters,
            iterations=number,
        )
        report = report_packing(samples, result, cost=per_sample)
        found.append(
            IsfIteration(
                number=number,
                num_kept=num_kept,
                share_left=1 - num_samples / max(1, int(fits.sum())),
                num_packs=report.num_packs,
                dist_ratio_vit=report.dist_ratio_vit,
                dist_ratio_llm=report.dist_ratio_llm,
                dist_ratio_cost=report.dist_ratio_cost,
            )
        )
    return found
