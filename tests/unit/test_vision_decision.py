"""plan/decide/ (sharing, exchange): image sizes, shares, time and memory of shared images, the plan file."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from described_configs import small
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import read_back, tile_samples, write_checked
from report_fixtures import plan_text
from vision_cases import CLUSTER, OPTIONS, QWEN, TILES, image_samples, table_of, with_vision

from refusals import refused
from trimtab import PlanDetails, SampleTable, check_plan, make_plan, parse_cluster, write_plan
from trimtab.adapters.frameworks import find_target
from trimtab.adapters.running import export_plan
from trimtab.balance.images import share_images, share_pools
from trimtab.errors import PlanError
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.exchange import feature_values, image_sizes
from trimtab.plan.decide.sharing import share_vision
from trimtab.plan.decide.stages import Expressible, best_expressible
from trimtab.plan.decide.towers import MUST_GAIN
from trimtab.plan.file.reload import load_details, options_of, reload_plan, replan
from trimtab.plan.file.yaml import plan_to_yaml
from trimtab.plan.options import PlanOptions, VisionChoice
from trimtab.report.html import html_report
from trimtab.report.table import time_scale


@pytest.fixture(scope="module")
def shared() -> PlanDetails:
    return make_plan(QWEN, image_samples(), CLUSTER, with_vision(group="tp", pooling=1))


def reloaded(details: PlanDetails, folder: Path) -> Case:
    write_plan(details, folder)
    return reload_plan(folder).case


# -- sizes of images ------------------------------------------------------------------------------------------------

IMAGES = st.lists(st.integers(1, 5000).map(lambda x: 4 * x), max_size=9)


@settings(max_examples=100, deadline=None)
@given(st.lists(IMAGES, min_size=1, max_size=5))
def test_sizes_of_images_keep_what_the_table_knows(images):
    arrays = [np.array(x, np.int64) for x in images]
    table = table_of(arrays, np.random.default_rng(0))
    sizes = image_sizes(table, QWEN)
    for row, true in enumerate(arrays):
        atoms = sizes.atoms_of(np.array([row]))
        assert len(atoms) == len(true)
        assert atoms[:, 0].sum() == pytest.approx(true.sum())
        assert atoms[:, 1].sum() == pytest.approx((true * true).sum())
        assert atoms[:, 2].sum() == pytest.approx(64 * true.sum())
        assert (atoms >= 0).all()
        assert sizes.known[row] == (len(true) <= 2 or len(set(true)) == 1)
        if sizes.known[row]:
            np.testing.assert_allclose(np.sort(atoms[:, 0]), np.sort(true), rtol=1e-6)


def test_recorded_sizes_are_the_atoms_in_their_order():
    images = [np.array([400, 16, 16, 4000]), np.array([], np.int64), np.array([64]), np.array([8, 4, 4])]
    table = table_of(images, np.random.default_rng(0))
    table = dataclasses.replace(table, image_patches=np.concatenate(images))
    sizes = image_sizes(table, QWEN)
    assert sizes.known.all()
    atoms = sizes.atoms_of(np.array([3, 0, 1, 2, 0]))
    expected = np.concatenate([images[i] for i in (3, 0, 1, 2, 0)])
    np.testing.assert_allclose(atoms[:, 0], expected)
    np.testing.assert_allclose(atoms[:, 1], expected**2)
    np.testing.assert_allclose(atoms[:, 2], 64 * expected)


def test_tiles_are_the_atoms_of_a_tower_of_tiles():
    table = tile_samples(50)
    sizes = image_sizes(table, TILES)
    np.testing.assert_array_equal(sizes.count * 1025, table.num_patches)
    assert sizes.known.all()
    assert set(sizes.atoms_of(np.arange(50))[:, 0]) == {1025.0}


# -- shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["balanced", "contiguous"])
def test_pools_are_shared_as_each_would_be_alone(rule):
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 12, 40)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    cost = rng.lognormal(5, 1, int(counts.sum()))
    terms = np.stack([cost, cost * cost], axis=1)
    found = share_pools(cost, 2 * cost, terms, offsets, 3, rule=rule)
    for j, (first, last) in enumerate(itertools.pairwise(offsets)):
        shares = share_images(cost[first:last], 3, rule=rule)
        np.testing.assert_allclose(np.sort(found.load[j]), np.sort(2 * shares.load), rtol=1e-12)
        parts = [terms[first:last][shares.atoms_of(rank)].sum(axis=0) for rank in range(3)]
        np.testing.assert_allclose(found.slowest[j], max(parts, key=lambda x: x[0]), rtol=1e-12)
        np.testing.assert_allclose(found.largest[j], np.max(parts, axis=0), rtol=1e-12)


def test_equal_images_are_shared_to_the_last_one(tmp_path):
    """Four equal images a sample, one sample a pack, four ranks: a quarter of every term, on every rank."""
    table = table_of([np.full(4, 400)] * 32, np.random.default_rng(0))
    options = dataclasses.replace(with_vision(group="tp", pooling=1), max_patches=1600, max_tokens=2000)
    details = make_plan(QWEN, table, CLUSTER, options)
    case = reloaded(details, tmp_path)
    np.testing.assert_allclose(case.work[:, 1:4] * 4, case.vision.work[:, 1:4])
    found = details.plan.estimates.vision_data_parallel
    assert found.tower_ms == pytest.approx(found.ideal_ms + found.exchange_ms, rel=1e-3)
    # gathered rows: 1600 patches, each a quarter of a row of 3584 bf16 values, as the table's limit allows them
    assert found.features_mib == pytest.approx(1600 * feature_values(QWEN) * 2 / 2**20, rel=1e-3)
    steps = details.plan.decisions.packing.num_steps
    received = 2 * 32 / 2 * 1600 * 3584 / 4 * 2 * 3 / 4 / steps
    assert found.exchange_mib == pytest.approx(received / 2**20, rel=1e-3)


def test_deepstack_features_travel_with_the_others():
    assert feature_values(small("qwen3")) == 3 * 64 / 4
    assert feature_values(QWEN) == 3584 / 4
    assert feature_values(TILES) == pytest.approx(6144 * 256 / 1025)


def test_pooling_is_more_even_and_holds_more():
    samples = image_samples(most=2)
    found = {}
    for pooling in (1, 2, 4):
        details = make_plan(QWEN, samples, CLUSTER, with_vision(group="tp", pooling=pooling))
        assert details.plan.decisions.vision_data_parallel.pooling == pooling
        found[pooling] = details.plan.estimates.vision_data_parallel
    assert found[4].tower_ms < found[2].tower_ms < found[1].tower_ms
    assert found[4].tower_ms >= found[4].ideal_ms
    assert found[4].features_mib > 1.5 * found[1].features_mib


def test_the_smallest_pool_within_half_a_percent_is_chosen():
    details = make_plan(QWEN, image_samples(most=2), CLUSTER, with_vision(group="tp"))
    said = next(x for x in details.plan.assumptions if x.startswith("Sharing the images was simulated"))
    assert all(f"{k} micro-batches a call" in said for k in (2, 4))
    chosen = details.plan.decisions.vision_data_parallel.pooling
    epochs = {
        k: make_plan(QWEN, image_samples(most=2), CLUSTER, with_vision(group="tp", pooling=k)).variants[-1].epoch_s
        for k in (1, 2, 4)
    }
    shortest = min(epochs.values())
    assert chosen == min(k for k, s in epochs.items() if s <= 1.005 * shortest)


def test_auto_shares_only_where_the_epoch_is_shorter():
    gains = make_plan(QWEN, image_samples(), CLUSTER, with_vision(group="auto"))
    assert gains.plan.decisions.vision_data_parallel.group == "tp"
    assert gains.variants[-1].epoch_s < gains.variants[-2].epoch_s
    alone = make_plan(QWEN, image_samples(), CLUSTER, dataclasses.replace(OPTIONS, tp=1, vision=VisionChoice()))
    options = dataclasses.replace(OPTIONS, tp=1, vision=VisionChoice(group="auto"))
    loses = make_plan(QWEN, image_samples(), CLUSTER, options)
    assert any(x.startswith("Sharing the images was simulated") for x in loses.plan.assumptions)
    if loses.plan.decisions.vision_data_parallel is None:
        assert loses.plan.decisions == alone.plan.decisions
    else:
        assert loses.variants[-1].epoch_s < alone.variants[-1].epoch_s


def test_auto_leaves_a_text_only_data_set_alone():
    text = table_of([np.array([], np.int64)] * 40, np.random.default_rng(0))
    details = make_plan(QWEN, text, CLUSTER, with_vision(group="auto"))
    assert details.plan.decisions.vision_data_parallel is None
    assert any("the data holds no image to share" in sentence for sentence in details.plan.assumptions)


def test_auto_says_what_it_could_not_try():
    options = PlanOptions(
        pp=8, num_microbatches=8, schedule="1F1B", zero_stage=1, risk=0.05, vision=VisionChoice(group="auto")
    )
    details = make_plan(QWEN, image_samples(60), CLUSTER, options)
    decided = details.plan.decisions.vision_data_parallel
    assert decided is None or decided.group == "replica"
    said = next(x for x in details.plan.assumptions if x.startswith("Sharing the images was not possible everywhere"))
    assert "tp is 1" in said
    assert "dp is 1" in said


def test_a_frozen_tower_is_exchanged_forward_only():
    both = dataclasses.replace(with_vision(group="tp", pooling=1), max_patches=65536)  # else their packs differ too
    options = dataclasses.replace(both, frozen_towers=("vision", "projector"))
    frozen = make_plan(QWEN, image_samples(), CLUSTER, options).plan.estimates.vision_data_parallel
    trained = make_plan(QWEN, image_samples(), CLUSTER, both)
    per_step = trained.plan.decisions.packing.num_steps
    assert per_step > 0
    assert frozen.exchange_mib < trained.plan.estimates.vision_data_parallel.exchange_mib
    assert frozen.tower_ms < trained.plan.estimates.vision_data_parallel.tower_ms


# -- the plan -------------------------------------------------------------------------------------------------------


def test_the_last_row_is_the_shared_one_and_the_others_are_as_without(shared):
    plain = make_plan(QWEN, image_samples(), CLUSTER, OPTIONS)
    assert plain.plan.decisions.vision_data_parallel is None
    assert "vision_data_parallel" not in plan_to_yaml(plain.plan)
    assert "Images shared" not in html_report(plain)
    assert "Images shared" not in plan_text(plain)
    assert shared.plan.estimates.variants[:-1] == plain.plan.estimates.variants
    assert shared.plan.estimates.variants[-1].name == "images shared"
    assert shared.plan.decisions.packing == plain.plan.decisions.packing
    assert shared.variants[-1].epoch_s < shared.variants[-2].epoch_s
    np.testing.assert_array_equal(shared.variants[-1].pack_patches, plain.variants[-1].pack_patches)


def test_sharing_over_tp_trades_state_for_activations(shared):
    found = shared.plan.estimates.vision_data_parallel
    assert found.tower_ms < found.tower_without_ms
    assert found.state_gib > 3 * found.state_without_gib
    assert 0 < found.sizes_known < 1
    assert any("known for" in sentence for sentence in shared.plan.assumptions)


def test_a_plan_that_shares_images_checks_and_simulates_to_the_same_figures(shared, tmp_path):
    loaded = read_back(shared, tmp_path)
    assert options_of(loaded.plan).vision == VisionChoice(group="tp", pooling=1)
    assert html_report(loaded) == html_report(shared)


def test_a_pipeline_keeps_the_tower_whole_on_its_first_stage(tmp_path):
    options = PlanOptions(
        pp=4, tp=2, num_microbatches=8, schedule="1F1B", zero_stage=1, risk=0.05, vision=VisionChoice(group="tp")
    )
    samples, cluster = tile_samples(300), parse_cluster("32xA100-80GB")
    details = make_plan(TILES, samples, cluster, options)
    last = max(TILES.indices("projector"))
    assert details.variants[-1].stages[0].stop > last
    assert details.plan.decisions.vision_data_parallel.pooling == 1
    assert details.plan.inputs.model.forbidden_cuts == ()
    found = write_checked(details, tmp_path)
    moved = best_expressible(found.case, Expressible(forbidden_cuts=frozenset({found.stages[1].start})))
    assert moved is not None
    assert moved[0].stop > last
    again = replan(found, moved, forbidden_cuts=frozenset({found.stages[1].start}), note="Split again, for a test.")
    write_checked(again, tmp_path / "again")
    assert again.plan.decisions.vision_data_parallel == details.plan.decisions.vision_data_parallel
    loaded = load_details(tmp_path)
    assert loaded.variants[-2].stages == details.variants[-2].stages
    plain = make_plan(TILES, samples, cluster, dataclasses.replace(options, vision=VisionChoice()))
    write_plan(plain, tmp_path / "plain")
    assert plain.variants[-1].stages[0].stop <= last, "else the next line shows nothing"
    row = "  vision_data_parallel: {group: tp, degree: 2, exchange: gather, pooling: 1, rule: balanced, "
    path = tmp_path / "plain" / "plan.yaml"
    text = path.read_text().replace("estimates:\n", row + "objective: time, reduction: mean}\nestimates:\n", 1)
    path.write_text(text)
    assert any("stage 0" in problem for problem in check_plan(path))


def test_nothing_is_counted_twice(shared, tmp_path):
    """Step time with sharing minus without is what the slowest rank's tower and the update gain, recompute aside."""
    plain = with_vision(group="tp", pooling=1)
    options = dataclasses.replace(plain, recompute="none", max_patches=5000, host="none")
    details = make_plan(QWEN, image_samples(most=2, largest=2048), CLUSTER, options)
    assert all(not stage.recompute for variant in details.variants[-2:] for stage in variant.stages)
    found = details.plan.estimates.vision_data_parallel
    gained = 1e3 * float(np.mean(details.variants[-2].step_s) - np.mean(details.variants[-1].step_s))
    tower, update = found.tower_without_ms - found.tower_ms, found.update_without_ms - found.update_ms
    assert tower > 0 > update, "whole towers have more parameters on every rank"
    assert gained == pytest.approx(tower + update, rel=0.03)  # the slowest rank is not always the same one


def test_the_stages_of_a_framework_keep_the_decision_and_its_export_says_what_it_lacks(shared, tmp_path):
    write_plan(shared, tmp_path)
    exported = export_plan(reload_plan(tmp_path), find_target("megatron"))
    assert any("images" in warning for warning in exported.warnings)
    plain = make_plan(QWEN, image_samples(), CLUSTER, OPTIONS)
    write_plan(plain, tmp_path / "plain")
    alone = export_plan(reload_plan(tmp_path / "plain"), find_target("megatron"))
    assert not any("images" in warning for warning in alone.warnings)


# -- the report -----------------------------------------------------------------------------------------------------


def test_the_report_tells_ranks_before_and_after(shared):
    page, found = html_report(shared), shared.plan.estimates.vision_data_parallel
    part = page[page.index("Images shared among ranks") :]
    times = time_scale([found.tower_ms / 1e3, found.tower_without_ms / 1e3])
    assert [times.text(x / 1e3) in part for x in (found.tower_without_ms, found.tower_ms)] == [True, True]
    assert "tp 4, gather, balanced by time" in page
    text = plan_text(shared)
    assert "Images shared among ranks" in text
    assert "Features held" in text


def test_sharing_what_is_shared_already_starts_from_the_plain_case(shared, tmp_path):
    case = reloaded(shared, tmp_path)
    again = share_vision(case, case.vision.decision)
    np.testing.assert_array_equal(again.work, case.work)
    assert again.setting.profile == case.setting.profile


# -- ranks of cp hold the same pack ---------------------------------------------------------------------------------

LONG = dataclasses.replace(OPTIONS, tp=2, cp=2, num_microbatches=2, host="none")  # one whose launches cost nothing


def long_samples(num_samples: int = 48) -> SampleTable:
    """One sample a pack: four equal images and a long text."""
    return table_of([np.full(4, 4096)] * num_samples, np.random.default_rng(0))


@pytest.mark.parametrize(("group", "degree", "reduction"), [("cp", 2, None), ("tp_cp", 4, "mean"), ("tp", 2, "mean")])
def test_ranks_that_hold_one_pack_share_its_images(tmp_path, group, degree, reduction):
    options = dataclasses.replace(LONG, max_patches=16384, max_tokens=8192, vision=VisionChoice(group=group, pooling=1))
    details = make_plan(QWEN, long_samples(), CLUSTER, options)
    decision = details.plan.decisions.vision_data_parallel
    assert (decision.group, decision.degree, decision.exchange, decision.reduction) == (
        *(group, degree),
        *("gather", reduction),
    )
    case = reloaded(details, tmp_path)
    np.testing.assert_allclose(case.work[:, 1:4] * degree, case.vision.work[:, 1:4])
    assert check_plan(tmp_path) == []
    read_back(details, tmp_path)
    tower, alone = (
        sum(x.state_bytes for x in profile.layers if x.tower == "vision")
        for profile in (case.setting.profile, case.vision.profile)
    )
    assert tower == pytest.approx(alone if group == "cp" else 2 * alone, rel=0.02)  # heads may be padded


def test_cp_encodes_each_image_once_where_it_was_done_cp_times():
    plain = dataclasses.replace(LONG, tp=1, cp=4, max_patches=16384, max_tokens=8192)
    shared = make_plan(QWEN, long_samples(), CLUSTER, dataclasses.replace(plain, vision=VisionChoice(group="cp")))
    found = shared.plan.estimates.vision_data_parallel
    assert 3 < found.tower_without_ms / (found.tower_ms - found.exchange_ms) <= 4.001
    auto = make_plan(QWEN, long_samples(), CLUSTER, dataclasses.replace(plain, vision=VisionChoice(group="auto")))
    assert auto.plan.decisions.vision_data_parallel.group == "cp"
    assert auto.variants[-1].epoch_s <= MUST_GAIN * shared.variants[-1].epoch_s


def test_auto_is_no_slower_than_any_group():
    plain = dataclasses.replace(LONG, max_patches=16384, max_tokens=8192)

    def epoch_s(group: str) -> float:
        options = dataclasses.replace(plain, vision=VisionChoice(group=group))
        return make_plan(QWEN, long_samples(), CLUSTER, options).variants[-1].epoch_s

    assert epoch_s("auto") <= MUST_GAIN * min(epoch_s(group) for group in ("one-grid", "tp", "cp", "tp_cp"))


# -- what no plan can follow -------------------------------------------------------------------------------------------


GOLDEN = Path(__file__).parents[1] / "golden" / "plan_v1_0_shared_images.yaml"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("degree: 4", "degree: 2", "vision data parallel over tp has degree 2, and the plan has tp 4: make them equal"),
        (
            "exchange: gather",
            "exchange: dispatch",
            "with exchange dispatch and reduction mean: over tp they are gather",
        ),
        ("pooling: 1", "pooling: 3", "choose a number that divides them"),
        ("reduction: mean", "reduction: null", "and reduction null: over tp they are gather and mean"),
    ],
)
def test_an_edited_decision_that_cannot_be_is_found(shared, tmp_path, before, after, message):
    path = write_plan(shared, tmp_path)
    text = path.read_text()
    row = next(line for line in text.splitlines() if line.startswith("  vision_data_parallel: {"))
    path.write_text(text.replace(row, row.replace(before, after)))
    assert any(message in problem for problem in check_plan(tmp_path))


def test_slots_that_the_tables_do_not_have_are_told(shared, tmp_path):
    path = write_plan(shared, tmp_path)
    text = path.read_text()
    assert "num_microbatches: 4" in text
    path.write_text(text.replace("num_microbatches: 4", "num_microbatches: 8"))
    assert any("dp 2 x 8" in problem for problem in check_plan(tmp_path))


def test_pools_of_tiles_are_refused_over_ranks_that_hold_the_same():
    options = with_vision(group="tp", pooling=2)
    with refused(PlanError, "InternVL-Chat-V1-5"):
        make_plan(TILES, tile_samples(), CLUSTER, dataclasses.replace(options, tp=8))
    wide = dataclasses.replace(with_vision(group="tp"), tp=8, max_patches=9225, max_tokens=4352, zero_stage=3)
    chosen = make_plan(TILES, tile_samples(), parse_cluster("16xH200"), wide)
    assert chosen.plan.decisions.vision_data_parallel.pooling == 1
