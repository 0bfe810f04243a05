"""A Hugging Face model and a plan to this rank's part of a pipeline: `build_pipeline`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class

from trimtab.balance.cost import LinearCost
from trimtab.errors import UnsupportedPlanError, join_problems
from trimtab.models.asking.units import Unit
from trimtab.plan.layout import PipelineLayout, read_layout
from trimtab.plan.plan import Plan
from trimtab.runtime.data.collate import label_weights, packed_loss
from trimtab.runtime.data.packing import bound_of
from trimtab.runtime.pipeline.cuts import Cuts, StageModule
from trimtab.runtime.pipeline.image_dispatch import ImageDispatch, dispatch_images, share_tower
from trimtab.runtime.pipeline.pipeline import PackedStage, Pipeline, TiedWeight, pack_loss
from trimtab.runtime.pipeline.replica import ReplicaTower, spread_tower
from trimtab.runtime.pipeline.trace import (
    Batch,
    Sealed,
    Tracer,
    arguments_of,
    find_layer,
    layer_order,
    parameters_of,
    try_trace,
)
from trimtab.runtime.recompute import apply


def build_pipeline(
    model: nn.Module,
    plan: Plan | PipelineLayout,
    *,
    pp_group: dist.ProcessGroup | None = None,
    dp_group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    image_cost: LinearCost | None = None,
    timeout_s: float = 600.0,
) -> Pipeline:
    """The stages that this rank of `pp_group` holds, on `device`; `torch.distributed` has to be initialised.

    Use it on every rank, in place of moving the model to its device. examples/train_pipeline.py is a whole run.

    Every rank gives the same model, with the same parameters frozen. It is taken apart: layers of other ranks lose
    their weights (they move to the meta device) before anything moves to `device`, so a rank holds only its own part.

    Stages are cut wherever the plan says. A weight that two layers share (tied embeddings) may lie on two ranks; its
    gradient is summed over both. `pp_group` None: all processes. `dp_group` None: one data-parallel rank. With a device
    mesh of ("dp", "pp"): `mesh["pp"].get_group()` and `mesh["dp"].get_group()`.

    Where the layout has `images`, first stages of `dp_group` share the images of a step, or all ranks of `pp_group` do,
    which then hold the whole tower each. They are balanced by `image_cost`, the same on every rank; None: by
    multiply-adds. Ranks wait for one another for `timeout_s`.
    """
    layout = plan if isinstance(plan, PipelineLayout) else read_layout(plan)
    pp_group = pp_group or dist.group.WORLD
    assert pp_group is not None, "torch.distributed is not initialised"
    several = dp_group is not None and dist.get_world_size(dp_group) > 1
    images = layout.images if several or layout.has_tower_everywhere else None
    tracer = Tracer(model)
    check_layout(layout, tracer.units, model, num_ranks=dist.get_world_size(pp_group), shares_images=images is not None)

    # the stages of this rank; all other weights are dropped
    cuts, rank, device = Cuts(model, layout.modules, tracer=tracer), dist.get_rank(pp_group), torch.device(device)
    ends = list(accumulate(len(stage) for stage in layout.stages))
    cuts.forbid(ends[:-1])
    own = layout.stages_of(rank)
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]  # Transformers' property
    modules = {
        i: StageModule(model, cuts, ends[i] - len(layout.stages[i]), ends[i], dtype=dtype, device=device) for i in own
    }
    tied = _tied_weight(model, layout, rank)
    tower: StageModule | None = None
    if images is not None and layout.has_tower_everywhere:
        tower = modules.get(0) or StageModule(model, cuts, 0, len(cuts.images), dtype=dtype, device=device)
    kept = {name for i in own for name in layout.stages[i]} | set(() if tower is None else cuts.images)
    _drop_weights(model, [name for name in layout.modules if name not in kept])

    # on the device, with the recompute of the plan
    stages = []
    for i in own:
        module = modules[i].to(device)
        for choice in layout.recompute:
            held = tuple(name for name in choice.modules if name in layout.stages[i])
            apply(module.model, held, granularity=choice.granularity)
        stages.append(PackedStage(module, i, len(layout.stages), device, pp_group))

    # first stages of data-parallel ranks share images, or all ranks of a pipeline
    shared: ImageDispatch | ReplicaTower | None = None
    ways: dict[str, Any] = {"model": model, "cost": image_cost, "device": device, "timeout_s": timeout_s}
    if images is not None and tower is not None:
        tower = tower.to(device)
        shared = spread_tower(tower, images, share_tower(tower, images, group=pp_group, **ways))
    elif images is not None and 0 in modules:
        assert dp_group is not None
        shared = dispatch_images(layout, images, share_tower(modules[0], images, group=dp_group, **ways))
    if 0 in modules:
        stages[0].images = shared
    # the first collective of a group: batched sends need it
    dist.all_reduce(torch.zeros(1, device=device), group=pp_group)
    return Pipeline(
        layout=layout,
        stages=tuple(stages),
        schedule=_make_schedule(layout, stages),
        device=device,
        pp_group=pp_group,
        dp_group=dp_group if several else None,
        tied=tied,
        images=shared,
    )


def _make_schedule(layout: PipelineLayout, stages: list[PackedStage]) -> Any:
    kind = get_schedule_class(layout.schedule)
    runs: Any = stages if layout.schedule in ("Interleaved1F1B", "ZBVZeroBubble") else stages[0]
    return kind(runs, layout.num_microbatches, loss_fn=pack_loss, scale_grads=False)


# -- weights --------------------------------------------------------------------------------------------------------


def _tied_weight(model: nn.Module, layout: PipelineLayout, rank: int) -> TiedWeight | None:
    """The weight that a layer of this rank shares with one of another rank; `check_layout` lets one through."""
    for parameter, devices in _shared(model, layout):
        if rank in devices:
            peer = next(device for device in devices if device != rank)
            return TiedWeight(parameter=parameter, peer=peer, owner=rank == devices[0])
    return None


def _shared(model: nn.Module, layout: PipelineLayout) -> list[tuple[nn.Parameter, list[int]]]:
    """Return the parameters that layers on several devices hold, and these devices, in the order of their stages."""
    holders: dict[nn.Parameter, dict[int, None]] = {}
    for i, stage in enumerate(layout.stages):
        for name in stage:
            for parameter in parameters_of(find_layer(model, name)):
                holders.setdefault(parameter, {})[layout.device_of(i)] = None
    return [(parameter, list(devices)) for parameter, devices in holders.items() if len(devices) > 1]


def _drop_weights(model: nn.Module, layers: Sequence[str]) -> None:
    """Moves the layers to the meta device; a weight they share with another layer stays there."""
    for name in layers:
        layer = find_layer(model, name)
        if isinstance(layer, nn.Module):
            layer.to("meta")
        else:
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent)._parameters[last] = nn.Parameter(layer.to("meta"))


# -- checks ---------------------------------------------------------------------------------------------------------


def check_layout(
    layout: PipelineLayout, units: Sequence[Unit], model: Any, *, num_ranks: int, shares_images: bool
) -> None:
    """Raises `UnsupportedPlanError` with all in which plan, model and ranks do not fit each other."""
    problems, layers = [], {unit.path: unit for unit in units}
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        problems.append("output_router_logits adds a loss over all layers, which no stage sees whole: set it to False")
    if num_ranks != layout.num_devices:
        problems.append(
            f"the pipeline has {num_ranks} processes, not {layout.num_devices}: start as many, or --pp {num_ranks}"
        )
    # modules, recompute and images of the plan, against those of the model
    problems += _module_problems(layout.modules, layers)
    strangers = [x for choice in layout.recompute for x in choice.modules if x not in layers]
    if strangers:
        problems.append(f"the model lacks {', '.join(strangers[:3])}, which recompute: plan with its own config")
    if layout.images is not None and shares_images:
        problems += _tower_problems(layout, layers)
    if not problems:
        problems += _ownership_problems(layout, model)
    if problems:
        raise UnsupportedPlanError(join_problems(problems))


def _module_problems(planned: tuple[str, ...], layers: Mapping[str, Unit]) -> list[str]:
    """List problems of modules; whether they come in forward order, the first micro-batches show."""
    problems = []
    missing, unknown = set(layers) - set(planned), set(planned) - set(layers)
    repeated = [name for name, count in Counter(planned).items() if count > 1]
    for what, names in (("leave out", missing), ("name unknown modules", unknown), ("repeat", set(repeated))):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            problems.append(f"the plan's stages {what}: {listed}; plan with the config of the model that is trained")
    return problems


def _tower_problems(layout: PipelineLayout, layers: Mapping[str, Unit]) -> list[str]:
    tower = [name for name in layout.modules if name in layers and layers[name].tower != "language"]
    elsewhere = [name for name in tower if name not in layout.stages[0]]
    if not elsewhere:
        return []
    return [
        f"{len(elsewhere)} of {len(tower)} tower layers, {elsewhere[0]} the first, lie after stage 0, and images are "
        "shared: plan with all of them on stage 0, or with --set towers=one-grid"
    ]


def _ownership_problems(layout: PipelineLayout, model: nn.Module) -> list[str]:
    """List weights that three ranks share: they would train on unequal sums."""
    several = [devices for _, devices in _shared(model, layout)]
    if len(several) > 1 or any(len(devices) > 2 for devices in several):
        return [
            f"{len(several)} weights are shared across stages, by up to {max(map(len, several))} devices: untie all "
            "but one, and leave that to two"
        ]
    return []


# Are the stages of a cut model the model? `verify_pipeline` runs them one after the other in this process.


Links: TypeAlias = list[tuple[Tensor, Tensor]]
"""Tensors that one stage sent, and the same as the next one received them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCheck:
    """Relative errors of the stages next to the model's own forward and backward."""

    loss: float
    gradients: float  # of all parameters as one vector
    worst: float  # of one parameter; small ones are held against a thousandth of the largest

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients, self.worst)


def layers_of(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Return module paths of all layers in forward order, as plans list them, for a micro-batch with an image.

    Use it to make a `PipelineLayout` by hand; docs/pipeline.md shows it.
    """
    tracer = Tracer(model)
    return layer_order(tracer.units, try_trace(tracer, batch))


def verify_pipeline(model: nn.Module, stages: Sequence[Sequence[str]], batches: Sequence[Batch]) -> PipelineCheck:
    """Return whether these stages give the model's own loss and gradients; needs no process group.

    Use it for a model of your own, before a run. docs/pipeline.md shows it.

    `stages`: module paths, as in `PipelineLayout`; `batches`: micro-batches with and without images, as
    `PackedCollator` makes them. The model is small enough to run here; its gradients are used, and None afterwards. A
    model that cannot be cut there, or whose stages compute something else, is refused by an `UnsupportedPlanError`.
    """
    expected_loss, expected = _run(model, lambda batch: _call_model(model, batch), batches)
    ends = list(itertools.accumulate(len(stage) for stage in stages))
    cuts = Cuts(model, [name for stage in stages for name in stage])
    cuts.forbid(ends[:-1])
    parameter = next(model.parameters())
    made = [
        StageModule(model, cuts, start, stop, dtype=parameter.dtype, device=parameter.device)
        for start, stop in itertools.pairwise([0, *ends])
    ]
    try:
        loss, found = _run(model, lambda batch: _call_stages(made, batch), batches)
    finally:
        for stage in made:
            stage.release()
    check = _compare(loss, expected_loss, found, expected)
    # rounding leaves less than this; a layer that is skipped or seen twice is off by 1e-2 and more
    if not check.largest <= bound_of(model):
        raise UnsupportedPlanError(
            f"cut at {', '.join(stage[0] for stage in stages[1:])}, loss is off by {check.loss:.2g}, gradients by "
            f"{check.gradients:.2g}: train without pp"
        )
    return check


def _run(
    model: nn.Module, call: Callable[[Batch], tuple[Tensor, list[Links]]], batches: Sequence[Batch]
) -> tuple[float, dict[str, Tensor | None]]:
    """Return the loss and gradients of a step."""
    total = sum(float(label_weights(batch).sum()) for batch in batches)
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for batch in batches:
        logits, links = call(batch)
        own = packed_loss(logits, batch, denominator=total)
        loss += float(own.detach())
        own.backward()  # type: ignore[no-untyped-call]
        # what crossed a cut goes back over it, the last cut first
        for link in reversed(links):
            reached = [(sent, received.grad) for sent, received in link if received.grad is not None]
            torch.autograd.backward([x for x, _ in reached], [x for _, x in reached])
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss, found


def _call_model(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Links]]:
    result = model(**arguments_of(batch))
    return (result.logits if hasattr(result, "logits") else result[0]), []


def _call_stages(stages: Sequence[StageModule], batch: Batch) -> tuple[Tensor, list[Links]]:
    links: list[Links] = []
    values: tuple[Tensor, ...] = ()
    for stage in stages:
        made = stage(*values, sealed=Sealed(batch))
        if stage.is_last:
            return made, links
        values = tuple(x.detach().requires_grad_(x.requires_grad) for x in made)
        links.append(list(zip(made, values, strict=True)))
    raise AssertionError("no stage is the last")


def _compare(
    loss: float, expected_loss: float, found: dict[str, Tensor | None], expected: dict[str, Tensor | None]
) -> PipelineCheck:
    none = torch.zeros(())  # a gradient that is None is one of zeros
    rights = [none if x is None else x for x in expected.values()]
    owns = [none if x is None else x for x in (found[name] for name in expected)]
    norms = [float(right.norm()) for right in rights]
    apart = [float((own - right).norm()) for own, right in zip(owns, rights, strict=True)]
    floor = 1e-3 * (max(norms, default=0.0) or 1.0)
    return PipelineCheck(
        loss=abs(loss - expected_loss) / max(abs(expected_loss), 1e-30),
        gradients=math.hypot(*apart) / math.hypot(*norms) if any(norms) else 0.0,
        worst=max((x / max(norm, floor) for x, norm in zip(apart, norms, strict=True)), default=0.0),
    )
