"""A logged run as the fit reads it: seconds that each coefficient stands for, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from trimtab.costs.logs import LoggedRun, LoggedSchedule
from trimtab.costs.profile import chosen_tiers
from trimtab.specs import FloatArray, LayerCost

Term = Literal["vision", "language", "first stage", "block"]
"""vision (with the projector), language: factors on the formulas, and a tower that is not fitted takes the other's;
first stage: its seconds a micro-batch, on top; block: its seconds a micro-batch, whatever it computes (no profile can
hold that, for more rows would cost nothing)."""

FORWARD_SHARE = 1 / 3
"""Of a stage's constant: logs do not say, and a step hardly depends on it."""


class SimulateStep(Protocol):
    def __call__(self, forward_s: FloatArray, backward_s: FloatArray, *, schedule: LoggedSchedule) -> float:
        """Seconds of a pipeline step whose stages take these (stages, micro-batches) times."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """A run as the fit reads it: seconds of each stage and micro-batch that a coefficient of 1 stands for."""

    run: LoggedRun
    forward: FloatArray  # (K + 1, S, M), behind the coefficients' rows what none of them scales
    backward: FloatArray  # (K + 1, S, M), recompute included
    step_s: float  # optimizer and gradient exchange by formula, on the slowest rank
    kinds: tuple[str, ...]  # towers of each stage

    @classmethod
    def of(cls, run: LoggedRun, terms: Sequence[Term]) -> Observed:
        S, M, K = len(run.stages), len(run.work), len(terms)
        forward, backward = np.zeros((2, K + 1, S, M))
        kinds = []
        for s, stage in enumerate(run.stages):
            held = set()
            own = run.profile.layers[stage.start : stage.stop]
            for layer, tier in zip(own, chosen_tiers(run.profile, stage), strict=True):
                held.add("language" if layer.tower == "language" else "vision")
                factor = factor_of(layer, terms)
                k = K if factor is None else list(terms).index(factor)
                forward[k, s] += run.work @ np.array(layer.forward_s)
                backward[k, s] += run.work @ (np.array(layer.backward_s) + np.array(tier.extra_backward_s))
            kinds.append(" + ".join(name for name in ("vision", "language") if name in held))
        if "first stage" in terms:
            k = list(terms).index("first stage")
            forward[k, 0], backward[k, 0] = FORWARD_SHARE, 1.0 - FORWARD_SHARE
        rest = [layer.step_s for layer in run.profile.layers]
        return cls(
            run=run,
            forward=forward,
            backward=backward,
            step_s=max(sum(rest[stage.start : stage.stop]) for stage in run.stages),
            kinds=tuple(kinds),
        )

    @property
    def logged(self) -> FloatArray:
        """What was logged: the step, then the stages."""
        step = [] if self.run.iteration_s is None else [self.run.iteration_s]
        return np.array([*step, *(self.run.stage_s or ())])

    def step(self, theta: FloatArray, simulate_step: SimulateStep) -> float:
        """Seconds of the pipeline, then of gradient exchange and optimizer on the slowest rank."""
        weights = np.append(theta, 1.0)
        forward, backward = np.tensordot(weights, self.forward, 1), np.tensordot(weights, self.backward, 1)
        return simulate_step(forward, backward, schedule=self.run.schedule) + self.step_s

    def stage_seconds(self, theta: FloatArray) -> FloatArray:
        """(S,) forward + backward of the mean micro-batch."""
        result: FloatArray = self.mean_seconds @ np.append(theta, 1.0)
        return result

    @property
    def mean_seconds(self) -> FloatArray:
        """(S, K + 1) of forward and backward, mean over the micro-batches."""
        result: FloatArray = (self.forward + self.backward).mean(axis=2).T
        return result

    def predict(self, theta: FloatArray, simulate_step: SimulateStep) -> FloatArray:
        """In the order of `logged`."""
        step = [] if self.run.iteration_s is None else [self.step(theta, simulate_step)]
        return np.array([*step, *(self.stage_seconds(theta) if self.run.stage_s is not None else ())])

    def slowest(self, theta: FloatArray) -> int:
        return int(np.argmax(self.stage_seconds(theta)))


def factor_of(layer: LayerCost, terms: Sequence[str]) -> Literal["vision", "language"] | None:
    """The term that scales the layer: its own tower's, else the other's, else none."""
    if layer.tower == "language":
        return "language" if "language" in terms else "vision" if "vision" in terms else None
    return "vision" if "vision" in terms else "language" if "language" in terms else None
