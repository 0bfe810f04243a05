"""A model as a chain of units that a device holds whole, in the orders that a placement may cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimtab.specs import LayerSpec, ModelSpec

_NUMBERED = re.compile(r"\.\d+$")


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that stay together, as positions in `ModelSpec.layers`."""

    layers: tuple[int, ...]

    def __add__(self, other: Unit) -> Unit:
        return Unit(self.layers + other.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The four parts of a vision-language model that arrangements move around."""

    vision: tuple[Unit, ...]  # ViT and projector; one unit where the family allows no cut
    embed: Unit
    blocks: tuple[Unit, ...]
    head: Unit  # with the last norm
    tied: bool  # the head owns no weight: it reads the embedding's


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """An order of all units; a placement cuts it into runs, one a device."""

    name: str
    units: tuple[Unit, ...]


def parts_of(model: ModelSpec) -> Parts:
    """Units between which a device may change: blocks, each with what follows it up to the next one.

    What runs in front of a tower's first block belongs to that, as the projector does to the last one of the ViT.
    Blocks whose results are joined outside of any layer stay together (`joined_cuts`), and so do layers that share a
    weight: the one that borrows it lies with its owner, out of the order of the others.
    """
    joined = model.forbidden_cuts if model.joined_cuts is None else model.joined_cuts
    front = [i for i, x in enumerate(model.layers) if x.tower != "language"]
    language = [i for i, x in enumerate(model.layers) if x.tower == "language"]
    at = [n for n, i in enumerate(language) if _is_block(model.layers[i])] or [len(language)]
    embed, head = language[: at[0]], language[at[-1] + 1 :]
    vision, blocks = _runs(model, front, joined), _runs(model, language[at[0] : at[-1] + 1], joined)
    tied = _reunite(model, [*vision, embed, *blocks, head], embed, head)
    return Parts(
        vision=tuple(Unit(tuple(x)) for x in vision if x),
        embed=Unit(tuple(embed)),
        blocks=tuple(Unit(tuple(x)) for x in blocks if x),
        head=Unit(tuple(head)),
        tied=tied,
    )


def _is_block(layer: LayerSpec) -> bool:
    return layer.kind == "block" and _NUMBERED.search(layer.name) is not None


def _runs(model: ModelSpec, at: Sequence[int], joined: frozenset[int]) -> list[list[int]]:
    """Layers `at` cut in front of every block but the first, where a state that is joined does not stay behind."""
    found: list[list[int]] = []
    has_block = False
    for i in at:
        is_block = _is_block(model.layers[i])
        if not found or (is_block and has_block and not {i, i + 1} & joined):
            found.append([])
        found[-1].append(i)
        has_block = has_block or is_block
    return found


def _reunite(model: ModelSpec, units: Sequence[list[int]], embed: list[int], head: list[int]) -> bool:
    """Moves borrowers of weights to their owners; whether embedding and head, which arrangements join, share one."""
    number = {x.name: i for i, x in enumerate(model.layers)}
    tied = False
    for owner, borrower in model.tied:
        home, away = (next(unit for unit in units if number[name] in unit) for name in (owner, borrower))
        if {id(home), id(away)} == {id(embed), id(head)}:
            tied = True
        elif home is not away:
            away.remove(number[borrower])
            home.append(number[borrower])
    return tied


def arrangements(parts: Parts) -> tuple[Arrangement, ...]:
    """Orders worth cutting: forward; head with the embedding (the only way where they share a weight); head in front
    of the ViT; ViT behind the head, beside either. All but the first two bring activations back once."""
    V, E, L, H = parts.vision, parts.embed, parts.blocks, parts.head
    found = [Arrangement(name="head with embedding", units=(*V, E + H, *L))]
    if not parts.tied:
        found.insert(0, Arrangement(name="forward", units=(*V, E, *L, H)))
        found.append(Arrangement(name="head first", units=(H, *V, E, *L)))
    if V:
        found.append(Arrangement(name="vision last, head with embedding", units=(E + H, *L, *V)))
        if not parts.tied:
            found.append(Arrangement(name="vision last", units=(E, *L, H, *V)))
    return tuple(Arrangement(name=x.name, units=tuple(unit for unit in x.units if unit.layers)) for x in found)


def pipeline_arrangement(parts: Parts) -> Arrangement:
    """The forward order as serving engines cut it into stages: by a number of decoder blocks each, at least one.

    The first stage holds ViT, projector and embedding too, the last one the norm and the head.
    """
    first, *between = parts.blocks or (Unit(()),)
    front = sum(parts.vision, Unit(())) + parts.embed + first
    if not between:
        return Arrangement(name="pipeline", units=(front + parts.head,))
    return Arrangement(name="pipeline", units=(front, *between[:-1], between[-1] + parts.head))


def modules_of(model: ModelSpec, layer: int) -> tuple[str, ...]:
    """Keys of a device map for one layer: what holds only buffers comes with the layer in front of which it runs."""
    return (*model.layers[layer].beside, model.layers[layer].name)


def upwards(name: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it: "a.b", "a", ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def device_changes(devices: Sequence[int | str]) -> list[int]:
    """Positions whose device is another than that of the position before."""
    return [i for i in range(1, len(devices)) if devices[i] != devices[i - 1]]
