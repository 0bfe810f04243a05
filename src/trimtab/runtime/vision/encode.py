"""One call of a vision tower, shared among the ranks of a group: each encodes its part, and rows are exchanged.

`encode_same` is for ranks that hold the same images: all of them get all rows (gather), or each those of its own tokens
where context parallelism has cut the text (route). `encode_own` is for ranks with
images of their own: pixels go out, and the rows of one's own images come back (dispatch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import ImageShares, keep_at_home, share_images
from trimtab.errors import TrimtabError
from trimtab.options import Rule
from trimtab.runtime.vision.agreement import Control, agree_on_inputs, agree_on_rows
from trimtab.runtime.vision.exchange import gather_rows, lay_out_rows, move_rows, route_rows
from trimtab.runtime.vision.hooks import PatchedFunction
from trimtab.runtime.vision.inputs import (
    Family,
    Features,
    VisionInputs,
    VisionPart,
    join_inputs,
    read_features,
    write_features,
)
from trimtab.specs import IntArray

# Images of data-parallel ranks to other ranks, and their features back.
#
# Atoms are numbered rank after rank; every rank learns their sizes, shares them alike, sends its pixels away and gets
# the rows of its own images. The backward sends gradients to whoever encoded; parameters' gradients add up over the
# group to the same sum as before, so the host's reduction over it stays what it was.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """All atoms of the group, and who encodes which."""

    home: IntArray  # (n,) rank that holds the image
    sizes: VisionInputs  # of all n atoms, without their pixels
    shares: ImageShares

    def rows_by_home(self, num_rows: IntArray) -> list[IntArray]:
        """Return the rows each rank wants: those of its own images, which follow one another."""
        owner = np.repeat(self.home, num_rows)
        return [np.flatnonzero(owner == rank) for rank in range(self.shares.num_ranks)]


def pool_images(inputs: Sequence[VisionInputs | None], template: VisionInputs, sharing: Sharing) -> list[Pool]:
    """Decide who encodes what in each of several calls of the tower, in one exchange of sizes; None: no image here."""
    none = _without_pixels(template.take(np.empty(0, np.int64)))
    answers = sharing.control.gather("sizes of images", [none if x is None else _without_pixels(x) for x in inputs])
    if len({(len(calls), *(part.name for call in calls for part in call.parts)) for calls in answers}) > 1:
        raise TrimtabError(
            "ranks call the tower with other tensors, or not equally often: use one processor, equal micro-batches"
        )
    pools = []
    for ranks in zip(*answers, strict=True):
        home = np.repeat(np.arange(len(ranks)), [len(x) for x in ranks])
        sizes = join_inputs(ranks)
        assert sizes is not None
        shares = keep_at_home(share_atoms(sharing, sizes), home, sizes.patches)
        pools.append(Pool(home=home, sizes=sizes, shares=shares))
    return pools


def move_images(
    inputs: VisionInputs | None, template: VisionInputs, pool: Pool, *, rank: int, group: Any
) -> VisionInputs:
    """The atoms that this rank encodes; `template` shows the parts where `inputs` is None."""
    shares, home, sizes = pool.shares, pool.home, pool.sizes
    N = shares.num_ranks
    rank_of = np.empty(len(home), np.int64)
    rank_of[shares.order] = np.repeat(np.arange(N), np.diff(shares.offsets))
    mine = rank_of[home == rank]  # where each of my atoms goes; without any, nothing of the template leaves
    outgoing = np.argsort(mine, kind="stable")
    incoming = shares.atoms_of(rank)
    parts = []
    for own, there in zip((template if inputs is None else inputs).parts, sizes.parts, strict=True):
        sent = np.bincount(mine, there.lengths[home == rank], N).astype(np.int64)
        arriving = np.bincount(home[incoming], there.lengths[incoming], N).astype(np.int64)
        moved = move_rows(own.take(outgoing), sent.tolist(), arriving.tolist(), group)
        parts.append(VisionPart(name=own.name, rows=moved, lengths=there.lengths[incoming]))
    return VisionInputs(
        parts=tuple(parts),
        patches=sizes.patches[incoming],
        entries=np.ones(len(incoming), np.int64),
        rows=None if sizes.rows is None else sizes.rows[incoming],
        fixed=template.fixed,
    )


def _without_pixels(inputs: VisionInputs) -> VisionInputs:
    parts = tuple(VisionPart(name=x.name, rows=torch.empty(0), lengths=x.lengths) for x in inputs.parts)
    return replace(inputs, parts=parts, fixed={})


Exchange = Literal["gather", "dispatch"]
Rows = Callable[[], Sequence[IntArray]]
"""Of the batch at hand the rows of features that each rank's tokens take: `zigzag_rows` makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    exchange: Exchange
    rule: Rule
    cost: LinearCost


@dataclass(slots=True, kw_only=True)
class Load:
    """What this rank encoded since the handle was made."""

    calls: int = 0
    patches: int = 0  # here
    group_patches: int = 0  # by all ranks of the group

    @property
    def share(self) -> float:
        """Return the part of the group's patches that this rank encoded; 1 / N is even."""
        return self.patches / self.group_patches if self.group_patches else 0.0

    def add(self, patches: IntArray, shares: ImageShares, rank: int) -> None:
        self.calls += 1
        self.patches += int(patches[shares.atoms_of(rank)].sum())
        self.group_patches += int(patches.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharing:
    """How one rank takes part in the calls of one tower."""

    group: Any
    control: Control
    settings: Settings
    family: Family
    config: Any
    rows: Rows | None = None  # None: ranks that hold the same images get all rows
    load: Load = field(default_factory=Load)


def encode_shared(
    sharing: Sharing,
    function: PatchedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    template: VisionInputs | None,
) -> Any:
    """Return what the function would have returned, each rank having encoded its share.

    `template` shows what an image looks like where ranks with images of their own have none; None: all have some.
    """
    # 1. Read what was given; the other ranks learn of a problem before it is raised.
    inputs, problem = None, None
    try:
        given = function.bind(args, kwargs)
        given.pop("return_dict", None)
        inputs = sharing.family.read(function.kind, given, sharing.config)
    except Exception as error:
        problem = error
    # 2. Ranks agree: on the images themselves where all hold the same, else on their form.
    is_dispatch = sharing.settings.exchange == "dispatch"
    words = _words(sharing, inputs if is_dispatch else None)
    agree_on_inputs(sharing.control, function.name, words, None if is_dispatch else inputs, problem)
    assert inputs is not None
    # 3. Encode and exchange.
    output = encode_own(sharing, function, inputs, template) if is_dispatch else encode_same(sharing, function, inputs)
    return output.to_tuple() if kwargs.get("return_dict") is False and hasattr(output, "to_tuple") else output


def encode_nothing(sharing: Sharing, function: PatchedFunction, template: VisionInputs) -> Tensor:
    """Take part in a dispatch without an image of one's own: a zero that depends on the tower."""
    agree_on_inputs(sharing.control, function.name, _words(sharing, template), None, None)
    zero: Tensor = encode_own(sharing, function, None, template)
    return zero


def encode_same(sharing: Sharing, function: PatchedFunction, inputs: VisionInputs) -> Any:
    """Encode this rank's share of images that all ranks hold; every rank gets all rows, or those of its tokens."""
    rank = sharing.control.rank
    shares = share_atoms(sharing, inputs)
    own = inputs.take(shares.atoms_of(rank))
    features, num_rows = encode_share(sharing, function, own, inputs, shares)
    sharing.load.add(inputs.patches, shares, rank)
    layout, by_entry = lay_out_rows(shares.order, shares.offsets, num_rows), sum_entries(num_rows, inputs.entries)
    if sharing.rows is None:
        return write_features(features, gather_rows(features.rows, layout, sharing.group), by_entry)
    wanted = [np.asarray(rows, np.int64) for rows in sharing.rows()]
    _check_rows(wanted, len(layout), sharing.control.num_ranks)
    rows = route_rows(features.rows, layout, wanted, sharing.group)
    entry = np.repeat(np.arange(len(by_entry)), by_entry)
    return write_features(features, rows, np.bincount(entry[wanted[rank]], minlength=len(by_entry)))


def _check_rows(wanted: Sequence[IntArray], num_rows: int, num_ranks: int) -> None:
    if len(wanted) != num_ranks or any((np.diff(rows) <= 0).any() for rows in wanted):
        raise TrimtabError(f"rows= gave {len(wanted)} lists for {num_ranks} ranks: give one of each, in order")
    last = max((int(rows[-1]) for rows in wanted if len(rows)), default=-1)
    if last >= num_rows:
        raise TrimtabError(f"rows= asks for row {last} of {num_rows}: give positions of this batch's image tokens")


def encode_own(
    sharing: Sharing, function: PatchedFunction, inputs: VisionInputs | None, template: VisionInputs | None
) -> Any:
    """Encode a share of all ranks' images; this rank gets the rows of its own, without any (None) a zero."""
    control = sharing.control
    if template is None:  # every rank has images: its own show what one looks like
        assert inputs is not None
        template = sharing.family.smallest(inputs, sharing.config)
    own = inputs if inputs is not None and len(inputs) else None
    # 1. Sizes of all images, so that every rank computes the same shares; then pixels go to who encodes them.
    (pool,) = pool_images([own], template, sharing)
    received = move_images(own, template, pool, rank=control.rank, group=sharing.group)
    # 2. This rank's share.
    features, num_rows = encode_share(sharing, function, received, template, pool.shares)
    sharing.load.add(pool.sizes.patches, pool.shares, control.rank)
    # 3. Rows go back to who holds the image.
    layout = lay_out_rows(pool.shares.order, pool.shares.offsets, num_rows)
    rows = route_rows(features.rows, layout, pool.rows_by_home(num_rows), sharing.group)
    if inputs is None:
        return rows.sum()
    return write_features(features, rows, sum_entries(num_rows[pool.home == control.rank], inputs.entries))


def share_atoms(sharing: Sharing, inputs: VisionInputs) -> ImageShares:
    """Return which rank encodes which atom; the same on every rank, without communication."""
    cost = sharing.settings.cost.of(inputs.patches, patches_windowed=inputs.windowed)
    return share_images(cost, sharing.control.num_ranks, rule=sharing.settings.rule)


def run_tower(function: PatchedFunction, inputs: VisionInputs) -> Features:
    return read_features(function.call(inputs.arguments()), inputs)


def run_on_nothing(family: Family, config: Any, function: PatchedFunction, like: VisionInputs) -> Features:
    """Return no row, of the tower run on the smallest input of the kind of `like`.

    Type, device, width, DeepStack layers and whether a gradient flows are then right by construction, and wrappers
    that gather parameters or count uses see the same calls on every rank.
    """
    return run_tower(function, family.smallest(like, config)).without_rows()


def encode_share(
    sharing: Sharing, function: PatchedFunction, own: VisionInputs, like: VisionInputs, shares: ImageShares
) -> tuple[Features, IntArray]:
    """Return the features of this rank's share, and the rows of every atom of `shares`.

    A tower that fails here fails on every rank: the others learn of it instead of waiting.
    """
    features: Features | None = None
    problem: Exception | None = None
    try:
        if len(own):
            features = run_tower(function, own)
        else:
            features = run_on_nothing(sharing.family, sharing.config, function, like)
    except Exception as error:  # the others learn of it, then it is raised
        problem = error
    num_rows = agree_on_rows(sharing.control, function.name, features, shares, problem)
    assert features is not None
    return features, num_rows


def _words(sharing: Sharing, own: VisionInputs | None) -> list[object]:
    """Return what has to be the same on every rank, apart from the images; of the rank's own images, only the form."""
    parts = () if own is None else own.parts
    return [sharing.settings, *((part.name, part.rows.dtype, part.rows.shape[1:]) for part in parts)]


def sum_entries(num_rows: IntArray, entries: IntArray) -> IntArray:
    """Return the rows of each entry, from those of its atoms; an entry may have none."""
    ends = np.concatenate([[0], np.cumsum(num_rows)])
    last = np.cumsum(entries)
    return np.asarray(ends[last] - ends[last - entries], np.int64)
