"""plan/file/yaml.py: short module paths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.units import fold_modules, unfold_modules


def test_runs_become_ranges_and_singles_stay() -> None:
    names = ["model.visual.patch_embed", *(f"model.visual.blocks.{i}" for i in range(24)), "lm_head", "x.3"]
    assert fold_modules(names) == ("model.visual.patch_embed", "model.visual.blocks[0..23]", "lm_head", "x.3")


@given(st.lists(st.tuples(st.sampled_from(["a", "a.b", "m.layers"]), st.one_of(st.none(), st.integers(0, 12)))))
def test_unfold_is_the_inverse_of_fold(parts: list[tuple[str, int | None]]) -> None:
    names = tuple(stem if number is None else f"{stem}.{number}" for stem, number in parts)
    assert unfold_modules(fold_modules(names)) == names
