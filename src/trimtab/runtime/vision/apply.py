"""`vision_dp` and `vision_heartbeat`: put a handle on a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import RULES
from trimtab.errors import TrimtabError
from trimtab.options import Rule
from trimtab.runtime.vision.control import Control, open_control
from trimtab.runtime.vision.families import Family, find_family, tower_flops
from trimtab.runtime.vision.gradients import Loss, Reduction, check_convention
from trimtab.runtime.vision.handle import Exchange, Settings, VisionDataParallel
from trimtab.runtime.vision.heartbeat import KINDS, Heartbeat
from trimtab.runtime.vision.seams import Place, Seam, find_seams, holder_of
from trimtab.specs import IntArray


def vision_dp(
    model: nn.Module,
    group: Any = None,
    *,
    exchange: Exchange = "gather",
    rule: Rule = "balanced",
    cost: LinearCost | None = None,
    loss: Loss | None = None,
    reduction: Reduction | None = None,
    heartbeat: Any = None,
    family: Family | None = None,
    at: Place | None = None,
    timeout_s: float = 600.0,
) -> VisionDataParallel:
    """Call this where ranks would encode the same images, or unequal ones: each of `group` then encodes its share.

    Every rank of the group must call it. examples/vision_data_parallel.py is a whole run.

    `gather`: ranks hold the same images (sequence, context or tensor parallel) and all get all features. `routed`:
    the same, but each gets only the rows it asks for. `dispatch`: ranks hold different images (data parallel) and get
    the features of their own. Features and gradients equal those without, wherever the text gradients are right:
    `loss` and `reduction` name how losses and gradients add up over the group, and are refused where both would be
    wrong (`gradients.py`). In a group of one nothing is replaced.

    `cost` is what the shares are balanced by, the same on every rank: `tower_seconds(profile)` for time,
    `tower_bytes(profile)` for memory; None counts multiply-adds by the configuration. `heartbeat` is the group over
    which parameters are sharded or reduced, where some of its ranks may have a batch without images (`heartbeat.py`).
    `at` None: the functions `get_image_features` and `get_video_features` of the instance, or of a tower alone its
    `forward`.
    Compared are, before each forward, which kinds of images the ranks hold and, before each call, the images: all
    shapes and 64 elements of each tensor. Ranks that differ all raise, at once. One that does not come at all, busy or
    at another call, cannot be told from a slow one: those that wait name it after 10 s and raise after `timeout_s`, by
    default what NCCL's own watchdog waits.
    """
    problems = []
    if exchange not in get_args(Exchange):
        problems.append(f"'{exchange}' is no exchange of image features: choose one of {', '.join(get_args(Exchange))}")
    if rule not in RULES:
        problems.append(f"'{rule}' is not a rule to share images by: choose one of {', '.join(RULES)}")
    if (loss is None) != (reduction is None):
        problems.append("loss and reduction together say how gradients add up: give both, or neither")
    if loss is not None and exchange == "dispatch":
        problems.append(
            "a dispatch changes no sum of gradients over the group, whatever the loss: leave out loss and reduction"
        )
    if problems:
        raise TrimtabError("\n".join(problems))
    num_ranks = dist.get_world_size(group)
    if loss is not None and reduction is not None:
        check_convention(loss, reduction, num_ranks)
    seams = find_seams(model, at)
    cost = cost or tower_flops(seams[0].module.config)
    settings = Settings(exchange=exchange, rule=rule, cost=cost, loss=loss, reduction=reduction)
    waits = partial(open_control, timeout_s=timeout_s)
    return _put_on(model, seams, settings, group or dist.group.WORLD, heartbeat, family, waits)


def vision_heartbeat(model: nn.Module, group: Any = None, *, timeout_s: float = 600.0) -> VisionDataParallel:
    """Only keep ranks without images in step with those that have some; every rank encodes all of its own.

    Use it where parameters are sharded over ranks and some see no images; docs/vision-data-parallel.md names it.
    """
    seams = find_seams(model)
    cost = tower_flops(seams[0].module.config)
    settings = Settings(exchange="gather", rule="balanced", cost=cost, loss=None, reduction=None)
    waits = partial(open_control, timeout_s=timeout_s)
    return _put_on(model, seams, settings, None, group or dist.group.WORLD, None, waits)


def _put_on(
    model: nn.Module,
    seams: tuple[Seam, ...],
    settings: Settings,
    group: Any,
    heartbeat: Any,
    family: Family | None,
    connect: Callable[[Any], Control],
) -> VisionDataParallel:
    """A handle whose images are shared over `group` and whose heartbeat goes over `heartbeat`, either of them or both.

    Ranks of a dispatch, each with images of its own, keep in step over the same group.
    """
    over = group if settings.exchange == "dispatch" else heartbeat
    found = VisionDataParallel(
        model=model,
        group=group,
        control=None,
        settings=settings,
        family=family or find_family(seams[0].module.config, seams[0].original),
        config=seams[0].module.config,
        seams=seams,
        over=over if over is not None and dist.get_world_size(over) > 1 else None,
    )
    if (existing := _find_existing(model, found)) is not None:
        return existing
    if group is not None and dist.get_world_size(group) > 1:
        found.control = connect(group)
    if found.over is not None:
        shared = found.control if settings.exchange == "dispatch" else None
        found.heartbeat = _make_heartbeat(found, shared or connect(found.over))
    found._install()
    return found


def _find_existing(model: nn.Module, wanted: VisionDataParallel) -> VisionDataParallel | None:
    """The handle that is on this model already, where it is the wanted one; raises where it is another."""
    existing = next((held for module in model.modules() if (held := holder_of(module)) is not None), None)
    if existing is None or existing.is_like(wanted):
        return existing
    raise TrimtabError(
        "this model's images are shared already, with another group or other settings: "
        "call remove() of the first handle, or give both calls the same arguments"
    )


def _make_heartbeat(handle: VisionDataParallel, control: Control) -> Heartbeat:
    kinds = tuple(kind for kind in KINDS if any(seam.kind == kind for seam in handle.seams))
    if not kinds:
        raise TrimtabError(
            "ranks without images are kept in step at get_image_features, and this handle is at the tower's forward: "
            "pass the whole model with at='features'"
        )
    return Heartbeat(
        control=control,
        module=handle.seams[0].module,
        kinds=kinds,
        prepare=handle.prepare_missing,
        run=handle.run_missing,
    )


def rows_of_shards(is_image_token: Tensor, shards: Sequence[Tensor | slice]) -> list[IntArray]:
    """For `VisionDataParallel.wanting`: the rows of image features that each rank's part of the sequence reads.

    Use it with `exchange="routed"`, where tokens are divided before they are embedded.

    `is_image_token` is the mask of the whole batch, flattened; `shards[r]` are the positions rank r holds, in order.

    >>> [rows.tolist() for rows in rows_of_shards(torch.tensor([1, 0, 1, 1]) == 1, [slice(0, 2), slice(2, 4)])]
    [[0], [1, 2]]
    """
    mask = is_image_token.reshape(-1).cpu()
    number = torch.cumsum(mask, 0) - 1
    return [number[shard][mask[shard]].numpy() for shard in shards]
