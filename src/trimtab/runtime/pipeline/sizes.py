"""Sizes of what layers return, foretold from a micro-batch once enough of them were seen."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

Shape = tuple[int, ...]
Rule = tuple[str | None, Fraction]
"""A quantity of the micro-batch and a factor; None: the factor is the size itself."""


class SizeRules:
    """Every rule for each dimension that all micro-batches seen so far have obeyed.

    A size is foretold where the rules that are left agree. Where they do not, `None` asks for one more observation,
    which leaves fewer of them: after two or three micro-batches no more is asked.
    """

    def __init__(self) -> None:
        self._rules: dict[str, list[list[Rule]]] = {}

    def observe(self, shapes: Mapping[str, Shape], quantities: Mapping[str, int]) -> None:
        for name, shape in shapes.items():
            known = self._rules.get(name)
            if known is None or len(known) != len(shape):
                self._rules[name] = [_all_rules(size, quantities) for size in shape]
                continue
            self._rules[name] = [
                [rule for rule in rules if _apply(rule, quantities) == size]
                for rules, size in zip(known, shape, strict=True)
            ]

    def foretell(self, name: str, quantities: Mapping[str, int]) -> Shape | None:
        """None: what was seen does not tell it."""
        shape = []
        for rules in self._rules.get(name, [[]]):
            sizes = {_apply(rule, quantities) for rule in rules}
            if len(sizes) != 1 or None in sizes:
                return None
            shape += [size for size in sizes if size is not None]
        return tuple(shape)


def _all_rules(size: int, quantities: Mapping[str, int]) -> list[Rule]:
    """That size always, or in proportion to a quantity by a whole number, or by one part of a whole number."""
    found: list[Rule] = [(None, Fraction(size))]
    for key, value in quantities.items():
        if value and size:
            factor = Fraction(size, value)
            if 1 in (factor.numerator, factor.denominator):
                found.append((key, factor))
    return found


def _apply(rule: Rule, quantities: Mapping[str, int]) -> int | None:
    key, factor = rule
    size = factor if key is None else factor * quantities.get(key, 0)
    return int(size) if size.denominator == 1 else None
