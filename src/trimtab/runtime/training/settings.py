"""What a plan does not say about a run, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from trimtab.errors import TrimtabError, join_problems
from trimtab.runtime.data.collate import Attention, LossWeighting
from trimtab.runtime.data.conversations import ReadingOptions

Decay = Literal["constant", "linear", "cosine"]

_OPTIONS = {"save_every": "save_every (--save-every)", "warmup_steps": "warmup_steps (--warmup)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """One run of a plan; checks itself."""

    plan: Path
    model: Path  # folder with config.json, preprocessor, tokenizer, and weights as safetensors
    out: Path  # log and checkpoints
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    steps: int | None = None  # optimizer steps in all; None: `epochs` of the plan
    epochs: int = 1
    optimizer: str = "AdamW"  # a class of torch.optim
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    decay: Decay = "constant"
    max_grad_norm: float | None = 1.0  # None: as they are
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # bfloat16: autocast over float32 weights
    attention: Attention | None = None  # None: the plan's, or sdpa where flash attention is not at hand
    loss_weighting: LossWeighting = "token"
    random_weights: bool = False
    device: Literal["cpu", "cuda"] | None = None  # None: cuda where there is one
    save: bool = True  # False: no checkpoint at all, for a run that only measures
    save_every: int | None = None  # steps; None: only at the end
    keep: int | None = 2  # checkpoints
    resume: bool = False  # from the newest checkpoint in `out`, if there is one
    export: Path | None = None  # new folder for the trained model, as Transformers loads it
    verify_packing: bool = True  # before the first step: are samples of a pack computed as if they were alone?
    vision_dp: Literal["plan", "dispatch", "off"] = "plan"  # whether dp ranks share images: as planned, yes, no
    on_bad_sample: Literal["raise", "filler"] = "raise"
    workers: int = 0  # processes that make samples, of each rank
    seed: int = 0

    def __post_init__(self) -> None:
        problems = _problems_of(self)
        if problems:
            raise TrimtabError(join_problems(problems))

    def rate(self, step: int, num_steps: int) -> float:
        """Learning rate of `step`, from 1."""
        return self.learning_rate * rate_factor(step, num_steps, self.warmup_steps, self.decay)

    def saves_at(self, step: int, num_steps: int) -> bool:
        return self.save and (step == num_steps or (self.save_every is not None and step % self.save_every == 0))


def rate_factor(step: int, num_steps: int, warmup_steps: int, decay: Decay) -> float:
    """Learning rate of `step` (from 1) over the peak.

    Linear up to step `warmup_steps`; the step after it has the peak, and the one after the last would have 0.
    """
    if step <= warmup_steps:
        return step / warmup_steps
    done = (step - warmup_steps - 1) / max(num_steps - warmup_steps, 1)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[decay]


def _problems_of(settings: TrainSettings) -> list[str]:
    problems = []
    cls = getattr(torch.optim, settings.optimizer, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
        problems.append(f"optimizer {settings.optimizer!r} is no class of torch.optim: name one, as in AdamW")
    if settings.vision_dp not in ("plan", "dispatch", "off"):
        problems.append(f"vision_dp {settings.vision_dp!r} was asked for: choose plan, dispatch or off")
    for name in ("steps", "epochs", "save_every", "keep"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            problems.append(f"{_OPTIONS.get(name, name)} {value} was asked for: give 1 or more")
    if not settings.learning_rate > 0 or not math.isfinite(settings.learning_rate):
        problems.append(f"learning_rate (--lr) {settings.learning_rate} was asked for: give a number above 0")
    for name in ("warmup_steps", "workers"):
        if getattr(settings, name) < 0:
            problems.append(f"{_OPTIONS.get(name, name)} {getattr(settings, name)} was asked for: give 0 or more")
    if settings.max_grad_norm is not None and not settings.max_grad_norm > 0:
        problems.append(
            f"max_grad_norm (--clip) {settings.max_grad_norm} was asked for: give a number above 0, or clip nothing"
        )
    if settings.optimizer in ("LBFGS", "SparseAdam"):
        problems.append(
            f"optimizer {settings.optimizer} was asked for, which needs closures or sparse gradients: choose another"
        )
    if settings.save_every is not None and not settings.save:
        problems.append(
            "checkpoints were asked for every few steps and not at all: give one of save_every (--save-every) and "
            "save=False (--no-save)"
        )
    if not 0 <= settings.seed < 2**63:
        problems.append(f"seed {settings.seed} was asked for, but torch takes 0 to 2^63 - 1: give one of these")
    return problems
