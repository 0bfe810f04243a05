"""The decorators of our compiled loops, and the random integers in them.

A cold command compiles each function once per argument types; most of that is not the loops but what numba makes
around them. So: pass one dtype per argument (`np.int64(4)`, not 4: a literal is a type of its own), write plain loops
instead of array expressions and slices, keep columns in one array of records instead of many arrays, and mark what
only compiled code calls as `inner`, or `inlined` where there is one such call.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.errors import TrimtabError

try:
    from numba import njit
    from numba.core import event as event
except ValueError as error:  # of its environment variables, such as NUMBA_NUM_THREADS=0
    raise TrimtabError(f"numba does not start ({error}): correct its environment variables, NUMBA_...") from None

compiled = njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
"""For functions that Python calls."""

inner = njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)
"""For functions that only compiled functions call: without what would take their arguments from Python objects."""

relaxed = njit(cache=True, nogil=True, error_model="numpy", fastmath={"nnan", "ninf", "nsz"})
"""As `compiled`, for functions that meet neither NaN nor infinity: minima become vector code, sums keep their order."""

inlined = njit(cache=True, nogil=True, error_model="numpy", inline="always")
"""For what is written into its callers before they are compiled: short functions, and named parts of a long one."""


# -- random integers: SplitMix64, the same stream on every machine and Python. A stream is one uint64 in an array,
# `state[0]`. Generator: Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the
# constants are those of its section 5).


UIntArray = npt.NDArray[np.uint64]

_U = np.uint64
_MASK = (1 << 64) - 1


def make_stream(*keys: int) -> UIntArray:
    """Return a stream for integers (seed, epoch, purpose, ...): any change of any of them gives another stream."""
    state = 0x6A09E667F3BCC909  # fractional part of sqrt(2): any constant
    for key in keys:
        state = _mix((state ^ (key & _MASK)) & _MASK)
    return np.array([state], np.uint64)


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@inlined
def next_u64(state: UIntArray) -> np.uint64:
    """The next 64 bits of the stream."""
    state[0] = state[0] + _U(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
    mixed: np.uint64 = z ^ (z >> _U(31))
    return mixed


@inlined
def below(state: UIntArray, n: int) -> np.int64:
    """Return an integer of [0, n), n < 2**32: high half of 32 bits times n; its bias is under n / 2**32."""
    return np.int64(((next_u64(state) >> _U(32)) * _U(n)) >> _U(32))


@compiled
def shuffle(items: npt.NDArray[np.int64], state: UIntArray) -> None:
    """Shuffle in place (Fisher-Yates)."""
    for i in range(len(items) - 1, 0, -1):
        j = below(state, i + 1)
        held = items[i]
        items[i] = items[j]
        items[j] = held


def permute(items: npt.NDArray[np.int64], state: UIntArray) -> npt.NDArray[np.int64]:
    """The same items, shuffled in place."""
    shuffle(items, state)
    return items


def permutation(n: int, *keys: int) -> npt.NDArray[np.int64]:
    """Return a shuffle of range(n) that only the keys decide."""
    order = np.arange(n, dtype=np.int64)
    shuffle(order, make_stream(*keys))
    return order


def scatter(n: int, num_shards: int, seed: int, epoch: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the rows 0 .. n - 1 shard by shard, ascending in each, and where the shards start.

    The shard of a row is a hash of its number and the seed: equally likely, independent. With the shuffle inside each
    shard that makes a random order of all, at two sequential passes instead of a cache miss per sample. Rows of several
    shards are 4 bytes each where that suffices.
    """
    if num_shards == 1:
        return np.arange(n), np.array([0, n])
    key = make_stream(seed, epoch, 0x7368)
    counts = np.zeros(num_shards + 1, np.int64)
    rows: npt.NDArray[Any] = np.empty(n, np.int32 if n < 2**31 else np.int64)
    _count_shards(n, key, num_shards, counts)
    starts = np.cumsum(counts)
    _place_rows(n, key, num_shards, starts[:-1].copy(), rows)
    return rows, starts


@inlined
def _shard_of(row: int, key: UIntArray, num_shards: int) -> np.int64:
    z = key[0] + _U(row) * _U(0x9E3779B97F4A7C15)  # SplitMix64 of a counter
    z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
    z = z ^ (z >> _U(31))
    return np.int64(((z >> _U(32)) * _U(num_shards)) >> _U(32))


@compiled
def _count_shards(n: int, key: UIntArray, num_shards: int, counts: npt.NDArray[np.int64]) -> None:
    for row in range(n):
        counts[_shard_of(row, key, num_shards) + 1] += 1


@compiled
def _place_rows(n: int, key: UIntArray, num_shards: int, cursor: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
    for row in range(n):
        shard = _shard_of(row, key, num_shards)
        out[cursor[shard]] = row
        cursor[shard] += 1
