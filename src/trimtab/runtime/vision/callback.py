"""Vision data parallel as a callback of Transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from trimtab.plan.plan import Plan
from trimtab.runtime.vision.apply import vision_dp, vision_dp_from_plan
from trimtab.runtime.vision.handle import VisionDataParallel


class VisionDataParallelCallback(TrainerCallback):  # type: ignore[misc]
    """Images of a Trainer's ranks, shared: from the first step on each rank encodes an equal share.

    Use it where ranks hold unequal images: `trainer.add_callback(trimtab.vision.VisionDataParallelCallback())` is all,
    on every rank. Images travel over `group` (None: all ranks) and the features come back; losses and gradients are
    those without. `plan`: as it decides.
    Further arguments are those of `vision_dp`. `handle.load.share` says what part this rank has encoded; when training
    ends the model is what it was.

    >>> VisionDataParallelCallback().handle is None  # before training
    True
    """

    def __init__(self, group: Any = None, *, plan: Plan | None = None, **options: Any) -> None:
        self._group, self._plan, self._options = group, plan, options
        self.handle: VisionDataParallel | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        if args.world_size < 2:
            return
        if self._plan is not None:
            self.handle = vision_dp_from_plan(model, self._group, self._plan, **self._options)
        else:
            self.handle = vision_dp(model, self._group, **{"exchange": "dispatch", **self._options})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self.handle is not None:
            self.handle.remove()
