"""A model's forward as steps over named tensors: what each layer reads and writes decides what crosses a cut.

A `Flow` lists one step per layer, in forward order. Everything else is derived: which tensors are alive at a cut (a
tensor written before it and read behind it), which of them carry a gradient, and which layers compute something that
nothing reads. Micro-batches without images run the language steps alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

LOGITS = "logits"
ENCODED = "encoded_images"
"""Key of a batch whose images were encoded already: by name, the tensors that the text reads of them."""
PIXELS = ("pixel_values", "pixel_values_videos")
"""Keys of a batch that one layer alone reads, the first; they stay where they are until it does."""
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Sealed:
    """A batch that torch's schedules do not look into: they would search its tensors for gradients."""

    batch: Batch


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One micro-batch in one stage."""

    model: Any  # the whole model, with `Elsewhere` for the layers of other stages
    batch: Batch
    notes: dict[str, Any] = field(default_factory=dict)  # what steps of this stage share: positions, window indices


StepFunction = Callable[..., Tensor]
"""(layer, run, *tensors read) -> tensor written; a tensor that does not exist without images comes as None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One layer: its module path, what it reads and what its result is called.

    `run` None: a block of the language model. Those of a stage run together, through the text model's own forward.
    """

    layer: str
    part: Literal["images", "text"]  # "images": skipped where a micro-batch has none
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...]
    run: StepFunction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One tensor across a cut, for one micro-batch."""

    name: str
    shape: Shape
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """The forward of one model."""

    steps: tuple[Step, ...]
    shapes: Callable[[Batch], Shapes]  # of every tensor that can cross a cut

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(step.layer for step in self.steps)


def has_images(batch: Batch) -> bool:
    return any(batch.get(key) is not None and len(batch[key]) for key in PIXELS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cuts:
    """What crosses each cut of a flow; cut c lies in front of step c. Made by `find_cuts`, the same on every rank."""

    flow: Flow
    alive: Mapping[bool, tuple[tuple[str, ...], ...]]  # with images?: names at each cut
    graded: Mapping[bool, tuple[frozenset[str], ...]]  # with images?: those of them that carry a gradient
    read: frozenset[str]  # layers whose result reaches the logits

    @property
    def num_image_steps(self) -> int:
        """They come first."""
        return sum(step.part == "images" for step in self.flow.steps)

    @property
    def written_by_images(self) -> tuple[str, ...]:
        """What the text reads of images: features, and those of DeepStack layers."""
        return self.alive[True][self.num_image_steps]

    def wires(self, cut: int, batch: Batch) -> tuple[Wire, ...]:
        """Tensors that cross the cut for this micro-batch; none in front of the first step and behind the last."""
        images = has_images(batch)
        names, graded = self.alive[images][cut], self.graded[images][cut]
        shapes = self.flow.shapes(batch) if names else {}
        return tuple(Wire(name=name, shape=shapes[name], requires_grad=name in graded) for name in names)


def find_cuts(flow: Flow, model: nn.Module) -> Cuts:
    """Runs through the flow backwards for what is read, and forwards for what a trained parameter lies in front of."""
    trained = {
        step.layer: any(p.requires_grad for p in model.get_submodule(step.layer).parameters()) for step in flow.steps
    }
    alive, graded = {}, {}
    for images in (False, True):
        alive[images], graded[images] = _follow(flow, trained, images=images)
    return Cuts(flow=flow, alive=alive, graded=graded, read=_read_layers(flow))


def _follow(
    flow: Flow, trained: Mapping[str, bool], *, images: bool
) -> tuple[tuple[tuple[str, ...], ...], tuple[frozenset[str], ...]]:
    """Names alive at each cut, and those of them that carry a gradient."""
    runs = [step for step in flow.steps if images or step.part == "text"]
    ever_written = {name for step in runs for name in step.writes}
    needed = [{LOGITS}]
    for step in reversed(flow.steps):
        behind = needed[-1]
        if step in runs and behind & set(step.writes):
            needed.append((behind - set(step.writes)) | (set(step.reads) & ever_written))
        else:
            needed.append(behind)
    needed.reverse()
    gradient: dict[str, bool] = {}
    written: list[str] = []
    names: list[tuple[str, ...]] = [()]
    graded: list[frozenset[str]] = [frozenset()]
    for cut, step in enumerate(flow.steps, 1):
        if step in runs:
            carries = trained[step.layer] or any(gradient.get(name, False) for name in step.reads)
            for name in step.writes:
                gradient[name] = carries
                if name not in written:
                    written.append(name)
        crossing = tuple(name for name in written if name in needed[cut]) if cut < len(flow.steps) else ()
        names.append(crossing)
        graded.append(frozenset(name for name in crossing if gradient[name]))
    return tuple(names), tuple(graded)


def _read_layers(flow: Flow) -> frozenset[str]:
    needed, read = {LOGITS}, set()
    for step in reversed(flow.steps):
        if needed & set(step.writes):
            needed = (needed - set(step.writes)) | set(step.reads)
            read.add(step.layer)
    return frozenset(read)
