"""Put a handle on a model: `vision_dp`, `vision_heartbeat`, and `vision_dp_from_plan` as a plan decides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import RULES
from trimtab.errors import PlanError, TrimtabError
from trimtab.options import Rule
from trimtab.plan.plan import Plan
from trimtab.runtime.vision.agreement import Control, open_control
from trimtab.runtime.vision.encode import (
    Exchange,
    Load,
    Rows,
    Settings,
    Sharing,
    encode_nothing,
    encode_shared,
    run_on_nothing,
)
from trimtab.runtime.vision.exchange import sum_in_place
from trimtab.runtime.vision.hooks import (
    KINDS,
    RETURNS_OBJECTS,
    Heartbeat,
    PatchedFunction,
    Place,
    StandIn,
    find_functions,
    is_shared,
)
from trimtab.runtime.vision.inputs import (
    GRIDS,
    PIXELS,
    Family,
    GridFamily,
    VisionInputs,
    each_tensor,
    find_family,
    touch,
    tower_flops,
)

_TEXT = ("language_model", "lm_head", "text_model", "embed_tokens")


@dataclass(slots=True, kw_only=True, eq=False)
class VisionDataParallel:
    """Holds the replaced functions of one model; `remove()` or leaving the `with` block puts them back."""

    model: nn.Module
    group: Any  # None: a heartbeat and no exchange
    settings: Settings
    family: Family
    config: Any
    functions: tuple[PatchedFunction, ...]
    sharing: Sharing | None = None  # None: a group of one, or none
    heartbeat: Heartbeat | None = None
    _inside: bool = False  # a call of our own: replaced functions are the module's own
    _paused: bool = False
    _installed: bool = False

    @property
    def num_ranks(self) -> int:
        return 1 if self.sharing is None else self.sharing.control.num_ranks

    @property
    def load(self) -> Load:
        """Return what this rank has encoded."""
        return Load() if self.sharing is None else self.sharing.load

    def __enter__(self) -> VisionDataParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def install(self) -> None:
        """Replace the functions, once; a group of one without a heartbeat replaces nothing."""
        if self.sharing is None and self.heartbeat is None:
            return
        for function in self.functions:
            function.put(StandIn(function, self, self._encode))
        if self.heartbeat is not None:
            self.heartbeat.install()
        self._installed = True

    def remove(self) -> None:
        """Put the module's own functions back, end the connections; harmless when that was done already."""
        if not self._installed:
            return
        for function in self.functions:
            function.put_back()
        if self.heartbeat is not None:
            self.heartbeat.remove()
            self.heartbeat.control.close()
        if self.sharing is not None:
            self.sharing.control.close()
        self._installed = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let every rank encode all images it holds, as without the handle; a heartbeat goes on."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def vision_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are not the language model's: the tower and what follows it up to the features."""
        module = self.functions[0].module
        # by identity, for tied weights have several names
        children = [child for name in _TEXT if isinstance(child := getattr(module, name, None), nn.Module)]
        text = {id(p) for child in children for p in child.parameters()}
        return [p for p in module.parameters() if id(p) not in text]

    def reduce_gradients(self, group: Any = None) -> None:
        """Average the vision parameters' gradients over the group, for a host that leaves replicas alone.

        `group`: the ranks that each have the whole loss, where they are a part of those that share: of tp x cp those of
        tp. The gradients of cp ranks are then added up as those of the text are.
        """
        if self.sharing is None:
            return
        trained = [p for p in self.vision_parameters() if p.requires_grad]
        # Megatron keeps gradients in main_grad, which only it can average
        if self.load.calls and trained and all(p.grad is None for p in trained):
            raise TrimtabError(
                "no vision parameter has a gradient: call this after the backward, or average main_grad yourself "
                "(Megatron)"
            )
        gradients = [p.grad for p in trained if p.grad is not None]
        sum_in_place(
            gradients, group or self.group
        )  # N times those of one process: each has the whole loss (kappa = N)
        for gradient in gradients:
            gradient /= self.num_ranks if group is None else dist.get_world_size(group)

    # -- what the replaced functions and the hooks call ------------------------------------------------------------

    def _encode(self, function: PatchedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of the model's own function."""
        if self._inside:  # videos encoded as images call a second replaced function
            return function.original(*args, **kwargs)
        with self._within():
            if self.sharing is None or self._paused:
                output = function.original(*args, **kwargs)
            else:
                template = None if self.heartbeat is None else self.heartbeat.templates.pop(function.kind, None)
                output = encode_shared(self.sharing, function, args, kwargs, template)
        # what other ranks encode next and this one lacks runs now: the order of calls is the same on every rank
        zero = None if self.heartbeat is None else self.heartbeat.run_missing(function.kind)
        return output if zero is None else touch(output, zero)

    def run_without(self, function: PatchedFunction, template: VisionInputs) -> Any:
        """Take part in a call of the tower without an image of one's own: a zero that depends on it."""
        with self._within():
            if self.sharing is not None and self.settings.exchange == "dispatch" and not self._paused:
                return encode_nothing(self.sharing, function, template)
            return run_on_nothing(self.family, self.config, function, template).rows.sum()

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """Mark that calls of the replaced functions from here on are our own."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before


# -- put on a model ---------------------------------------------------------------------------------------------------


def vision_dp(
    model: nn.Module,
    group: Any = None,
    *,
    exchange: Exchange = "gather",
    rule: Rule = "balanced",
    cost: LinearCost | None = None,
    rows: Rows | None = None,
    heartbeat: Any = None,
    family: Family | None = None,
    at: Place | None = None,
    timeout_s: float = 600.0,
) -> VisionDataParallel:
    """Call this where ranks would encode the same images, or unequal ones: each of `group` then encodes its share.

    Every rank of the group must call it. examples/vision_data_parallel.py is a whole run.

    `gather`: ranks hold the same images (sequence, context or tensor parallel) and all get all features. `dispatch`:
    ranks hold different images (data parallel) and get the features of their own. Features and gradients equal those
    without, wherever the text gradients are right; a host that leaves replicas along tensor parallel ranks alone calls
    the handle's `reduce_gradients()` after the backward, over tp x cp with the group of the tensor parallel ranks. In a
    group of one nothing is replaced.

    `rows`: of a context parallel group whose text was cut before the model runs. It returns, for the batch at hand, the
    rows of features that each rank's tokens take (`zigzag_rows`); each rank then gets only these.

    `cost` is what the shares are balanced by, the same on every rank: `tower_seconds(profile)` for time,
    `tower_bytes(profile)` for memory; None counts multiply-adds by the configuration. `heartbeat` is the group over
    which parameters are sharded or reduced, where some of its ranks may have a batch without images.
    `at` None: the functions `get_image_features` and `get_video_features` of the instance, or of a tower alone its
    `forward`.
    Compared are, before each call, the images: all shapes and 64 elements of each tensor. Ranks that differ all raise,
    at once. One that does not come at all cannot be distinguished from a slow one: those that wait name it after 10 s
    and raise after `timeout_s`, by default what NCCL's own watchdog waits.
    """
    # what was asked
    problems = []
    if exchange not in get_args(Exchange):
        problems.append(f"exchange {exchange!r} is unknown: choose one of {', '.join(get_args(Exchange))}")
    if rule not in RULES:
        problems.append(f"rule {rule!r} is unknown: choose one of {', '.join(RULES)}")
    if rows is not None and exchange != "gather":
        problems.append("rows= is for ranks that hold the same images: leave it out, or exchange='gather'")
    if problems:
        raise TrimtabError("\n".join(problems))
    # what is replaced, and how shares are weighed
    functions = find_functions(model, at)
    cost = cost or tower_flops(functions[0].module.config)
    settings = Settings(exchange=exchange, rule=rule, cost=cost)
    return _put_on(model, functions, settings, group or dist.group.WORLD, heartbeat, family, timeout_s, rows)


def vision_heartbeat(model: nn.Module, group: Any = None, *, timeout_s: float = 600.0) -> VisionDataParallel:
    """Keep ranks without images in step with those that have some; every rank encodes all of its own.

    Use it where parameters are sharded over ranks and some see no images; docs/vision-data-parallel.md names it.
    """
    functions = find_functions(model)
    cost = tower_flops(functions[0].module.config)
    settings = Settings(exchange="gather", rule="balanced", cost=cost)
    return _put_on(model, functions, settings, None, group or dist.group.WORLD, None, timeout_s)


def _put_on(
    model: nn.Module,
    functions: tuple[PatchedFunction, ...],
    settings: Settings,
    group: Any,
    heartbeat: Any,
    family: Family | None,
    timeout_s: float,
    rows: Rows | None = None,
) -> VisionDataParallel:
    """Make a handle whose images are shared over `group` and whose heartbeat goes over `heartbeat`, one or both.

    Ranks of a dispatch, each with images of its own, keep in step over the same group.
    """
    if is_shared(model):
        raise TrimtabError("this model's images are shared already: call remove() of the first handle")
    found = VisionDataParallel(
        model=model,
        group=group,
        settings=settings,
        family=family or find_family(functions[0].module.config, functions[0].original),
        config=functions[0].module.config,
        functions=functions,
    )
    # a group of one has nobody to share with
    control = None
    if group is not None and dist.get_world_size(group) > 1:
        control = open_control(group, timeout_s)
        found.sharing = Sharing(
            group=group, control=control, settings=settings, family=found.family, config=found.config, rows=rows
        )
    # a dispatch keeps in step over the connection that it has already
    if settings.exchange == "dispatch":
        found.heartbeat = None if control is None else _make_heartbeat(found, control)
    elif heartbeat is not None and dist.get_world_size(heartbeat) > 1:
        found.heartbeat = _make_heartbeat(found, open_control(heartbeat, timeout_s))
    found.install()
    return found


def _make_heartbeat(handle: VisionDataParallel, control: Control) -> Heartbeat:
    by_kind = {function.kind: function for function in handle.functions}
    functions = {kind: by_kind[kind] for kind in KINDS if kind in by_kind}
    if not functions:
        raise TrimtabError("a heartbeat needs get_image_features: pass the whole model, not the tower")
    return Heartbeat(
        control=control,
        functions=functions,
        family=handle.family,
        config=handle.config,
        is_dispatch=handle.settings.exchange == "dispatch",
        run=handle.run_without,
    )


_PATCHES = LinearCost(patches=1.0)  # bytes held grow with patches, whatever the widths


def vision_dp_from_plan(
    model: nn.Module, group: Any, plan: Plan, *, cost: LinearCost | None = None, **others: Any
) -> VisionDataParallel | None:
    """Call `vision_dp` as `plan` decides; None, and nothing replaced, where every rank encodes the images it holds.

    Use it where your own host (Megatron, a loop of yours) runs a plan; `trimtab train` calls it itself.
    docs/vision-data-parallel.md shows it.

    `group`: this process's ranks along the plan's axis; of tp_cp the tp x cp ranks that hold the same packs. Each rank
    of tp has the whole loss, and gradients are averaged over them: where a host does not reduce gradients of tp
    replicas, call the handle's `reduce_gradients()` after the backward, over tp_cp with the group of the tp ranks.
    `cost` is None for multiply-adds by the configuration, or patches where the plan balances memory; with
    `tower_seconds` or `tower_bytes` of the plan's profile the shares are the plan's own. Where the plan pools
    micro-batches, encode as many at a time with `encode_pooled`. `others` are further arguments of `vision_dp`. Raises
    `PlanError` where the group has another size than the plan says, or the host cannot run what was decided.
    """
    decision = plan.decisions.vision_data_parallel
    if decision is None:
        return None
    # what a hook on the model can run of it
    if decision.group == "replica" or decision.exchange == "send":
        raise PlanError(
            f"the plan has its tower apart from the pipeline ({decision.group}), which no hook on a model can do: plan "
            "with --set towers=tp, cp, tp_cp or dp"
        )
    if dist.get_world_size(group) != decision.degree:
        raise PlanError(
            f"the group has {dist.get_world_size(group)} ranks: give the plan's {decision.degree} along "
            f"{decision.group}"
        )
    if decision.pooling > 1 and decision.exchange == "dispatch":
        raise PlanError(f"only `trimtab train` pools {decision.pooling} packs: plan with --set vision_pooling=1")
    return vision_dp(
        model,
        group,
        exchange=decision.exchange,
        rule=decision.rule,
        cost=_PATCHES if cost is None and decision.objective == "memory" else cost,
        **others,
    )


# Vision data parallel as a callback of Transformers' Trainer.


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
        if args.world_size < 2 or is_shared(model):
            return
        if self._plan is not None:
            self.handle = vision_dp_from_plan(model, self._group, self._plan, **self._options)
        else:
            self.handle = vision_dp(model, self._group, **{"exchange": "dispatch", **self._options})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self.handle is not None:
            self.handle.remove()


# One call of the tower for several micro-batches, whose forwards and backwards follow one at a time.
#
# Larger pools share out better and launch fewer kernels; they hold the tower's activations of all their micro-batches
# until the last backward has run (a plan takes what fits).


@dataclass(slots=True, kw_only=True, eq=False)
class PooledFeatures:
    """`outputs[i]` is micro-batch i's `mm_encoder_outputs`; call `backward()` once, after the last of theirs."""

    outputs: list[dict[str, Any]]
    _leaves: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (what the tower gave, what the model reads)

    def backward(self) -> None:
        """The tower's backward with the gradients that the micro-batches left; one exchange for each kind."""
        leaves, self._leaves = self._leaves, []
        if leaves:  # zeros where nothing reached the loss: the other ranks wait for this one's part of the exchange
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, leaf in leaves]
            torch.autograd.backward([source for source, _ in leaves], gradients)


def encode_pooled(handle: VisionDataParallel, microbatches: Sequence[dict[str, Any]]) -> PooledFeatures:
    """Return image features of several micro-batches' inputs, each of which a model of Transformers 5 takes for pixels.

    Use it where a plan pools micro-batches and the loop is your own; docs/vision-data-parallel.md shows it.

    `microbatches[i]` holds `pixel_values`, `image_grid_thw` and the like, for grid families; others are ignored.
    """
    if not isinstance(handle.family, GridFamily):
        raise TrimtabError(f"{type(handle.model).__name__} has no grid of patches: call it on each micro-batch")
    if handle.heartbeat is not None:
        raise TrimtabError("a pool has no heartbeat: call the model on each micro-batch")
    outputs: list[dict[str, Any]] = [{} for _ in microbatches]
    pooled = PooledFeatures(outputs=outputs)
    for function in handle.functions:
        if function.kind == "tower" or not RETURNS_OBJECTS:
            raise TrimtabError("mm_encoder_outputs needs at='features' and Transformers 5")
        pixels, grid = PIXELS[function.kind], GRIDS[function.kind]
        holders = [i for i, inputs in enumerate(microbatches) if inputs.get(pixels) is not None]
        if not holders:
            continue
        grids = [microbatches[i][grid] for i in holders]
        arguments = {pixels: torch.cat([microbatches[i][pixels] for i in holders]), grid: torch.cat(grids)}
        whole = getattr(function.module, function.name)(**arguments, return_dict=True)
        ends = torch.tensor([len(g) for g in grids]).cumsum(0).tolist()
        for i, start, end in zip(holders, [0, *ends], ends, strict=False):
            outputs[i][function.kind] = _cut(whole, start, end, pooled._leaves)
    return pooled


def _cut(whole: Any, start: int, end: int, leaves: list[tuple[Tensor, Tensor]]) -> Any:
    """Return the entries `start` to `end`, as leaves of the micro-batch's own graph."""

    def detached(source: Tensor) -> Tensor:
        if not source.requires_grad:
            return source
        leaf = source.detach().requires_grad_()
        leaves.append((source, leaf))
        return leaf

    return each_tensor(whole, start, end, detached)


# -- is vision data parallel right in this setup? measured on the host's loss of one small batch, in seconds ----------


CLOSE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest relative difference of gradients that is taken for rounding, by the type of the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCheck:
    """What was measured; the same on every rank."""

    loss_error: float  # relative difference of the loss with and without the handle
    gradient_error: float  # of the vision parameters' reduced gradients
    dtype: torch.dtype


def verify_vision_dp(
    handle: VisionDataParallel,
    loss: Callable[[], Tensor],
    *,
    reduce_gradients: Callable[[], None] | None = None,
) -> VisionCheck:
    """Call this once before a run in a host of your own: are loss and vision gradients those without the handle?

    `loss` runs the host's forward on one fixed batch, without dropout, and returns this rank's loss as it is
    back-propagated. `reduce_gradients` is what the host calls after a backward; None where a wrapper (DDP, FSDP2)
    reduces inside. Parameters stay as they are, gradients are None afterwards. Two forwards and backwards.
    examples/vision_data_parallel.py is a whole run. Not for ZeRO, whose gradients stay with DeepSpeed.
    """
    if handle.sharing is None:
        raise TrimtabError("a group of one shares nothing: run on two ranks or more")
    is_dispatch = handle.settings.exchange == "dispatch"
    parameters = [p for p in handle.vision_parameters() if p.requires_grad]

    def run() -> tuple[float, list[Tensor | None]]:
        handle.model.zero_grad(set_to_none=True)
        own = loss()
        own.backward()  # type: ignore[no-untyped-call]
        if reduce_gradients is not None:
            reduce_gradients()
        found = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        if is_dispatch:  # whoever encoded has the gradient; what the host has reduced already is multiplied alike
            found = [_sum_over(handle.group, p, gradient) for p, gradient in zip(parameters, found, strict=True)]
        handle.model.zero_grad(set_to_none=True)
        total = own.detach().double()
        dist.all_reduce(total, group=handle.group)
        return float(total), found

    with handle.paused():
        loss_alone, alone = run()
    loss_together, together = run()
    differences = [None if a is None or b is None else a - b for a, b in zip(together, alone, strict=True)]
    check = VisionCheck(
        loss_error=abs(loss_together - loss_alone) / max(abs(loss_alone), 1e-30),
        gradient_error=(_square(differences) / max(_square(alone), 1e-30)) ** 0.5,
        dtype=parameters[0].dtype,
    )
    if not max(check.loss_error, check.gradient_error) <= CLOSE[check.dtype]:
        raise TrimtabError(
            f"with images shared the loss differs by {check.loss_error:.2g}, vision gradients by "
            f"{check.gradient_error:.2g}: give a family= that fits the tower"
        )
    return check


def _sum_over(group: Any, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    """Return the sum of a parameter that every rank holds whole; of a sharded one the shard, which is a sum already."""
    if hasattr(parameter, "full_tensor"):
        return gradient
    total = torch.zeros_like(parameter) if gradient is None else gradient
    dist.all_reduce(total, group=group)
    return total


def _square(gradients: list[Tensor | None]) -> float:
    """Return the sum of squares, over all shards of sharded tensors."""
    total = 0.0
    for gradient in gradients:
        if gradient is not None:
            square: Any = gradient.double().square().sum()
            total += float(square.full_tensor() if hasattr(square, "full_tensor") else square)
    return total
