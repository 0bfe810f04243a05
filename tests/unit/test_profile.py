"""costs/ (profile): profiles of whole models, their settings, groups, errors and files."""

import json
import re
from dataclasses import replace

import pytest
from cost_models import small_model

from refusals import refused
from trimtab import ParallelDims, TrimtabError
from trimtab.costs.devices import DEVICES
from trimtab.costs.profile import load_profile, profile_bytes, profile_from_bytes, profile_model, save_profile

A100 = DEVICES["A100-80GB"]


def test_a_profile_has_one_cost_for_each_layer_in_order():
    model = small_model()
    profile = profile_model(model, A100)
    assert [x.name for x in profile.layers] == [x.name for x in model.layers]
    assert profile.method == "analytic"
    assert sum(x.num_params for x in profile.layers) == model.num_params


def test_layers_that_cost_the_same_share_a_group_and_others_do_not():
    profile = profile_model(small_model(), A100, frozen_towers=frozenset({"vision"}))
    groups = [x.group for x in profile.layers]
    assert groups == [0, 1, 1, 1, 2, 3, 4, 4, 4, 4, 5]
    by_group = {}
    for layer in profile.layers:
        same = by_group.setdefault(layer.group, layer)
        assert (same.forward_s, same.backward_s, same.tiers) == (layer.forward_s, layer.backward_s, layer.tiers)


def test_assumptions_are_said_in_sentences():
    profile = profile_model(
        small_model(tied=True, num_heads=25),
        A100,
        dims=ParallelDims(tp=2, pp=2, dp=2),
        zero_stage=3,
        attention="sdpa",
        frozen_towers=frozenset({"vision"}),
    )
    text = "\n".join(profile.assumptions)
    for part in (
        "79% of peak flop/s for a product of 4,096 rows and columns, 76% for 1,024 rows",
        "The 25 heads of the vision tower are padded to 26 for tp 2.",
        "With sdpa attention a pack computes the pairs between its samples too",
        "Weights gathered by ZeRO-3 are not overlapped",
        "Frozen: vision.",
        "The tied head holds its own copy",
    ):
        assert part in text
    copied = profile_model(small_model(), A100, dims=ParallelDims(tp=4)).assumptions
    assert any("Each device of tp 4 holds a copy of key/value heads of the language tower." in s for s in copied)


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_saved_profile_loads_as_it_was(tmp_path):
    profile = profile_model(small_model(), A100, dims=ParallelDims(tp=2, dp=3, pp=2), attention="eager")
    save_profile(profile, tmp_path / "a.json")
    assert load_profile(tmp_path / "a.json") == profile
    save_profile(load_profile(tmp_path / "a.json"), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"]  # no partial file stays


def spoil(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("factor", [0.0, 1e-12, 1e12, 1e300])
def test_times_that_no_device_takes_are_refused(factor):
    profile = profile_model(small_model(), A100)
    layers = tuple(
        replace(
            layer,
            forward_s=tuple(factor * x for x in layer.forward_s),
            backward_s=tuple(factor * x for x in layer.backward_s),
        )
        for layer in profile.layers
    )
    with refused(TrimtabError):
        profile_from_bytes(profile_bytes(replace(profile, layers=layers)), origin="p.json")


@pytest.mark.parametrize("name", ["time_error", "device.link_bytes_per_s"])
def test_a_number_beyond_all_floats_is_refused(tmp_path, name):
    path = tmp_path / "p.json"
    save_profile(profile_model(small_model(), A100), path)
    key = name.rpartition(".")[2]
    path.write_text(re.sub(rf'"{key}": [0-9.e+]+', f'"{key}": 1e999', path.read_text()))
    with refused(TrimtabError, "0", name):
        load_profile(path)
