"""How a host adds gradients up over the group, and which sums of losses that is right for."""

from __future__ import annotations

from typing import Literal

from trimtab.errors import TrimtabError

Loss = Literal["sharded", "sharded x N", "replicated"]
Reduction = Literal["sum", "mean", "none"]

KAPPA_IS_N: dict[Loss, bool] = {"sharded": False, "sharded x N": True, "replicated": True}
"""Σ_r ℓ_r = κ L over the ranks of the group. `sharded`: each rank's loss covers its part of the tokens, κ = 1;
`sharded x N`: the same, scaled by the group's size, κ = N; `replicated`: each rank has the whole loss, κ = N."""


def check_convention(loss: Loss, reduction: Reduction, num_ranks: int) -> None:
    """Raise where text and vision gradients would both be wrong by a factor: `sum` needs κ = 1, `mean` needs κ = N.

    With `none` (tensor-parallel replicas whose text gradients are whole already) the host leaves these parameters
    alone, and `VisionDataParallel.reduce_gradients()` takes the mean of the vision parameters' gradients.
    """
    if loss not in KAPPA_IS_N:
        raise TrimtabError(f"'{loss}' is no way to divide a loss: choose one of {', '.join(KAPPA_IS_N)}")
    if reduction not in ("sum", "mean", "none"):
        raise TrimtabError(f"'{reduction}' is no way to add gradients up: choose one of sum, mean, none")
    fits = {"sum": loss == "sharded", "mean": KAPPA_IS_N[loss], "none": loss == "replicated"}
    if num_ranks == 1 or fits[reduction]:
        return
    if reduction == "sum":
        wrong, cure = f"{num_ranks} times too large", f"divide each rank's loss by {num_ranks}, or average gradients"
    elif reduction == "mean":
        wrong, cure = f"{num_ranks} times too small", f"multiply each rank's loss by {num_ranks}, or sum gradients"
    else:
        wrong, cure = "those of only one rank's tokens", "sum gradients over the group"
    raise TrimtabError(
        f"a {loss} loss with gradients reduced by {reduction} over {num_ranks} ranks leaves every gradient, of text "
        f"and of vision, {wrong}: {cure}"
    )
