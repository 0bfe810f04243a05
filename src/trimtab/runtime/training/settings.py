"""What a run of a plan, or a probe of one, is asked; and the learning rate of each step."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from trimtab.errors import TrimtabError, join_problems
from trimtab.options import (
    PLAN,
    TIMEOUT,
    AttentionImplementation,
    LossWeighting,
    Option,
    ReadingOptions,
    TorchDevice,
    option_problems,
)
from trimtab.plan.options import parse_share
from trimtab.units import parse_bytes

Decay = Literal["constant", "linear", "cosine"]
Dtype = Literal["float32", "bfloat16"]


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Read weight_decay=0.1, betas=0.9,0.95, nesterov=true."""
    options: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            parts = json.loads(f"[{value.lower()}]")
        except ValueError:
            parts = []
        if not name or not parts or not all(isinstance(part, (bool, int, float)) for part in parts):
            raise TrimtabError(f"optimizer option {text!r} must be NAME=VALUE, as in weight_decay=0.1")
        options[name] = parts[0] if len(parts) == 1 else tuple(parts)
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """One run of a plan; checks itself."""

    plan: Annotated[Path, PLAN]
    model: Annotated[
        Path, Option("Folder with config.json, preprocessor, tokenizer and weights.", argument=True)
    ]  # weights as safetensors
    out: Annotated[Path, Option("Folder for run.jsonl and checkpoints.", common=True)] = Path("run")
    data: Annotated[
        tuple[Path, ...],
        Option(
            "The data files that were sized, in order; default: those that the plan leads to. Repeatable.",
            read=tuple,
            typed=list[Path],
            common=True,
        ),
    ] = ()
    steps: Annotated[int | None, Option("Optimizer steps in all; else --epochs.", least=1, common=True)] = None
    epochs: Annotated[int, Option("Passes over the plan's packs.", least=1, common=True)] = 1
    optimizer: Annotated[str, Option("A class of torch.optim.")] = "AdamW"
    optimizer_options: Annotated[
        Mapping[str, Any],
        Option(
            "Option of the optimizer, as in weight_decay=0.1; repeatable.",
            flag="--optimizer-option",
            read=parse_options,
            typed=list[str],
        ),
    ] = field(default_factory=dict)
    learning_rate: Annotated[float, Option("Peak learning rate.", flag="--lr", common=True)] = 1e-5
    warmup_steps: Annotated[
        int, Option("Steps until the learning rate reaches its peak.", flag="--warmup", least=0)
    ] = 0
    decay: Annotated[Decay, Option("Learning rate after the warm-up.")] = "constant"
    max_grad_norm: Annotated[
        float | None,
        Option(
            "Clip all gradients together to this norm; 0: no clipping.",
            flag="--clip",
            least=0,
            read=lambda norm: norm or None,
            typed=float,
            shown=1.0,
        ),
    ] = 1.0  # None: as they are
    dtype: Annotated[
        Dtype | None,
        Option("Of matrix products; weights are float32. Default: bfloat16, on the CPU float32 (faster there)."),
    ] = None
    attention: Annotated[AttentionImplementation | None, Option("Default: the plan's, where it runs.")] = (
        None  # None: the plan's, or sdpa where flash attention is not at hand
    )
    loss_weighting: Annotated[LossWeighting, Option("What has the same weight in the loss.", flag="--loss")] = "token"
    random_weights: Annotated[bool, Option("Start from random weights instead of reading them.", common=True)] = False
    device: Annotated[TorchDevice | None, Option("Default: cuda where there is one.", common=True)] = None
    save_every: Annotated[
        int | None, Option("Steps between checkpoints; else one at the end.", least=1, common=True)
    ] = None
    save: Annotated[bool, Option("Write checkpoints; false: a run that only measures.")] = True
    keep: Annotated[int | None, Option("How many of the newest checkpoints to keep.", least=1)] = 2
    resume: Annotated[bool, Option("Go on from the newest checkpoint in --out.", common=True)] = False
    export: Annotated[
        Path | None, Option("New folder for the trained model, as Transformers loads it.", common=True)
    ] = None
    verify_packing: Annotated[bool, Option("Check first that no sample of a pack sees another.")] = True
    on_bad_sample: Annotated[
        Literal["error", "filler"],
        Option("For a sample that cannot be read: stop, or use a filler of weight 0.", flag="--on-bad", common=True),
    ] = "error"
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    workers: Annotated[int, Option("Data-loading processes per rank.", least=0)] = 0
    seed: Annotated[int, Option("Seed of random weights and dropout.")] = 0
    timeout_s: Annotated[int, TIMEOUT] = 1800

    def __post_init__(self) -> None:
        problems = _problems_of(self)
        if problems:
            raise TrimtabError(join_problems(problems))

    def rate(self, step: int, num_steps: int) -> float:
        """Return the learning rate of `step`, from 1."""
        return self.learning_rate * rate_factor(step, num_steps, self.warmup_steps, self.decay)

    def dtype_on(self, device_type: str) -> Dtype:
        """Return the dtype of products on "cpu" or "cuda": few CPUs have bfloat16 products, others are 5 x slower."""
        return self.dtype or ("float32" if device_type == "cpu" else "bfloat16")

    def saves_at(self, step: int, num_steps: int) -> bool:
        return self.save and (step == num_steps or (self.save_every is not None and step % self.save_every == 0))


def rate_factor(step: int, num_steps: int, warmup_steps: int, decay: Decay) -> float:
    """Return the learning rate of `step` (from 1) over the peak.

    Linear up to step `warmup_steps`; the step after it has the peak, and the one after the last would have 0.
    """
    if step <= warmup_steps:
        return step / warmup_steps
    done = (step - warmup_steps - 1) / max(num_steps - warmup_steps, 1)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[decay]


def _problems_of(settings: TrainSettings) -> list[str]:
    import torch  # here alone: the options of the command line are read without it

    problems = option_problems(settings)
    cls = getattr(torch.optim, settings.optimizer, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
        problems.append(f"optimizer {settings.optimizer!r} is no class of torch.optim: name one, as AdamW")
    if not settings.learning_rate > 0 or not math.isfinite(settings.learning_rate):
        problems.append(f"learning_rate (--lr) must be above 0, not {settings.learning_rate}")
    if settings.max_grad_norm == 0:
        problems.append("max_grad_norm (--set clip) must be above 0; None clips nothing")
    if settings.optimizer in ("LBFGS", "SparseAdam"):
        problems.append(f"optimizer {settings.optimizer} needs closures or sparse gradients: choose another")
    if settings.save_every is not None and not settings.save:
        problems.append("save_every (--save-every) excludes save=False: give one")
    if not 0 <= settings.seed < 2**63:
        problems.append(f"seed must be 0 to 2^63 - 1, not {settings.seed}")
    return problems


# -- trimtab probe ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """What is probed, and within which memory; checks itself."""

    plan: Annotated[Path, PLAN]
    model: Annotated[
        Path, Option("Folder as for `trimtab train`; without weights, random ones are used.", argument=True)
    ]
    memory_bytes: Annotated[
        int | None,
        Option(
            "Memory of one device, as in 80GiB; default: the plan's.", flag="--budget", read=parse_bytes, common=True
        ),
    ] = None
    risk: Annotated[
        float | None,
        Option(
            "Accepted chance that the choice needs more than it, as in 5%; default: the plan's.",
            read=parse_share,
            common=True,
        ),
    ] = None
    num_steps: Annotated[int, Option("Training steps of each run of the choice.", flag="--steps", least=2)] = 2
    device: Annotated[TorchDevice | None, Option("Default: cuda where there is one.", common=True)] = None
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    seed: Annotated[int, Option("Seed of random weights.")] = 0
    timeout_s: Annotated[int, TIMEOUT] = 1800

    def __post_init__(self) -> None:
        problems = option_problems(self)
        if problems:
            raise TrimtabError(join_problems(problems))
