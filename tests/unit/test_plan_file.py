"""plan/file/yaml.py: plans as YAML, tables as .npy, hostile files."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plans import small_plan

from refusals import refused
from trimtab.errors import PlanError
from trimtab.plan.file.yaml import (
    array_bytes,
    load_array,
    load_plan,
    name_table,
    pack_contents,
    plan_from_yaml,
    plan_to_yaml,
)
from trimtab.plan.plan import PackingDecision
from trimtab.specs import Packing, Schedule
from trimtab.units import fold_modules, unfold_modules

GOLDEN = Path(__file__).parents[1] / "golden"


def test_keys_keep_the_order_of_the_fields_and_rows_stay_on_one_line() -> None:
    text = plan_to_yaml(small_plan())
    keys = [line.split(":")[0] for line in text.splitlines() if line and not line.startswith((" ", "-"))]
    assert keys == [f.name for f in dataclasses.fields(small_plan())]
    assert "    - {stage: 0, modules: [model.visual.patch_embed, 'model.visual.blocks[0..23]']}" in text
    assert "  parallel: {dp: 2, pp: 2, tp: 2, cp: 1}" in text
    assert yaml.safe_load(text)["plan_version"] == "1.0"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("plan_v*.yaml")), ids=lambda p: p.stem)
def test_every_golden_plan_still_loads_and_is_what_we_write(path: Path) -> None:
    assert plan_to_yaml(load_plan(path)) == path.read_text(encoding="utf-8")


def test_an_unknown_key_is_a_warning_that_names_it() -> None:
    text = plan_to_yaml(small_plan()).replace("  parallel: {dp: 2,", "  parallel: {dq: 7, dp: 2,")
    with pytest.warns(UserWarning, match=r"decisions\.parallel\.dq is unknown"):
        assert plan_from_yaml(text) == small_plan()


def test_all_wrong_types_are_named_at_once() -> None:
    text = plan_to_yaml(small_plan()).replace("dp: 2", "dp: two").replace("zero_stage: 1", "zero_stage: [1]")
    with pytest.raises(PlanError) as error:
        plan_from_yaml(text)
    assert "decisions.parallel.dp" in str(error.value)
    assert "inputs.training.zero_stage" in str(error.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(("estimates.step_ms", value) for value in (".nan", ".inf", "-1.0")),
        *(("estimates.time_error", value) for value in ("-1", ".inf")),
        *(("inputs.cluster.latency_s", value) for value in ("-1", ".nan")),
        *(("inputs.cluster.node_link_bytes_per_s", value) for value in ("0.0", "-2.5e10")),
        *(("decisions.schedule.num_chunks", value) for value in ("0", "-1")),
        ("decisions.parallel.pp", "0"),
        ("estimates.stages.0.forward_ms", ".nan"),
        ("decisions.stages", "[]"),
    ],
)
def test_numbers_that_no_plan_holds_are_refused_with_their_place(place: str, value: str) -> None:
    import yaml

    content = yaml.safe_load(plan_to_yaml(small_plan()))
    *path, last = place.split(".")
    inner = content
    for key in path:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = yaml.safe_load(value)
    with refused(PlanError, place):
        plan_from_yaml(yaml.safe_dump(content))


def test_a_table_is_read_only_if_it_is_the_plans_own(tmp_path: Path) -> None:
    content = array_bytes(np.arange(5))
    (tmp_path / "t.npy").write_bytes(content)
    table = name_table("t.npy", content)
    assert load_array(tmp_path, table).tolist() == [0, 1, 2, 3, 4]
    (tmp_path / "t.npy").write_bytes(b"other")
    with refused(PlanError):
        load_array(tmp_path, table)
    with refused(PlanError):
        load_array(tmp_path, dataclasses.replace(table, file="../t.npy"))
    (tmp_path / "t.npy").unlink()
    with refused(PlanError):
        load_array(tmp_path, table)


def test_a_pickled_array_is_never_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    table = name_table("p.npy", (tmp_path / "p.npy").read_bytes())
    with refused(PlanError):
        load_array(tmp_path, table)


# -- plan/file/yaml.py: short module paths ----------------------------------------------------------------------------


def test_runs_become_ranges_and_singles_stay() -> None:
    names = ["model.visual.patch_embed", *(f"model.visual.blocks.{i}" for i in range(24)), "lm_head", "x.3"]
    assert fold_modules(names) == ("model.visual.patch_embed", "model.visual.blocks[0..23]", "lm_head", "x.3")


@given(st.lists(st.tuples(st.sampled_from(["a", "a.b", "m.layers"]), st.one_of(st.none(), st.integers(0, 12)))))
def test_unfold_is_the_inverse_of_fold(parts: list[tuple[str, int | None]]) -> None:
    names = tuple(stem if number is None else f"{stem}.{number}" for stem, number in parts)
    assert unfold_modules(fold_modules(names)) == names


# -- plan/file/reload.py: packs as tables, and steps of equal length --------------------------------------------------


PACKING = Packing(offsets=np.array([0, 2, 3]), indices=np.array([2, 0, 1]), limits=(36864, 8192))
SCHEDULE = Schedule(table=np.array([[[0], [1]]]))


def written(folder: Path, packing: Packing = PACKING, schedule: Schedule = SCHEDULE) -> PackingDecision:
    contents = pack_contents(packing, schedule)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    tables = {name.removesuffix(".npy"): name_table(name, content) for name, content in contents.items()}
    return dataclasses.replace(small_plan().decisions.packing, **tables)
