"""The handle that stands in for a model's image functions on one rank."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import ImageShares, share_images
from trimtab.errors import TrimtabError
from trimtab.options import Rule
from trimtab.runtime.vision.agree import agree_on_inputs, agree_on_kinds, agree_on_rows
from trimtab.runtime.vision.control import Control
from trimtab.runtime.vision.dispatch import move_images, pool_images
from trimtab.runtime.vision.exchange import RowLayout, gather_rows, lay_out_rows, route_rows
from trimtab.runtime.vision.families import PIXELS, Family, Kind
from trimtab.runtime.vision.gradients import Loss, Reduction, sum_in_place
from trimtab.runtime.vision.heartbeat import KINDS, Heartbeat
from trimtab.runtime.vision.inputs import VisionInputs
from trimtab.runtime.vision.outputs import Features, read_features, touch, write_features
from trimtab.runtime.vision.seams import Hook, Seam, StandIn, given_by_name
from trimtab.specs import IntArray

Exchange = Literal["gather", "routed", "dispatch"]
_TEXT = ("language_model", "lm_head", "text_model", "embed_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    exchange: Exchange
    rule: Rule
    cost: LinearCost
    loss: Loss | None
    reduction: Reduction | None


@dataclass(slots=True, kw_only=True)
class Load:
    """What this rank encoded since the handle was made."""

    calls: int = 0
    patches: int = 0  # here
    group_patches: int = 0  # by all ranks of the group

    @property
    def share(self) -> float:
        """Part of the group's patches that this rank encoded; 1 / N is even."""
        return self.patches / self.group_patches if self.group_patches else 0.0

    def add(self, patches: IntArray, shares: ImageShares, rank: int) -> None:
        self.calls += 1
        self.patches += int(patches[shares.atoms_of(rank)].sum())
        self.group_patches += int(patches.sum())


@dataclass(slots=True, kw_only=True, eq=False)
class VisionDataParallel:
    """Holds the replaced functions of one model; `remove()` or leaving the `with` block puts them back."""

    model: nn.Module
    group: Any  # None: a heartbeat and no exchange
    control: Control | None  # None: a group of one, or none
    settings: Settings
    family: Family
    config: Any
    seams: tuple[Seam, ...]
    load: Load = field(default_factory=Load)
    over: Any = None  # group of the heartbeat
    heartbeat: Heartbeat | None = None
    _hooks: list[Any] = field(default_factory=list)
    _templates: dict[Kind, VisionInputs] = field(default_factory=dict)
    _inside: bool = False
    _paused: bool = False
    _wanted: Mapping[Kind, Sequence[IntArray]] = field(default_factory=dict)
    _installed: bool = False

    @property
    def num_ranks(self) -> int:
        return 1 if self.control is None else self.control.num_ranks

    def __enter__(self) -> VisionDataParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _install(self) -> None:
        """Replace the functions, once; a group of one without a heartbeat replaces nothing."""
        if self.control is None and self.heartbeat is None:
            return
        for seam in self.seams:
            seam.put(StandIn(seam, self, self.encode))
        if self.settings.exchange != "dispatch" and self.control is not None:
            self._hooks += [
                m.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True) for m in self._takes_pixels()
            ]
        if self.heartbeat is not None:
            self.heartbeat.install()
        self._installed = True

    def remove(self) -> None:
        """Put the module's own functions back, end the connections; harmless when that was done already."""
        if not self._installed:
            return
        for seam in self.seams:
            seam.put_back()
        while self._hooks:
            self._hooks.pop().remove()
        if self.heartbeat is not None:
            self.heartbeat.remove()
            self.heartbeat.control.close()
        if self.control is not None:
            self.control.close()
        self._installed = False

    def is_like(self, other: VisionDataParallel) -> bool:
        """Made with the same arguments."""
        return (
            (self.settings, self.family) == (other.settings, other.family)
            and (self.group is other.group and self.over is other.over)
            and [(seam.module, seam.name) for seam in self.seams] == [(seam.module, seam.name) for seam in other.seams]
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Every rank encodes all images it holds, as without the handle; a heartbeat goes on."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """Calls of the replaced functions from here on are our own."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextlib.contextmanager
    def wanting(
        self, *, image: Sequence[IntArray] | None = None, video: Sequence[IntArray] | None = None
    ) -> Iterator[None]:
        """For exchange "routed": rows of the batch that each rank needs, by rank; see `rows_of_shards`.

        Inside, a call returns this rank's rows as one piece.
        """
        if self.settings.exchange != "routed":
            raise TrimtabError(
                f"wanting() says which rows each rank needs, and the exchange is '{self.settings.exchange}': "
                f"make the handle with exchange='routed'"
            )
        given: dict[Kind, Sequence[IntArray] | None] = {"image": image, "video": video, "tower": image}
        for rows in given.values():
            if rows is not None and len(rows) != self.num_ranks:
                raise TrimtabError(
                    f"rows for {len(rows)} ranks were given, and the group has {self.num_ranks}: give one list a rank"
                )
        self._wanted = {kind: rows for kind, rows in given.items() if rows is not None}
        try:
            yield
        finally:
            self._wanted = {}

    def reduce_gradients(self) -> None:
        """For `reduction="none"`: the mean over the group of the vision parameters' gradients, in place."""
        if self.settings.reduction != "none":
            raise TrimtabError(
                "the host reduces gradients over the group already, and doing it twice changes them: "
                "make the handle with reduction='none' where it leaves replicated parameters alone"
            )
        if self.control is None:
            return
        trained = [p for p in self.vision_parameters() if p.requires_grad]
        if self.load.calls and trained and all(p.grad is None for p in trained):
            raise TrimtabError(
                "gradients were to be averaged over the group, and no vision parameter has one: call this after the "
                "backward and before they are cleared, and let a host that keeps them elsewhere (Megatron's main_grad) "
                "average them itself, with reduction='mean'"
            )
        gradients = [p.grad for p in trained if p.grad is not None]
        sum_in_place(gradients, self.group)  # N times those of one process: every rank has the whole loss (kappa = N)
        for gradient in gradients:
            gradient /= self.num_ranks

    def vision_parameters(self) -> list[nn.Parameter]:
        """All of the module that are not its language model's: the tower and what follows it up to the features."""
        module = self.seams[0].module
        children = [child for name in _TEXT if isinstance(child := getattr(module, name, None), nn.Module)]
        text = {id(p) for child in children for p in child.parameters()}
        return [p for p in module.parameters() if id(p) not in text]

    # -- one call ---------------------------------------------------------------------------------------------------

    def encode(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What stands in for the replaced function."""
        if self._inside:
            return seam.original(*args, **kwargs)
        if self.control is None or self._paused:  # a heartbeat alone, if anything
            with self._within():
                output = seam.original(*args, **kwargs)
            return self._after(seam, output)
        as_tuple = kwargs.get("return_dict") is False
        inputs, problem = self._read(seam, args, kwargs)
        own, shared = (inputs, None) if self.settings.exchange == "dispatch" else (None, inputs)
        agree_on_inputs(self.control, seam.name, self._words(seam, own), shared, problem)
        assert inputs is not None
        if self.settings.exchange == "dispatch":
            output = self._encode_dispatched(seam, inputs)
        else:
            output = self._encode_shared(seam, inputs, self.control)
        output = self._after(seam, output)
        return output.to_tuple() if as_tuple and hasattr(output, "to_tuple") else output

    def share(self, inputs: VisionInputs) -> ImageShares:
        """Which rank encodes which atom; the same on every rank, without communication."""
        cost = self.settings.cost.of(inputs.patches, patches_windowed=inputs.windowed)
        return share_images(cost, self.num_ranks, rule=self.settings.rule)

    def _read(
        self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[VisionInputs | None, Exception | None]:
        """A problem is told to the others before it is raised."""
        try:
            given = seam.bind(args, kwargs)
            given.pop("return_dict", None)
            if self.settings.exchange == "routed" and seam.kind not in self._wanted:
                raise TrimtabError(
                    f"the routed exchange was not told which {seam.kind} rows each rank needs: "
                    f"call the model inside `with handle.wanting({seam.kind}=rows_of_shards(...)):`"
                )
            return self.family.read(seam.kind, given, self.config), None
        except Exception as problem:
            return None, problem

    def _words(self, seam: Seam, own: VisionInputs | None = None) -> list[object]:
        """What has to be the same on every rank, beside the images; of the rank's own images, only the form."""
        parts = () if own is None else own.parts
        form = [(part.name, part.rows.dtype, part.rows.shape[1:]) for part in parts]
        return [self.settings, *form, *(rows.tolist() for rows in self._wanted.get(seam.kind, ()))]

    def _takes_pixels(self) -> list[nn.Module]:
        """The module whose forward says what images there are: the model itself, where the seam is at its tower."""
        if self.seams[0].kind != "tower":
            return [self.seams[0].module]
        return [self.model] if PIXELS["image"] in inspect.signature(self.model.forward).parameters else []

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside or self._paused:
            return
        assert self.control is not None
        given = given_by_name(module, args, kwargs)
        agree_on_kinds(self.control, [kind for kind in KINDS if given.get(PIXELS[kind]) is not None], KINDS)

    def _encode_shared(self, seam: Seam, inputs: VisionInputs, control: Control) -> Any:
        """Gather and routed: every rank holds the same images."""
        shares = self.share(inputs)
        features, num_rows = self._encode_own(seam, inputs.take(shares.atoms_of(control.rank)), inputs, shares, control)
        layout = lay_out_rows(shares.order, shares.offsets, num_rows)
        self.load.add(inputs.patches, shares, control.rank)
        is_routed = self.settings.exchange == "routed"
        if is_routed:
            rows = route_rows(features.rows, layout, self._find_wanted(seam, layout), self.group)
        else:
            rows = gather_rows(features.rows, layout, self.group)
        entries = num_rows if is_routed else _sum_entries(num_rows, inputs.entries)
        return write_features(features, rows, entries, whole=not is_routed)

    def _encode_dispatched(self, seam: Seam, inputs: VisionInputs | None) -> Any:
        """Every rank holds images of its own; one without (None) takes part and gets a zero that depends on it."""
        control, template = self.control, self._templates.pop(seam.kind, None)
        assert control is not None
        if template is None:  # every rank has images: its own show what one looks like
            assert inputs is not None
            template = self.family.smallest(inputs, self.config)
        own = inputs if inputs is not None and len(inputs) else None
        (pool,) = pool_images([own], template, control=control, cost=self.settings.cost, rule=self.settings.rule)
        received = move_images(own, template, pool, rank=control.rank, group=self.group)
        features, num_rows = self._encode_own(seam, received, template, pool.shares, control)
        layout = lay_out_rows(pool.shares.order, pool.shares.offsets, num_rows)
        self.load.add(pool.sizes.patches, pool.shares, control.rank)
        rows = route_rows(features.rows, layout, pool.rows_by_home(num_rows), self.group)
        if inputs is None:
            return rows.sum()
        return write_features(features, rows, _sum_entries(num_rows[pool.home == control.rank], inputs.entries))

    def _encode_own(
        self, seam: Seam, own: VisionInputs, like: VisionInputs, shares: ImageShares, control: Control
    ) -> tuple[Features, IntArray]:
        """Features of this rank's share, and the rows of every atom of `shares`.

        A tower that fails here fails on every rank: the others learn of it instead of waiting.
        """
        features: Features | None = None
        problem: Exception | None = None
        try:
            features = self._run_tower(seam, own) if len(own) else self._run_on_nothing(seam, like)
        except Exception as error:  # told to the others, then raised
            problem = error
        num_rows = agree_on_rows(control, seam.name, features, shares, problem)
        assert features is not None
        return features, num_rows

    def _run_tower(self, seam: Seam, inputs: VisionInputs) -> Features:
        with self._within():  # videos encoded as images pass a second seam
            output = seam.call(inputs.arguments())
        return read_features(output, inputs)

    def _run_on_nothing(self, seam: Seam, like: VisionInputs) -> Features:
        """No row, of the tower run on the smallest input of the kind of `like`.

        Type, device, width, DeepStack layers and whether a gradient flows are then right by construction, and wrappers
        that gather parameters or count uses see the same calls on every rank.
        """
        features = self._run_tower(seam, self.family.smallest(like, self.config))
        return replace(features, rows=features.rows[:0], num_rows=np.zeros(0, np.int64))

    def _find_wanted(self, seam: Seam, layout: RowLayout) -> list[IntArray]:
        wanted = self._wanted[seam.kind]
        for rank, rows in enumerate(wanted):
            if len(rows) and (rows.min() < 0 or rows.max() >= len(layout)):
                raise TrimtabError(
                    f"rank {rank} wants row {int(rows.max())} and the images have {len(layout)} rows: "
                    f"count rows over the whole batch, from 0 in the order of the image tokens"
                )
        return list(wanted)

    # -- ranks without images ---------------------------------------------------------------------------------------

    def prepare_missing(self, kind: Kind, given: dict[str, Any] | None, source: int) -> None:
        """Every rank of the heartbeat learns what the smallest image of rank `source` is."""
        assert self.heartbeat is not None
        control, seam, smallest = self.heartbeat.control, self._seam(kind), None
        if control.rank == source:
            assert given is not None
            known = {name: value for name, value in given.items() if name in seam.signature.parameters}
            read = self.family.read(kind, known, self.config)
            smallest = self.family.smallest(read, self.config).to(torch.device("cpu"))
        template = control.send(smallest, source, "the smallest image")
        if given is None or self.settings.exchange == "dispatch":
            self._templates[kind] = template.to(next(seam.module.parameters()).device)

    def run_missing(self, kind: Kind) -> Tensor:
        """Take part in a call of the tower without an image of one's own: a zero that depends on it."""
        seam = self._seam(kind)
        if self.settings.exchange == "dispatch" and not self._paused:
            assert self.control is not None
            agree_on_inputs(self.control, seam.name, self._words(seam, self._templates[kind]), None, None)
            zero: Tensor = self._encode_dispatched(seam, None)
            return zero
        return self._run_on_nothing(seam, self._templates.pop(kind)).rows.sum()

    def _after(self, seam: Seam, output: Any) -> Any:
        """What other ranks encode next and this one lacks, run now: the order of calls is the same on every rank."""
        zero = self.heartbeat.run_missing(seam.kind) if self.heartbeat is not None else None
        return output if zero is None else touch(output, zero)

    def _seam(self, kind: Kind) -> Seam:
        return next(seam for seam in self.seams if seam.kind == kind)


def _sum_entries(num_rows: IntArray, entries: IntArray) -> IntArray:
    """Rows of each entry, from those of its atoms; an entry may have none."""
    ends = np.concatenate([[0], np.cumsum(num_rows)])
    last = np.cumsum(entries)
    return np.asarray(ends[last] - ends[last - entries], np.int64)
