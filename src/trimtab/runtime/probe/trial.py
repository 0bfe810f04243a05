"""One run of a rank's stages under a recompute choice, and what they held."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.costs.measured.traced_step import StepMode, young_garbage
from trimtab.costs.profile import with_tiers
from trimtab.errors import PlanError, UnsupportedPlanError
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.probed import DeviceProbe, heaviest_packs
from trimtab.plan.file.reload import ReloadedPlan
from trimtab.plan.layout import SPLIT_BACKWARD, PipelineLayout, read_layout
from trimtab.plan.plan import Plan
from trimtab.runtime.pipeline.pipeline import PackedStage, Pipeline
from trimtab.runtime.pipeline.trace import Batch
from trimtab.runtime.ranks import Ranks
from trimtab.runtime.recompute import Granularity, apply
from trimtab.runtime.training.loop import autocast, open_run
from trimtab.runtime.training.settings import ProbeSettings, TrainSettings
from trimtab.specs import Stage
from trimtab.units import format_bytes

# Bytes of a device that a run holds now and held at most.
#
# On CUDA the allocator counts. On the CPU the same is counted operation by operation: live storages, as the allocator
# would have them, weights and optimizer state included. Hooks on saved tensors would not do: they do not see what a
# recomputed layer computes again, nor gradients.


class CudaMeter:
    """torch's allocator, and on top of it what the process and its neighbours take of the device: context, libraries.

    `watch` is a context in which `peak_bytes` is that of the run inside; `static`: all that lives before and after;
    `inputs`: batches, which the loader holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros(1, device=device)  # makes the context
        free, total = torch.cuda.mem_get_info(device)
        self.outside_bytes = total - free - torch.cuda.memory_reserved(device)

    @contextmanager
    def watch(self, static: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[None]:  # noqa: ARG002
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        yield

    @property
    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) + self.outside_bytes

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) + self.outside_bytes


class CpuMeter:
    """The same for the CPU: live storages, counted by a dispatch mode; workspaces inside kernels are not seen."""

    def __init__(self) -> None:
        self._static_bytes = 0
        self._mode: _HostMode | None = None

    @contextmanager
    def watch(self, static: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[None]:
        known = list(static)
        self._static_bytes = storage_bytes(known)
        self._mode = _HostMode([*known, *inputs])
        with self._mode:
            yield

    @property
    def held_bytes(self) -> int:
        assert self._mode is not None, "nothing was watched"
        gc.collect(0)  # models leave tensors in cycles of Python objects
        return self._static_bytes + self._mode.live_bytes

    @property
    def peak_bytes(self) -> int:
        assert self._mode is not None, "nothing was watched"
        return self._static_bytes + self._mode.step_peak_bytes


class _HostMode(StepMode):  # type: ignore[no-untyped-call]
    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":  # of fake tensors, by which sizes across a cut are found
            super()._see_storage(storage)


Meter = CudaMeter | CpuMeter
"""Counts one device; the same numbers mean the same on every kind of it."""


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of all their storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def meter_of(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


CURES = "give more memory (--budget) or a larger --risk, or plan with more stages or smaller packs"


def static_tensors(bench: Bench) -> list[Tensor]:
    """Return the tensors of this rank that outlive a step, gradients aside."""
    tensors = [
        x
        for stage in bench.pipeline.stages
        for named in (stage.model.named_parameters(), stage.model.named_buffers())
        for _, x in stage.module.named_own(named)
    ]
    states = [x for state in bench.optimizer.state.values() for x in state.values()]
    return tensors + [x for x in states if isinstance(x, Tensor) and x.device == bench.pipeline.device]


def run_trial(
    bench: Bench, choice: Mapping[str, Granularity], pack: int, *, num_steps: int, update: bool
) -> DeviceProbe:
    """Run whole training steps of this pack's micro-batch, over and over, with exactly `choice` recomputed; collective.

    `choice` may name layers of other ranks. `update`: with the optimizer's step, whose learning rate the caller has set
    to 0. Raises `PlanError` on the rank whose device has not even the memory to run; torchrun then ends the others.
    """
    pipeline, meter, batch = bench.pipeline, bench.meter, bench.batches[pack]
    batches = [batch] * pipeline.layout.num_microbatches
    parameters = list(pipeline.parameters())
    with ExitStack() as stack:
        for stage in pipeline.stages:
            for granularity in sorted(set(choice.values())):
                own = [x for x, how in choice.items() if how == granularity and _holds(pipeline, stage, x, batch)]
                stack.callback(apply(stage.model, own, granularity=granularity).remove)
        watch = stack.enter_context(_Watch(pipeline, meter))
        for parameter in parameters:
            parameter.grad = None
        stack.enter_context(young_garbage(generation=2))
        stack.enter_context(meter.watch(static_tensors(bench), _tensors_of(batch)))
        try:
            for _ in range(num_steps):
                watch.begin()
                with bench.autocast():
                    pipeline.step(batches, denominator=1.0)
                pipeline.gradient_norm()
                if update:
                    gc.collect(0)
                    bench.optimizer.step()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise PlanError(f"rank {dist.get_rank()} of a probe ran out of memory: {CURES}") from error
            raise
        peak = meter.peak_bytes
    static = storage_bytes(static_tensors(bench))
    probe = DeviceProbe(
        device=dist.get_rank(pipeline.pp_group),
        pack=pack,
        state_bytes=static + storage_bytes(p.grad for p in parameters if p.grad is not None),
        kept_bytes=watch.held_bytes - static,
        peak_bytes=peak,
        in_flight=watch.in_flight,
    )
    for parameter in parameters:
        parameter.grad = None
    return probe


def gather_probes(own: DeviceProbe, num_devices: int) -> tuple[DeviceProbe, ...]:
    """Gather the most of each pipeline device over the data-parallel ranks; collective, the same on every rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    found = []
    for device in range(num_devices):
        here = [x for x in every if x.device == device]
        most = {name: max(getattr(x, name) for x in here) for name in ("state_bytes", "kept_bytes", "peak_bytes")}
        found.append(replace(here[0], **most))
    return tuple(found)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error, or its cause, is an allocator's: torch's stages raise their own around it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


# -- watching ---------------------------------------------------------------------------------------------------------


class _Watch:
    """Stands around what a schedule calls on the stages, until the end of a `with` block."""

    CALLS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")

    def __init__(self, pipeline: Pipeline, meter: Meter) -> None:
        self._pipeline, self._meter = pipeline, meter
        self.held_bytes = 0
        self.in_flight: tuple[int, ...] = (0,) * len(pipeline.stages)
        self._run: dict[int, int] = {}
        self._in_backward = False

    def begin(self) -> None:
        """Begin a step."""
        self._run = {stage.stage_index: 0 for stage in self._pipeline.stages}
        self._in_backward = False

    def __enter__(self) -> _Watch:
        for stage in self._pipeline.stages:
            for name in self.CALLS:
                setattr(stage, name, partial(self._call, stage, name, getattr(stage, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for stage in self._pipeline.stages:
            for name in self.CALLS:
                delattr(stage, name)
            stage.expect(())  # lets go of what a step left

    def _call(self, stage: PackedStage, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gc.collect(0)
        if name == "backward_one_chunk" and not self._in_backward:
            self._in_backward = True
            self.held_bytes = self._meter.held_bytes
            self.in_flight = tuple(self._run[x.stage_index] for x in self._pipeline.stages)
        result = run(*args, **kwargs)
        self._run[stage.stage_index] += name == "forward_one_chunk"
        return result


def _holds(pipeline: Pipeline, stage: PackedStage, name: str, batch: Batch) -> bool:
    """Return whether the stage holds the layer, and something reads its result."""
    return name in pipeline.layout.stages[stage.stage_index] and name in stage.module.cuts.way(batch).read


def _tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of a micro-batch, the masks of each layer type too."""
    found = [x for x in batch.values() if isinstance(x, Tensor)]
    return found + [x for value in batch.values() if isinstance(value, Mapping) for x in value.values()]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave what is there already out of collections: those between runs then take no time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# A plan's stages, packs and schedule, ready to run under any recompute choice: `open_bench`.


_OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "sgd_momentum": ("SGD", {"momentum": 0.9}),
    "sgd": ("SGD", {}),
}
"""What the plan counts, in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRun:
    """One run of the pipeline on one pack."""

    what: str
    pack: int
    failed_devices: tuple[int, ...]  # whose peak was above the limit
    peak_bytes: tuple[int, ...]  # of each device


@dataclass(kw_only=True, eq=False)
class Bench:
    """A plan's stages ready to run under any recompute choice, and the log of what has run."""

    case: Case
    stages: tuple[Stage, ...]
    pipeline: Pipeline  # this rank's part, built without recompute
    optimizer: torch.optim.Optimizer
    meter: Meter
    autocast: Callable[[], AbstractContextManager[Any]]
    batches: Mapping[int, Batch]  # of the heaviest packs
    num_steps: int
    tell: Callable[[str], None]
    runs: list[ProbeRun] = field(default_factory=list)

    @property
    def limit_bytes(self) -> int:
        return int(self.case.budget.fill_bytes)

    def run(self, what: str, stages: Sequence[Stage], pack: int, *, whole: bool = True) -> tuple[DeviceProbe, ...]:
        """Return what each device held; not `whole`: one step, and the optimizer is left out."""
        names = [layer.name for layer in self.case.model.layers]
        choice: dict[str, Granularity] = {
            names[i]: entry.tier for stage in stages for entry in stage.recompute for i in entry.layers
        }
        own = run_trial(self, choice, pack, num_steps=self.num_steps if whole else 1, update=whole)
        readings = gather_probes(own, self.pipeline.layout.num_devices)
        peaks = tuple(x.peak_bytes for x in readings)
        failed = self.above_limit(readings)
        self.runs.append(ProbeRun(what=what, pack=pack, failed_devices=failed, peak_bytes=peaks))
        above = f", above the limit on device {', '.join(map(str, failed))}" if failed else ""
        self.tell(f"{what}, pack {pack}: at most {format_bytes(max(peaks))}{above}")
        return readings

    def above_limit(self, readings: Sequence[DeviceProbe]) -> tuple[int, ...]:
        return tuple(device for device, x in enumerate(readings) if x.peak_bytes > self.limit_bytes)


def open_bench(
    settings: ProbeSettings, found: ReloadedPlan, case: Case, ranks: Ranks, tell: Callable[[str], None]
) -> Bench:
    training = _training(settings, found.plan)
    run = open_run(training, found.plan, ranks, layout=_layout(found.plan, case))
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0  # every run is of the same weights
    packing = case.packing
    batches = {}
    for pack in heaviest_packs(case, found.stages):
        rows = packing.indices[packing.offsets[pack] : packing.offsets[pack + 1]].tolist()
        batches[pack] = run.loader.collate_fn([run.data[row] for row in rows])
    return Bench(
        case=_in_reach(case),
        stages=found.stages,
        pipeline=run.pipeline,
        optimizer=run.optimizer,
        meter=meter_of(ranks.device),
        autocast=partial(autocast, training, ranks.device),
        batches=batches,
        num_steps=settings.num_steps,
        tell=tell if dist.get_rank() == 0 else lambda _: None,
    )


def _training(settings: ProbeSettings, plan: Plan) -> TrainSettings:
    planned = plan.inputs.training.optimizer
    if planned not in _OPTIMIZERS:
        raise UnsupportedPlanError(f"torch.optim has no {planned}: plan with --set optimizer {', '.join(_OPTIMIZERS)}")
    name, options = _OPTIMIZERS[planned]
    return TrainSettings(
        plan=settings.plan,
        model=settings.model,
        out=settings.plan,
        reading=settings.reading,
        optimizer=name,
        optimizer_options=options,
        dtype="float32" if plan.inputs.training.dtype == "fp32" else "bfloat16",
        random_weights=not any(settings.model.glob("*.safetensors")),
        device=settings.device,
        save=False,
        verify_packing=False,
        seed=settings.seed,
    )


def _layout(plan: Plan, case: Case) -> PipelineLayout:
    """The plan's stages without recompute; of 1F1B's micro-batches only as many as fill it, and one more.

    The one more meets gradients that are there already, as most do.
    """
    layout = replace(read_layout(plan), recompute=())
    if layout.schedule != "1F1B":
        return layout
    return replace(layout, num_microbatches=min(layout.num_microbatches, case.setting.dims.pp + 1))


def _in_reach(case: Case) -> Case:
    """The case without tiers that torch's schedule of this name cannot run; `_with_all_tiers` gives them back."""
    tiers = (lambda _: ("full",)) if case.problem.schedule in SPLIT_BACKWARD else None
    return replace(case, setting=replace(case.setting, profile=with_tiers(case.setting.profile, case.model, tiers)))
