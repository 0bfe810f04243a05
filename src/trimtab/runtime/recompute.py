"""A plan's recompute switched on in a model: chosen layers run their forward again in the backward.

Torch's non-reentrant checkpointing, set only on the instances of the chosen layers, and removed without trace. It works
inside `__call__`, so that hooks (FSDP2's, accelerate's, the user's) run once, outside, whichever Transformers is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trimtab.errors import PlanError, TrimtabError, join_problems
from trimtab.options import RecomputedTier
from trimtab.plan.plan import Plan, RecomputeDecision
from trimtab.units import unfold_modules

Granularity: TypeAlias = RecomputedTier


_ATTENTION = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)
_PRODUCTS = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default}  # the last: experts
)
_KEPT: Mapping[str, frozenset[Any]] = MappingProxyType({"selective": _PRODUCTS | _ATTENTION, "full": frozenset()})
"""Operations whose results a layer holds apart from its inputs, by granularity."""

_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""What Transformers calls the key/value cache that it hands to a layer."""


class AppliedRecompute(AbstractContextManager["AppliedRecompute"]):
    """Recompute as it is set in one model, until `remove()` or the end of a `with` block."""

    def __init__(self, wrapped: Mapping[str, _Recomputed]) -> None:
        self._wrapped = dict(wrapped)

    @property
    def granularity(self) -> dict[str, Granularity]:
        """Return the granularity of every layer that recomputes, by its name."""
        return {name: wrapper.granularity for name, wrapper in self._wrapped.items()}

    def remove(self) -> None:
        """Give every layer the `forward` that it had before; a second call does nothing."""
        covered = [name for name, wrapper in self._wrapped.items() if wrapper.layer.__dict__["forward"] is not wrapper]
        if covered:
            raise TrimtabError(f"another wrapper is around {_listed(covered)} since: remove that one first")
        for wrapper in self._wrapped.values():
            wrapper.restore()
        self._wrapped.clear()

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply(
    model: nn.Module, decision: Plan | Iterable[RecomputeDecision | str], *, granularity: Granularity = "full"
) -> AppliedRecompute:
    """Call this in your own loop to save memory as a plan says: exactly the decided layers recompute from now on.

    >>> layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> with apply(layers, ["1"]) as recompute:
    ...     recompute.granularity
    {'1': 'full'}

    `decision` is a plan, its `decisions.recompute`, or names of layers ("model.visual.blocks[0..7]" is a range), which
    then all take `granularity`: "full" holds a layer's inputs; "selective" the results of fused attention and of
    matrix products as well, so that nothing is repeated but elementwise kernels. Attention
    outside of torch (flash_attention_2) and unfused attention run again under each.

    Gradients are bit-identical: the random state is restored for dropout. It holds in training and in eval
    mode, for whatever gradient can reach: a call in which neither inputs nor weights need one, as in a frozen tower, is
    left alone, and no input is made to need one. As in Transformers, a layer in training mode is handed no key/value
    cache, for it would be filled twice; in eval mode a call with a cache is left alone.

    Instances are changed, never classes; parameters, state-dict keys and hooks stay. Works before or after
    DistributedDataParallel, FSDP2's `fully_shard` and Transformers' Trainer take the model; leave their own switch
    (`gradient_checkpointing`) off.
    """
    model = model.module if isinstance(model, DistributedDataParallel) else model
    chosen = _read(decision, granularity)
    layers = dict(model.named_modules())
    problems = _problems(chosen, layers)
    if problems:
        raise PlanError(join_problems(problems))
    wrapped = {name: _Recomputed(layers[name], how) for name, how in chosen}
    for wrapper in wrapped.values():
        wrapper.layer.forward = wrapper
    return AppliedRecompute(wrapped)


def applied_to(model: nn.Module) -> dict[str, Granularity]:
    """Return the layers of `model` that recompute by `apply`, by name."""
    forwards = ((name, layer.__dict__.get("forward")) for name, layer in model.named_modules())
    return {name: forward.granularity for name, forward in forwards if isinstance(forward, _Recomputed)}


class _Recomputed:
    """A layer's `forward` under a checkpoint."""

    def __init__(self, layer: nn.Module, granularity: Granularity) -> None:
        self.layer = layer
        self.granularity = granularity
        self.forward: Callable[..., Any] = layer.forward
        self.was_own = "forward" in layer.__dict__
        self.options: dict[str, Any] = {"use_reentrant": False}
        if _KEPT.get(granularity):
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, list(_KEPT[granularity]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._needs_gradient((args, kwargs)):
            return self.forward(*args, **kwargs)
        cached = [name for name in _CACHES if kwargs.get(name) is not None]
        if cached and not getattr(self.layer, "_can_checkpoint_with_cache", False):
            if not self.layer.training:
                return self.forward(*args, **kwargs)
            kwargs.update(dict.fromkeys(cached))
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
        return checkpoint(self.forward, *args, **self.options, **kwargs)

    def restore(self) -> None:
        if self.was_own:
            self.layer.forward = self.forward
        else:
            del self.layer.forward

    def _needs_gradient(self, given: object) -> bool:
        return any(p.requires_grad for p in self.layer.parameters()) or any(t.requires_grad for t in tensors_in(given))


# -- reading and checking ---------------------------------------------------------------------------------------------


def _read(
    decision: Plan | Iterable[RecomputeDecision | str], granularity: Granularity
) -> tuple[tuple[str, Granularity], ...]:
    """Return every named layer with its granularity, in the decision's order."""
    if isinstance(decision, Plan):
        decision = decision.decisions.recompute
    chosen: list[tuple[str, Granularity]] = []
    for entry in (decision,) if isinstance(decision, str) else decision:  # one name: not its letters
        if isinstance(entry, str):
            chosen += [(name, granularity) for name in unfold_modules((entry,))]
        else:
            chosen += [(name, entry.granularity) for name in unfold_modules(entry.modules)]
    return tuple(chosen)


def _problems(chosen: tuple[tuple[str, Granularity], ...], layers: Mapping[str, nn.Module]) -> list[str]:
    names = [name for name, _ in chosen]
    known = set(names)
    problems = []
    for how in sorted({how for _, how in chosen} - set(get_args(Granularity))):
        problems.append(f"granularity {how!r} is unknown: choose {', '.join(get_args(Granularity))}")
    if unknown := [name for name in names if name not in layers]:
        problems.append(f"the model lacks {_listed(unknown)}: plan with its config, or name its modules")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{_listed(repeated)} stands twice: name each layer once")
    if inside := [name for name in sorted(known) if any(name.startswith(f"{other}.") for other in known)]:
        problems.append(f"{_listed(inside)} is inside another named module: name the outer or the inner one")
    if already := [
        name for name in names if name in layers and isinstance(layers[name].__dict__.get("forward"), _Recomputed)
    ]:
        problems.append(f"{_listed(already)} recomputes already: remove() that first")
    if any(getattr(layer, "gradient_checkpointing", False) for layer in layers.values()):
        problems.append(
            "the model's own gradient checkpointing is on: switch it off (model.gradient_checkpointing_disable())"
        )
    return problems


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def tensors_in(given: object) -> Iterator[Tensor]:
    """Yield tensors in nested mappings, tuples and lists."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        for value in given.values():
            yield from tensors_in(value)
    elif isinstance(given, (tuple, list)):
        for value in given:
            yield from tensors_in(value)
