"""What it costs that a framework cannot make some cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trimtab.errors import PartitionError
from trimtab.plan.case import Case
from trimtab.plan.split import epoch_s, split_case
from trimtab.specs import Stage


def price_without_cuts(case: Case, stages: Sequence[Stage], cuts: frozenset[int]) -> float:
    """Predicted epoch of the best split that makes none of `cuts`, over that of `stages`; infinite if none fits."""
    model = replace(case.model, forbidden_cuts=case.model.forbidden_cuts | cuts)
    try:
        best = split_case(replace(case, model=model))
    except PartitionError:
        return math.inf
    return epoch_s(case, best.stages) / epoch_s(case, stages)
