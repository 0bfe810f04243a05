"""Packs from a source that cannot be sized ahead: samples in one by one, rows of dp packs out, a bounded buffer.

Each full buffer is one window of `balanced`; see `stream` for the same over a data set whose sizes are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from trimtab.balance.aim import NUMBERS, Aim, Style, choose_aim
from trimtab.balance.balanced import NUM_ROUNDS
from trimtab.balance.cost import ColumnCost, find_cost_problem, price_columns
from trimtab.balance.dispatch import ORDERS, TOLERANCE, order_packs
from trimtab.balance.packing import find_problems
from trimtab.errors import PackingError, join_problems
from trimtab.options import Order
from trimtab.specs import FloatArray, IntArray

Row = tuple[tuple[Any, ...], ...]
"""One pack for each rank, each the ids of its samples."""

BUFFER_ROWS = 64
MAX_SAMPLES = 1 << 18


class StreamPacker:
    """Rows of dp packs under hard limits from samples as they come.

    Use it where samples arrive one by one and their sizes are not known before; where all are known, `pack_samples`
    packs better.

    Samples are collected until they fill about `buffer_rows` x dp packs, or are `max_samples`; then all are packed at
    once. Every sample is in exactly one pack; none waits longer than `stream.MAX_AGE` windows; every row has dp packs,
    empty ones only in the last row and only if there are fewer samples than ranks. The order of arrival is shuffled
    within a window and not beyond: the source must be shuffled already. The same samples, in the same order, give the
    same rows; a packer restored by `load_state_dict` goes on as if it had never stopped.

    >>> packer = StreamPacker(limits=(9, 4096), dp=2)
    >>> for number in range(8):
    ...     packer.push((1 + number % 5, 300), sample_id=number)
    >>> packer.flush()
    >>> len(packer.pop())
    2
    """

    def __init__(
        self,
        limits: tuple[int, ...],
        dp: int,
        *,
        cost: ColumnCost | None = None,
        order: Order = "random",
        seed: int = 0,
        buffer_rows: int = BUFFER_ROWS,
        max_samples: int = MAX_SAMPLES,
        fill: float | None = None,
        num_rounds: int = NUM_ROUNDS,
        tolerance: float = TOLERANCE,
    ) -> None:
        problems = find_problems(fill, "error", dp=dp, buffer_rows=buffer_rows, num_rounds=num_rounds)
        if not limits or any(limit < 1 for limit in limits):
            problems.append(f"limits {limits} hold no sample: give one per column, 1 or more each")
        if max_samples < dp:
            problems.append(f"max_samples {max_samples} does not fill one row of {dp} packs: give dp or more")
        if order not in ORDERS:
            problems.append(f"order {order!r} is unknown: choose one of {', '.join(ORDERS)}")
        if cost is not None and (problem := find_cost_problem(cost, len(limits))):
            problems.append(problem)
        if problems:
            raise PackingError(join_problems(problems))
        self.limits, self.dp, self.order, self.seed = tuple(limits), dp, order, seed
        self.cost = cost
        self.buffer_rows, self.max_samples = buffer_rows, max_samples
        self.num_rounds, self.tolerance = num_rounds, tolerance
        self._highest = self._fill = fill
        self._style: Style | None = None
        self._num_windows = 0
        self._sizes: list[list[int]] = []
        self._ids: list[Any] = []
        self._ages: list[int] = []
        self._totals = [0] * len(self.limits)
        self._ready: deque[Row] = deque()

    @property
    def num_waiting(self) -> int:
        """Samples not yet in a row."""
        return len(self._ids)

    def push(self, sizes: Sequence[int], sample_id: Any) -> None:
        """Take in a sample; any id will do, JSON ones if the state is to be saved as such.

        Raises `PackingError` if it does not fit a pack, and takes nothing then.
        """
        row = [int(size) for size in sizes]
        if len(row) != len(self.limits) or any(not 0 <= s <= q for s, q in zip(row, self.limits, strict=False)):
            raise PackingError(
                f"sample {sample_id!r} with sizes {tuple(row)} does not fit a pack of {self.limits}: raise the limits, "
                "or leave the sample out"
            )
        self._add(row, sample_id, 0)
        fullest = max(total / limit for total, limit in zip(self._totals, self.limits, strict=True))
        full = fullest >= self.buffer_rows * self.dp * (self._fill or NUMBERS.tight_fill)
        if (full or len(self._ids) >= self.max_samples) and len(self._ids) >= self.dp:
            self._pack(last=False)

    def pop(self) -> Row | None:
        """The next row of dp packs; None if it is not there yet."""
        return self._ready.popleft() if self._ready else None

    def flush(self) -> None:
        """Pack what waits: the source has ended."""
        if self._ids:
            self._pack(last=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything between the samples taken in and the rows given out; the settings are not in it."""
        return {
            "limits": list(self.limits),
            "dp": self.dp,
            "seed": self.seed,
            "fill": self._fill,
            "highest": self._highest,
            "style": self._style,
            "num_windows": self._num_windows,
            "sizes": [list(row) for row in self._sizes],
            "ids": list(self._ids),
            "ages": list(self._ages),
            "ready": [[list(pack) for pack in row] for row in self._ready],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another packer of the same settings stopped."""
        for name, own in (("limits", list(self.limits)), ("dp", self.dp), ("seed", self.seed)):
            if state[name] != own:
                raise PackingError(f"the state is of a packer with {name} {state[name]}, this one has {own}: use that")
        self._fill, self._highest, self._num_windows = state["fill"], state["highest"], state["num_windows"]
        self._style = state["style"]
        self._clear()
        for row, sample_id, age in zip(state["sizes"], state["ids"], state["ages"], strict=True):
            self._add(list(row), sample_id, age)
        self._ready = deque(tuple(tuple(pack) for pack in row) for row in state["ready"])

    def _add(self, row: list[int], sample_id: Any, age: int) -> None:
        self._sizes.append(row)
        self._ids.append(sample_id)
        self._ages.append(age)
        for d, size in enumerate(row):
            self._totals[d] += size

    def _clear(self) -> None:
        self._sizes, self._ids, self._ages, self._totals = [], [], [], [0] * len(self.limits)

    def _pack(self, *, last: bool) -> None:
        """One window; what does not fit waits for the next."""
        from trimtab.balance.bound import counted_columns, sum_columns
        from trimtab.balance.groups import Groups, complete_rows
        from trimtab.balance.rng import make_stream
        from trimtab.balance.stream import next_fill, pack_window, packs_for

        # 1. Columns of what waits, and how it is to be packed.
        sizes = np.array(self._sizes, np.int64)
        columns, bounds = self._columns(sizes), np.array([*self.limits, np.inf])
        counted = counted_columns(sizes, self.limits, NUMBERS.tight_fill)
        if self._fill is None or self._highest is None or self._style is None:
            chosen = choose_aim(columns, counted, bounds, self.dp, self.num_rounds, self._fill)
            self._fill, self._highest, self._style = chosen.fill, chosen.fill, chosen.style
        aim = Aim(self._fill, self._style)
        num_packs = self._num_packs(packs_for(sum_columns(counted)), len(sizes), aim.fill, last=last)

        # 2. The window's packs, whole rows of them, in their order.
        packed = pack_window(
            columns,
            counted,
            min(len(sizes), num_packs),
            bounds,
            aim.pull(columns, bounds),
            np.array(self._ages, np.int64),
            dp=self.dp,
            hold_all=last,
            effort=aim.effort(self.num_rounds),
            state=make_stream(self.seed, self._num_windows, 0x73747265),
        )
        own, keys = np.sort(packed.members), (self.seed, self._num_windows)
        groups = Groups(np.searchsorted(own, packed.members), np.concatenate([[0], np.cumsum(packed.counts)]))
        groups = complete_rows(groups, own, own[:0], sizes[own], self.limits, dp=self.dp, keys=keys)
        sums = np.add.reduceat(columns[groups.members], groups.offsets[:-1])
        sequence = order_packs(
            sums, dp=self.dp, order=self.order, seed=self.seed, epoch=self._num_windows, tolerance=self.tolerance
        ).tolist()
        places = [groups.members[groups.offsets[p] : groups.offsets[p + 1]].tolist() for p in sequence]
        surplus = 0 if last else len(places) % self.dp  # fewer samples than packs for another row: they wait
        packs = [tuple(self._ids[i] for i in pack) for pack in places[: len(places) - surplus]]
        packs += [()] * (-len(packs) % self.dp)
        for first in range(0, len(packs), self.dp):
            self._ready.append(tuple(packs[first : first + self.dp]))

        # 3. What waits for the next window, and how full that is to be.
        carried = packs_for(sum_columns(counted[packed.left]))
        self._fill = next_fill(aim.fill, self._highest, carried, packed)
        stay = [*packed.left.tolist(), *(i for pack in places[len(places) - surplus :] for i in pack)]
        waiting = [(self._sizes[i], self._ids[i], self._ages[i] + 1) for i in sorted(stay)]
        self._clear()
        for row, sample_id, age in waiting:
            self._add(row, sample_id, age)
        self._num_windows += 1

    def _columns(self, sizes: IntArray) -> FloatArray:
        """(n, k + 1): the sizes and the cost, whose mean is 1."""
        from trimtab.balance.bound import sum_columns

        n, k = sizes.shape
        columns = np.empty((n, k + 1))
        columns[:, :k] = sizes
        columns[:, k] = price_columns(self.cost, [sizes[:, d] for d in range(k)], self.limits)
        mean_cost = float(sum_columns(columns)[k]) / n
        columns[:, k] *= 1.0 / mean_cost if mean_cost > 0 else 0.0
        return columns

    def _num_packs(self, needed: float, num_samples: int, fill: float, *, last: bool) -> int:
        """Packs of a window whose samples need so many full ones."""
        from trimtab.balance.stream import round_up

        num_packs = round_up(needed / fill, self.dp)
        if last:
            return num_packs
        num_packs -= self.dp if needed <= num_packs - self.dp else 0  # a little fuller rather than one row more
        return min(max(num_packs, self.dp), num_samples // self.dp * self.dp)
