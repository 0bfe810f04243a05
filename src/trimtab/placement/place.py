"""Which device holds which module when a model serves: exact where everything fits on the GPUs, cheapest spill else."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.errors import PartitionError, refuse_type
from trimtab.models.families import family_of
from trimtab.placement.bytes import (
    Arrangement,
    DeviceKey,
    InferenceTable,
    Parts,
    arrangements,
    inference_table,
    parts_of,
    pipeline_arrangement,
    run_bytes,
)
from trimtab.placement.machine import Machine, Workload
from trimtab.placement.placed import Objective, Placement, summarize
from trimtab.specs import FloatArray, IntArray, LayerSpec, ModelSpec
from trimtab.units import GIB, format_bytes

MAX_STATES = 4096  # multisets of devices in use: 12 unlike ones, or any number of alike ones


@dataclass(frozen=True, slots=True)
class Piece:
    """Units `start <= i < stop` on device `device` of the machine."""

    start: int
    stop: int
    device: int


@dataclass(frozen=True, slots=True)
class _Step:
    before: int  # states: which devices are used
    device_class: int
    after: int
    device: int  # of the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Ways to take one device after the other, as steps between states in an order that never goes back."""

    num_states: int
    steps: tuple[_Step, ...]
    num_used: tuple[int, ...]  # devices in use in each state


def choices_of(classes: Sequence[int]) -> Choices:
    """Return all orders of devices, device i being of class `classes[i]`; past `MAX_STATES` only the order given."""
    members = [[i for i, c in enumerate(classes) if c == k] for k in range(max(classes) + 1)]
    sizes = [len(m) + 1 for m in members]
    if np.prod(np.array(sizes, dtype=np.float64)) > MAX_STATES:
        steps = tuple(_Step(i, c, j + 1, j) for i in range(len(classes)) for j, c in enumerate(classes[i:], start=i))
        return Choices(num_states=len(classes) + 1, steps=steps, num_used=tuple(range(len(classes) + 1)))
    states = list(itertools.product(*(range(size) for size in sizes)))  # lexicographic: a larger multiset comes later
    index = {state: i for i, state in enumerate(states)}
    found = []
    for state in states:
        for k, used in enumerate(state):
            if used < len(members[k]):
                after = (*state[:k], used + 1, *state[k + 1 :])
                found.append(_Step(index[state], k, index[after], members[k][used]))
    return Choices(num_states=len(states), steps=tuple(found), num_used=tuple(sum(state) for state in states))


def smallest_fullest(fraction: FloatArray, choices: Choices, *, below: float = np.inf) -> float:
    """The least value that the fullest device can have, exactly; `below` itself if none is lower.

    The answer is one of the fractions. For a bound every state's longest reach is found by extending greedily, which
    is right because a run that starts later, or ends earlier, never takes more.
    """
    n = fraction.shape[1] - 1
    upper = np.triu_indices(n + 1, k=1)
    values = np.unique(fraction[:, upper[0], upper[1]])
    values = values[values < below]
    rows = [[row.tolist() for row in matrix] for matrix in fraction]
    least = bisect_left(values, True, key=lambda bound: _reaches_end(rows, choices, float(bound), n))
    return float(values[least]) if least < len(values) else below


def _reaches_end(rows: list[list[list[float]]], choices: Choices, bound: float, n: int) -> bool:
    reach = [0] * choices.num_states
    for step in choices.steps:
        start = reach[step.before]
        stop = bisect_right(rows[step.device_class][start], bound, lo=start) - 1
        if stop >= n:
            return True
        reach[step.after] = max(reach[step.after], stop)
    return False


def least_sum(cost: FloatArray, choices: Choices, *, num_devices: int | None = None) -> tuple[float, tuple[Piece, ...]]:
    """Runs whose costs (infinite where a run does not fit) add up to the least sum, exactly; no runs if none fit.

    `num_devices`: exactly so many devices. Every (state, cut) pair once: states x classes x n^2.
    """
    n = cost.shape[1] - 1
    best = np.full((choices.num_states, n + 1), np.inf)
    came: list[list[tuple[int, _Step] | None]] = [[None] * (n + 1) for _ in range(choices.num_states)]
    best[0, 0] = 0.0
    for step in choices.steps:
        if num_devices is not None and choices.num_used[step.after] > num_devices:
            continue
        sums = best[step.before][:, None] + cost[step.device_class]
        start = sums.argmin(axis=0)
        value = sums[start, np.arange(n + 1)]
        for stop in np.flatnonzero(value < best[step.after]).tolist():
            best[step.after, stop] = value[stop]
            came[step.after][stop] = (int(start[stop]), step)
    ends = [
        state for state in range(choices.num_states) if num_devices is None or choices.num_used[state] == num_devices
    ]
    last = min(ends, key=lambda state: (best[state, n], choices.num_used[state]), default=0)
    total = float(best[last, n])
    if not np.isfinite(total):
        return total, ()
    runs: list[Piece] = []
    state, stop = last, n
    while (step_in := came[state][stop]) is not None:
        start_at, step = step_in
        runs.append(Piece(start_at, stop, step.device))
        state, stop = step.before, start_at
    return total, tuple(reversed(runs))


ROOMY = 0.8  # GPUs that are filled to this leave room for what is not counted and for a longer prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """One arrangement, cut."""

    arrangement: Arrangement
    runs: tuple[Piece, ...]


def place(model: ModelSpec, machine: Machine, workload: Workload, *, objective: Objective = "memory") -> Placement:
    """The device map of `model` on `machine` that lets `workload` run.

    Use this to spread a model over GPUs for inference, as `trimtab map` does; `load_placed` loads what it returns.

    memory: the fullest device's share of its capacity is the least of all maps that cut one of `chain.arrangements`
    into consecutive runs, one a device, devices in any order (past 12 unlike devices in the order given): exact.
    Among those maps the sum of squared shares is the least. latency: of the maps that fit, one with the fewest
    devices; among these the least time of reading weights where all speeds are known, else the least fullest share.
    pipeline: as memory, over the maps that serving engines run as pipeline stages (`chain.pipeline_arrangement`);
    nothing spills there.
    Where nothing fits, weights spill in the order of bytes moved per request for each byte freed: the embedding, run
    in host memory row by row; the ViT, copied once; decoder blocks and at last the head, copied for every token.
    Then layers come back, the most expensive first, as long as all still fits. Host memory is filled first, then disk.
    `PartitionError` says how much is missing and what would do where even that does not fit.

    >>> from trimtab import describe
    >>> from trimtab.placement import Workload, parse_machine
    >>> placement = place(describe("Qwen2.5-VL-7B"), parse_machine("2x24GiB"), Workload(batch=1, seq_len=4096))
    >>> sorted(set(placement.device_map.values()))
    [0, 1]
    """
    refuse_type("model", model, ModelSpec, "describe(name or folder)")
    refuse_type("machine", machine, Machine, 'parse_machine("2x24GiB")')
    refuse_type("workload", workload, Workload, "Workload(batch=1)")
    table = inference_table(model, workload)
    parts = parts_of(model)
    if objective == "pipeline":
        return _place_stages(model, machine, table, parts)
    spills = order_spills(model, parts, table, cpu_bytes=machine.cpu_bytes)
    search = _Search.of(arrangements(parts), machine, table, spills.by_rows)
    cut = search.cut((), objective)
    if cut is not None:
        return _assemble(model, machine, table, cut, spilled={}, objective=objective)
    found = _spill(search, spills, objective) if machine.cpu_bytes or machine.disk else None
    if found is None:
        raise PartitionError(_explain(model, machine, workload, search))
    cut, gone = found
    homes = _homes(model, spills, gone, machine, table)
    if homes is None:
        raise PartitionError(_explain(model, machine, workload, search))
    return _assemble(model, machine, table, cut, spilled=homes, objective=objective, by_rows=spills.by_rows)


def _place_stages(model: ModelSpec, machine: Machine, table: InferenceTable, parts: Parts) -> Placement:
    """Return the stages of an engine: each keeps a copy of a tied weight that it reads."""
    if parts.tied:
        owner = sum(int(table.weights[i]) for i in parts.embed.layers)
        copied = table.weights.copy()
        copied[parts.head.layers[-1]] = owner
        table = replace(table, weights=copied)
    search = _Search.of((pipeline_arrangement(parts),), machine, table, frozenset())
    cut = search.cut((), "memory")
    if cut is None:
        share, _ = search.fullest(())
        raise PartitionError(
            f"stages of {model.name} fill a GPU to {100 * share:.0f} %: give larger GPUs, or leave out --for pipeline"
        )
    return _assemble(model, machine, table, cut, spilled={}, objective="pipeline")


# -- search ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Search:
    """What stays the same whatever spills."""

    options: tuple[Arrangement, ...]
    table: InferenceTable
    context_bytes: int
    capacities: tuple[int, ...]  # of each class of devices
    speeds: tuple[float | None, ...]  # of each class
    choices: Choices
    by_rows: frozenset[int]  # layers that run in host memory if they spill

    @staticmethod
    def of(
        options: tuple[Arrangement, ...], machine: Machine, table: InferenceTable, by_rows: frozenset[int]
    ) -> _Search:
        kinds = sorted({(gpu.free_bytes, gpu.memory_bytes_per_s or 0.0) for gpu in machine.gpus}, reverse=True)
        classes = [kinds.index((gpu.free_bytes, gpu.memory_bytes_per_s or 0.0)) for gpu in machine.gpus]
        return _Search(
            options=options,
            table=table,
            context_bytes=machine.context_bytes,
            capacities=tuple(int(free * (1 - machine.kept_share)) for free, _ in kinds),
            speeds=tuple(speed or None for _, speed in kinds),
            choices=choices_of(classes),
            by_rows=by_rows,
        )

    def shares(self, option: Arrangement, spilled: Sequence[int]) -> FloatArray:
        """Return (classes, n + 1, n + 1): of a device of each class, what each run of units takes."""
        on_cpu = self.by_rows.intersection(spilled)
        total = run_bytes(self.table, option.units, self.context_bytes, spilled=spilled, on_cpu=on_cpu)
        return np.stack([np.where(total > 0, total / free if free else np.inf, 0.0) for free in self.capacities])

    def fullest(self, spilled: Sequence[int]) -> tuple[float, Arrangement | None]:
        """The least fullest share over all arrangements; the first arrangement of those that reach it."""
        below, best = np.inf, None
        for option in self.options:
            value = smallest_fullest(self.shares(option, spilled), self.choices, below=below)
            if value < below:
                below, best = value, option
        return below, best

    def cut(self, spilled: Sequence[int], objective: Objective) -> _Cut | None:
        """The best map in which every device keeps within its capacity; None if there is none."""
        value, best = self.fullest(spilled)
        if best is None or value > 1:
            return None
        if objective == "latency":
            return self._fewest(spilled)
        shares = self.shares(best, spilled)
        _, runs = least_sum(_where_fits(shares, shares * shares, value), self.choices)
        return _Cut(arrangement=best, runs=runs)

    def _fewest(self, spilled: Sequence[int]) -> _Cut:
        """Take the fewest devices and so fewest crossings, then time or fullest share."""
        timed = None not in self.speeds and len(set(self.speeds)) > 1
        found: list[tuple[int, float, float, _Cut]] = []
        for option in self.options:
            shares = self.shares(option, spilled)
            ones = _where_fits(shares, np.ones_like(shares), 1.0)
            num, runs = least_sum(ones, self.choices)
            if not runs:
                continue
            count, seconds = round(num), 0.0
            if timed:
                touched = [self.table.touched[list(unit.layers)].sum() for unit in option.units]
                before = np.concatenate([[0.0], np.cumsum(touched, dtype=np.float64)])
                reads = before[None, :] - before[:, None]
                times = np.stack([reads / speed for speed in self.speeds if speed is not None])
                seconds, runs = least_sum(_where_fits(shares, times, 1.0), self.choices, num_devices=count)
            else:
                runs = _evenest(shares, self.choices, count)
            fullest = max(float(shares[self._class(run), run.start, run.stop]) for run in runs)
            crossings = len(runs) - 1 + (option.name != "forward" and len(runs) > 1)
            found.append((crossings, seconds, fullest, _Cut(arrangement=option, runs=runs)))
        return min(found, key=lambda x: x[:3])[3]

    def _class(self, run: Piece) -> int:
        return next(step.device_class for step in self.choices.steps if step.device == run.device)


def _where_fits(shares: FloatArray, cost: FloatArray, bound: float) -> FloatArray:
    """Return the costs of runs that are not empty and keep within `bound`, infinite elsewhere."""
    return np.where((shares > 0) & (shares <= bound), cost, np.inf)


def _evenest(shares: FloatArray, choices: Choices, num_devices: int) -> tuple[Piece, ...]:
    """The least fullest share with exactly `num_devices`, by bisection over the shares themselves."""
    values = np.unique(shares[(shares > 0) & (shares <= 1)])

    def runs_within(bound: float) -> tuple[Piece, ...]:
        return least_sum(_where_fits(shares, shares * shares, bound), choices, num_devices=num_devices)[1]

    # the largest value is known to be enough
    least = bisect_left(values[:-1], True, key=lambda bound: bool(runs_within(float(bound))))
    return runs_within(float(values[least]))


# -- spill ----------------------------------------------------------------------------------------------------------


def _spill(search: _Search, spills: Spills, objective: Objective) -> tuple[_Cut, tuple[int, ...]] | None:
    """The shortest beginning of the spills that lets the rest fit, then without those that can stay after all."""

    def fits(gone: Sequence[int]) -> bool:
        return search.fullest(gone)[0] <= 1

    order = spills.layers
    if not order or not fits(order):
        return None
    shortest = 1 + bisect_left(range(1, len(order)), True, key=lambda length: fits(order[:length]))
    gone, needed = list(order[:shortest]), set()
    for layer in sorted(gone, key=lambda i: (-spills.moved_bytes[i], i)):
        kind = (int(spills.moved_bytes[layer]), int(search.table.weights[layer]))
        without = [i for i in gone if i != layer]
        if kind not in needed and fits(without):
            gone = without
        else:
            needed.add(kind)
    cut = search.cut(gone, objective)
    assert cut is not None
    return cut, tuple(gone)


def _homes(
    model: ModelSpec, spills: Spills, gone: Sequence[int], machine: Machine, table: InferenceTable
) -> dict[int, str] | None:
    """Use host memory for what moves most, disk for the rest; what runs in host memory must lie there. None: no room.

    Layers that share a weight with one that goes, go with it.
    """
    left = machine.cpu_bytes
    homes: dict[int, str] = {}
    for layer in sorted(gone, key=lambda i: (i not in spills.by_rows, -int(spills.moved_bytes[i]), i)):
        together = [i for i in with_borrowers(model, layer) if i not in homes]
        size = sum(int(table.weights[i]) for i in together)
        if size > left and not machine.disk:
            return None
        homes.update(dict.fromkeys(together, "cpu" if size <= left else "disk"))
        left -= size if size <= left else 0
    return homes


def _explain(model: ModelSpec, machine: Machine, workload: Workload, search: _Search) -> str:
    """Return what is missing, and what would do."""
    num = len(machine.gpus)
    sizes = format_bytes(sum(gpu.free_bytes for gpu in machine.gpus))
    gpus = f"one GPU of {sizes}" if num == 1 else f"{num} GPUs of {sizes} together"
    host = f" with {format_bytes(machine.cpu_bytes)} of host memory" if machine.cpu_bytes else ""
    asked = (
        f"{model.name} does not fit {gpus}{host} (batch {workload.batch}, {workload.seq_len} tokens of text, "
        f"{len(workload.images)} images, {workload.max_new_tokens} new tokens)"
    )
    fullest, _ = search.fullest(())
    if not np.isfinite(fullest):
        return f"{asked}: no GPU has memory free; free some or name other GPUs"
    larger = f"{np.ceil(100 * fullest) / 100:.2f} times the memory on each GPU"
    parts = parts_of(model)
    spills = order_spills(model, parts, search.table, cpu_bytes=_ANY)
    roomy = replace(search, by_rows=spills.by_rows)
    found = _spill(roomy, spills, "memory")
    if found is None:
        share = roomy.fullest(spills.layers)[0]
        return (
            f"{asked}: with all weights elsewhere, KV cache, activations and one layer at a time still fill the "
            f"fullest GPU to {100 * share:.0f} %; enough would be: {larger}"
        )
    needed = sum(int(search.table.weights[i]) for i in found[1])
    missing = max(needed - machine.cpu_bytes, 1)
    return (
        f"{asked}: {missing:,} bytes ({format_bytes(missing)}) of weights find no place; enough would be: "
        f"{larger}, or --cpu {-(-needed // GIB)}GiB"
    )


_ANY = 2**62  # host memory without end


# -- result ---------------------------------------------------------------------------------------------------------


def _assemble(
    model: ModelSpec,
    machine: Machine,
    table: InferenceTable,
    cut: _Cut,
    *,
    spilled: Mapping[int, str],
    objective: Objective,
    by_rows: frozenset[int] = frozenset(),
) -> Placement:
    runs_on: dict[int, DeviceKey] = {}
    for run in cut.runs:
        for unit in cut.arrangement.units[run.start : run.stop]:
            runs_on.update(dict.fromkeys(unit.layers, machine.gpus[run.device].index))
    for layer, home in spilled.items():
        if layer in by_rows:
            assert home == "cpu", "what runs in host memory lies there"
            runs_on[layer] = "cpu"
    return summarize(model, machine, table, runs_on, spilled, arrangement=cut.arrangement.name, objective=objective)


def place_unasked(model: ModelSpec, machine: Machine, workload: Workload) -> Placement:
    """The fewest GPUs, as every further one is a crossing for every token, where they stay roomy; else the least full.

    A note says what the other objective gives. Use `place` where you know what you want.
    """
    even = place(model, machine, workload)
    if even.spilled or _num_used(even) == 1:
        return even
    near = place(model, machine, workload, objective="latency")
    if _num_used(near) == _num_used(even):
        return even
    few, all_of = _told(near), _told(even)
    if near.fullest <= ROOMY:
        return replace(near, notes=(*near.notes, f"It takes {few}; --for memory spreads it over {all_of}."))
    return replace(even, notes=(*even.notes, f"It takes {all_of}; --for latency needs only {few}."))


def _num_used(placement: Placement) -> int:
    return sum(bool(use.modules) for use in placement.uses)


def _told(placement: Placement) -> str:
    num = _num_used(placement)
    return f"{num} GPU{'s' if num > 1 else ''}, the fullest to {100 * placement.fullest:.0f} %"


# -- order of spilling: bytes moved per request for each byte freed ---------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spills:
    """Layers in the order in which they spill, and what each moves."""

    layers: tuple[int, ...]
    moved_bytes: IntArray  # per layer of the model, if it spills
    by_rows: frozenset[int]  # computed in host memory: looked-up rows move instead of the table


def order_spills(model: ModelSpec, parts: Parts, table: InferenceTable, *, cpu_bytes: int) -> Spills:
    """Order layers with weights, cheapest first; parameters without a module stay: nothing would bring them back.

    An embedding that shares no weight runs in host memory, where there is room, and moves the rows it looks up; else
    it is copied like a block. The ViT's layers are copied
    once a batch; decoder blocks for every new token, spread over the depth so that each GPU gives up alike; the head,
    and an embedding that is one with it, last. The ratio of moved to freed bytes orders these groups whatever the
    layers' sizes, because a layer that runs k times moves k times what it frees.
    """
    shared = {name for pair in model.tied for name in pair}
    tables = [i for i in parts.embed.layers if _is_table(model.layers[i]) and model.layers[i].name not in shared]
    size = sum(int(table.weights[i]) for i in tables)
    by_rows = frozenset(tables if size <= cpu_bytes else ())
    stays = family_of(model.family).stacks_states  # Mllama asks where its patch embedding lies before it calls it
    vision = [i for unit in parts.vision for i in unit.layers if not (stays and model.layers[i].kind == "embed")]
    blocks = _spread([i for unit in parts.blocks for i in unit.layers])
    ends = [*parts.head.layers, *(i for i in parts.embed.layers if i not in by_rows)]
    moved = (table.runs * table.weights).astype(table.weights.dtype)
    for layer in by_rows:
        moved[layer] = table.rows_out[layer]
    groups = ([*by_rows], sorted(vision, key=lambda i: (-int(table.weights[i]), i)), blocks, ends)
    order = tuple(i for group in groups for i in group if table.weights[i] > 0 and not model.layers[i].bare)
    return Spills(layers=order, moved_bytes=moved, by_rows=by_rows)


def with_borrowers(model: ModelSpec, layer: int) -> tuple[int, ...]:
    """Return `layer` and those that share a weight with it, directly or by way of others: they lie in one place."""
    number = {x.name: i for i, x in enumerate(model.layers)}
    pairs = [{number[owner], number[borrower]} for owner, borrower in model.tied]
    found: dict[int, None] = {layer: None}
    for _ in pairs:  # chains of pairs
        found.update({i: None for pair in pairs if pair & found.keys() for i in pair})
    return tuple(found)


def _is_table(layer: LayerSpec) -> bool:
    return layer.kind == "embed" and not layer.bare and not layer.num_matmul_params


def _spread(layers: list[int]) -> list[int]:
    """Return every prefix lies about evenly over the list: bit-reversed order."""
    bits = max(len(layers) - 1, 1).bit_length()
    turned = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits))
    return [layers[i] for i in turned if i < len(layers)]
