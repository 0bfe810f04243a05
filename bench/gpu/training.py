"""A whole model in training on one device, for suites that measure its steps: what it holds, and how long it takes.

Layers have random weights; the model's own code makes every batch (`trimtab.models.asking.batches`). A step is forward
and backward of one micro-batch, then AdamW: weights in bf16, gradients added up in fp32 as each one is there, a master
copy and two moments in fp32, 18 bytes a parameter; on the CPU all in fp32.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from bench.gpu.setting import Setting

from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.measured.timed import measure_device, time_each
from trimtab.costs.measured.timed_model import RealModel, build_model, run_of
from trimtab.costs.measured.traced import profile_traced
from trimtab.costs.profile import price_model
from trimtab.partition.assess import SplitProblem, SplitResult
from trimtab.partition.published import full_recompute
from trimtab.runtime.probe.trial import meter_of
from trimtab.runtime.recompute import apply
from trimtab.specs import FloatArray, ModelSpec, Profile, Stage, recomputing

AMPLE = 2.0**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One choice of recompute, run."""

    step_s: float
    peak_bytes: int  # by the meter of `trimtab probe`, without what other processes and the context take
    reserved_bytes: int | None  # by torch's allocator; None on the CPU


class Trainee:
    """`config` built whole on the device, with AdamW, one batch of about `patches` and `tokens`, and its prices."""

    def __init__(
        self, config: Mapping[str, Any], spec: ModelSpec, setting: Setting, *, patches: int, tokens: int
    ) -> None:
        self.config, self.spec, self.setting = config, spec, setting
        self.settings = CostSettings(dtype=setting.dtype, attention="sdpa", optimizer="adamw")
        self.real = build_model(config, spec, range(len(spec.layers)), self.settings, setting.device)
        self.optimizer = MainGradients(self.real.module.parameters())
        batches = self.real.kinds.batches
        unit = _patches_of(self.real, 1)
        self.batch = batches.make(max(1, round(patches / unit)), tokens)
        self.inputs = {name: _moved(x, setting.device) for name, x in self.batch.inputs.items()}
        terms = run_of(self.real, self.batch, set(self.real.chosen)).work
        self.work: FloatArray = np.array(next(iter(terms.values())), np.float64)

    # -- what is predicted ----------------------------------------------------------------------------------------

    @cached_property
    def formulas(self) -> Profile:
        return price_model(self.spec, measure_device(self.setting.device, self.setting.dtype), self.settings)

    @cached_property
    def traced(self) -> Profile:
        """Bytes counted on weightless layers, seconds as the formulas have them."""
        rows = (128, 256) if self.setting.tiny else None
        choices = {"dtype": self.settings.dtype, "attention": "sdpa", "optimizer": self.settings.optimizer}
        return profile_traced(self.config, self.spec, DEVICES["H200"], rows=rows, **choices).profile

    def problem(self, profile: Profile, memory_bytes: float = AMPLE) -> SplitProblem:
        return SplitProblem(
            profile=profile,
            num_stages=1,
            work_mean=self.work,
            work_max=self.work,
            num_microbatches=1,
            memory_bytes=memory_bytes,
        )

    def assess(self, profile: Profile, stage: Stage) -> SplitResult:
        return self.problem(profile).assess((stage,))

    def whole(self) -> Stage:
        """All layers, nothing recomputed."""
        return Stage(index=0, start=0, stop=len(self.spec.layers))

    def choices(self) -> dict[str, Stage]:
        """Nothing, every layer selectively, and every layer in full recomputed."""
        layers = self.formulas.layers
        selective = {i: "selective" for i, layer in enumerate(layers) if layer.tier("selective")}
        (full,) = full_recompute(self.formulas, (self.whole(),))
        return {"none": self.whole(), "selective": recomputing(self.whole(), selective), "full": full}

    # -- what is measured -----------------------------------------------------------------------------------------

    def measure(self, stage: Stage, *, repeats: int = 3) -> Measured:
        """Steps under the stage's recompute: the median of their seconds, and the most they held."""
        module, device = self.real.module, self.setting.device
        named = {choice.tier: [self.spec.layers[i].name for i in choice.layers] for choice in stage.recompute}
        applied = [apply(module, names, granularity=how) for how, names in named.items()]
        try:
            self.step()  # AdamW's state, and gradients of an earlier micro-batch
            meter = meter_of(device)
            static = [*module.parameters(), *module.buffers(), *self.optimizer.tensors()]
            with meter.watch(static, [x for x in self.inputs.values() if isinstance(x, torch.Tensor)]):
                self.step()
                outside = getattr(meter, "outside_bytes", 0)
                peak = meter.peak_bytes - outside
            reserved = None if device.type == "cpu" else torch.cuda.max_memory_reserved(device)
            (seconds,) = time_each([self.step], device, repeats=repeats)
        finally:
            for each in reversed(applied):
                each.remove()
        return Measured(step_s=statistics.median(seconds), peak_bytes=peak, reserved_bytes=reserved)

    def step(self) -> None:
        self.real.module(**self.inputs).loss.backward()
        self.optimizer.step()


class MainGradients:
    """AdamW on a master copy in fp32, whose gradients take up those of the weights as soon as there are any.

    Weights in fp32 are their own master copy. Learning rate 0: a step costs what it costs, and changes nothing.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._weights = [p for p in parameters if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else _master_of(p) for p in self._weights]
        self._adamw = torch.optim.AdamW(self._masters, lr=0.0, fused=self._weights[0].device.type == "cuda")

    def step(self) -> None:
        self._adamw.step()
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight is not master:
                weight.detach().copy_(master)
            if master.grad is not None:
                master.grad.zero_()

    def tensors(self) -> list[torch.Tensor]:
        """What lives between steps beside the weights."""
        moments = [x for state in self._adamw.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        return [*self._masters, *(m.grad for m in self._masters if m.grad is not None), *moments]


def _master_of(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    master = torch.nn.Parameter(weight.detach().float())
    master.grad = torch.zeros_like(master)

    def take_up(parameter: torch.Tensor) -> None:
        assert master.grad is not None
        assert parameter.grad is not None, "called once it is there"
        master.grad.add_(parameter.grad)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(take_up)
    return master


def every_nth(profile: Profile, stage: Stage, step: int) -> Stage:
    """Full recompute of the first of every `step` layers that can."""
    able = [i for i, layer in enumerate(profile.layers) if layer.tier("full")]
    return recomputing(stage, dict.fromkeys(able[::step], "full"))


def first_n(profile: Profile, stage: Stage, number: int) -> Stage:
    """Full recompute of the first `number` blocks of the language model, and of the vision tower all or none.

    So launchers with one number have it; the tower recomputes from the first block on.
    """
    blocks = [i for i, layer in enumerate(profile.layers) if layer.tier("full")]
    text = [i for i in blocks if profile.layers[i].tower == "language"]
    tower = [i for i in blocks if profile.layers[i].tower != "language"]
    return recomputing(stage, dict.fromkeys((*(tower if number else ()), *text[:number]), "full"))


def _patches_of(real: RealModel, times: int) -> float:
    work = run_of(real, real.kinds.batches.make(times, 16), set(real.chosen)).work
    return max(1.0, float(next(iter(work.values()))[1]))


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def relative(predicted: float, measured: float) -> float:
    """Predicted / measured - 1; below 0 is too low."""
    return predicted / measured - 1.0


def names_of(stage: Stage) -> Sequence[str]:
    return [f"{choice.tier} {len(choice.layers)}" for choice in stage.recompute] or ["none"]
