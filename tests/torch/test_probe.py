"""`trimtab probe` against a byte budget on the CPU: what it measures, chooses, and steps back from; needs torch."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from probe_runs import bench_of, settings_of, write_probed
from rich.console import Console

import trimtab
from refusals import refused
from trimtab import check_plan, load_profile, write_plan
from trimtab.cli.profile import print_probe
from trimtab.costs.measured.traced_step import trace_step
from trimtab.errors import PlanError, TrimtabError, UnsupportedPlanError
from trimtab.plan.decide.probed import with_profile
from trimtab.plan.file.reload import reload_plan
from trimtab.plan.file.yaml import load_plan, plan_to_yaml
from trimtab.plan.options import VisionChoice
from trimtab.runtime.data.collate import attend_by_sample
from trimtab.runtime.probe.run import CHOICE, probe, settle
from trimtab.runtime.probe.trial import CpuMeter
from trimtab.runtime.recompute import apply
from trimtab.units import MIB, format_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("internvl")
    write_probed(path, "internvl")
    return path


@pytest.fixture(scope="module")
def tight(folder):
    """A probe whose budget forces some layers to recompute."""
    return probe(settings_of(folder, 5.2))


@pytest.mark.parametrize("family", ["internvl", pytest.param("qwen2_5_vl", marks=pytest.mark.integration)])
def test_measured_bytes_are_those_that_autograd_keeps(folder, tight, tmp_path, family):
    """Of each kind of layer, by the trace of one step of the same micro-batch in the whole model."""
    if family == "internvl":
        settings, result = settings_of(folder), tight
    else:
        write_probed(tmp_path, family)
        settings = settings_of(tmp_path)
        result = probe(settings)
    (device,) = result.devices
    kinds = [kind for kind in device.kinds if kind.tier == "none"]
    assert {kind.tower for kind in kinds} == {"vision", "language"}
    with bench_of(settings) as bench:
        profile, batches = bench.case.setting.profile, bench.batches
        config = bench.pipeline.stages[0].model.config
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").train()
    attend_by_sample(model)
    names = [layer.name for layer in profile.layers if len(layer.tiers) > 1]
    traces = [trace_step(model, names, batch) for batch in batches.values()]
    for kind in kinds:
        others = [name for name in names if name != kind.layer]
        assert kind.measured_bytes == max(t.saved_bytes(others) - t.saved_bytes(names) for t in traces)


def test_the_choice_fits_and_one_layer_fewer_recomputed_does_not(folder, tight, tmp_path):
    assert tight.num_step_backs == 0
    (device,) = tight.devices
    assert device.full_peak_bytes < device.peak_bytes <= tight.limit_bytes == int(5.2 * MIB)
    assert sum(device.recompute.values()) > 0
    write_plan(tight.details, tmp_path / "probed")
    problem = reload_plan(tmp_path / "probed").case.problem
    (stage,) = tight.details.variants[-1].stages
    above = []
    with bench_of(settings_of(folder, 5.2)) as bench:
        for layer in (i for choice in stage.recompute for i in choice.layers):
            fewer = tuple(
                replace(choice, layers=tuple(i for i in choice.layers if i != layer)) for choice in stage.recompute
            )
            # at the plan's limits, which are wider than any pack, none may keep all; and with real packs some cannot
            (held,) = problem.assess([replace(stage, recompute=fewer)]).memory
            assert held.total_bytes > problem.memory_bytes, f"layer {layer} could keep all"
            runs = [bench.run("one fewer", [replace(stage, recompute=fewer)], pack) for pack in bench.batches]
            above.append(any(bench.above_limit(readings) for readings in runs))
    assert any(above)


def test_the_four_steps_are_printed_and_kept_in_the_plan(tight):
    (device,) = tight.devices
    steps = device.steps(tight.limit_bytes)
    assert [(x.before_bytes, x.after_bytes) for x in steps] == [
        (tight.limit_bytes, device.full_peak_bytes),
        (device.full_peak_bytes, device.full_peak_bytes + max(int(x.measured_bytes) for x in device.kinds)),
        (device.full_peak_bytes, device.predicted_bytes),
        (device.predicted_bytes, device.peak_bytes),
    ]
    assert steps[-1].bought.startswith(f"it fits: {format_bytes(tight.limit_bytes - device.peak_bytes)} left")
    (told,) = (x for x in tight.details.plan.assumptions if "in four steps" in x)
    assert all(f"{step.what}: {format_bytes(step.before_bytes)} to " in told for step in steps)
    stream = io.StringIO()
    print_probe(tight, Console(file=stream, width=100))
    assert "The four steps on device 0" in stream.getvalue()
    assert all(step.what[:20] in stream.getvalue() for step in steps)


def test_the_probed_plan_holds_and_predicts_what_was_measured(folder, tight, tmp_path):
    write_plan(tight.details, tmp_path / "probed")
    assert check_plan(tmp_path / "probed") == []
    found = reload_plan(tmp_path / "probed")
    assert found.plan == tight.details.plan
    assert found.plan.inputs.training.costs == "probed"
    assert found.plan.inputs.cluster.memory_bytes == int(5.2 * MIB)
    assert found.case.setting.profile.layers == tight.details.profile.layers
    assert load_profile(tmp_path / "probed" / "profile.json").method == "probed"
    before = load_plan(folder / "alone").decisions
    assert replace(found.plan.decisions, recompute=()) == replace(before, recompute=())
    (device,) = tight.devices
    assert 0.95 < device.predicted_bytes / device.peak_bytes < 1.1
    said = "\n".join(found.plan.assumptions)
    assert said.count("Recompute was probed on CPU") == said.count("Bytes were measured on CPU") == 1


@pytest.mark.integration  # many training steps
def test_enough_memory_recomputes_nothing_and_the_peak_was_predicted(folder):
    result = probe(settings_of(folder, 40))
    (device,) = result.devices
    assert device.recompute == {}
    # packs of several samples keep masks as well, and each tier is counted as in the pack where it keeps most
    assert 0.95 < device.predicted_bytes / device.peak_bytes < 1.1
    assert [run.what for run in result.runs].count(CHOICE) == len({run.pack for run in result.runs})


def test_an_understated_profile_steps_back_until_a_run_passes(folder):
    """As if nothing had been measured, by formulas that count a third of what is kept."""
    with bench_of(settings_of(folder, 5.0)) as bench:
        profile = bench.case.setting.profile
        layers = tuple(
            replace(
                layer,
                tiers=tuple(replace(tier, saved_bytes=tuple(x / 3 for x in tier.saved_bytes)) for tier in layer.tiers),
            )
            for layer in profile.layers
        )
        settled = settle(bench, with_profile(bench.case, replace(profile, layers=layers)))
        choices = {}
        for run in bench.runs:
            choices.setdefault(run.pack, []).append(bool(run.failed_devices))
        assert any(failed[0] for failed in choices.values())
        assert not any(failed[-1] for failed in choices.values())
        assert all(x.peak_bytes <= bench.limit_bytes for readings in settled.readings.values() for x in readings)
        assert settled.stages[0].num_recomputed() > 0
        # what made it step back stays in its profile: the plan's own check counts it
        (held,) = settled.case.problem.assess(settled.stages).memory
        assert held.total_bytes <= settled.case.problem.memory_bytes
        assert settled.case.setting.profile.transients(bench.case.work[0]).sum() > 0


def test_a_budget_that_full_recompute_exceeds_is_refused_with_the_missing_bytes(folder, tight):
    need = tight.devices[0].full_peak_bytes
    memory = 4.0
    missing = need - int(memory * MIB)
    with refused(PlanError, "0", "4.1", missing):
        probe(settings_of(folder, memory))
    with refused(PlanError):
        probe(settings_of(folder, need / MIB + 0.01))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"num_steps": 1}, ("num_steps", "--set", "1", "2")),
        ({"risk": 1.0}, ("1.0", "0", "1")),
        ({"memory_bytes": 2**60}, ("1048576", "80", "79.1")),
        ({"memory_bytes": 80}, ("80",)),
    ],
)
def test_bad_input_is_told(folder, change, names):
    with refused(TrimtabError, names):
        probe(replace(settings_of(folder, 5.2), **change))


def test_an_optimizer_that_torch_has_not_is_refused(folder, tmp_path):
    for file in (folder / "alone").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    plan = load_plan(tmp_path)
    training = replace(plan.inputs.training, optimizer="adamw_8bit")
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(replace(plan, inputs=replace(plan.inputs, training=training))))
    with refused(UnsupportedPlanError, "adamw_8bit", "torch.optim"):
        probe(settings_of(folder, 40, plan=tmp_path))


def test_a_plan_whose_ranks_share_images_is_refused(folder, tmp_path):
    found = reload_plan(folder / "alone")
    wanted = replace(found.case.options, dp=2, vision=VisionChoice(group="dp"))
    cluster = trimtab.parse_cluster("2xA100-80GB")
    write_plan(trimtab.make_plan(found.case.model, found.case.samples, cluster, wanted), tmp_path / "plan")
    with refused(PlanError):
        probe(settings_of(folder, 40, plan=tmp_path / "plan"))


@pytest.mark.integration
def test_two_ranks_probe_their_own_stages(folder, tmp_path):
    """Through torchrun and the command line."""
    memory = 3.2
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trimtab"]
    words += ["probe", str(folder / "two"), str(folder / "model"), "--device", "cpu", "--budget", f"{memory}MiB"]
    words += ["--risk", "0.5", "--out", str(tmp_path / "probed"), "--json"]
    run = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert check_plan(tmp_path / "probed") == []
    assert [device["device"] for device in said["devices"]] == [0, 1]
    assert all(0 < device["peak_bytes"] <= said["limit_bytes"] == int(memory * MIB) for device in said["devices"])
    assert all(device["recompute"] for device in said["devices"])
    assert {kind["tower"] for device in said["devices"] for kind in device["kinds"]} == {"vision", "language"}
    assert {kind["tower"] for kind in said["devices"][1]["kinds"]} == {"language"}


# -- the meter --------------------------------------------------------------------------------------------------------


def test_the_meter_counts_live_storages():
    meter, weight, batch = CpuMeter(), torch.ones(256), torch.ones(1000)
    with meter.watch([weight, weight.view(16, 16)], [batch]):
        first = weight * 2
        assert meter.held_bytes == 2048
        second = batch + first.sum()
        assert meter.held_bytes == 2048 + 4000
        del second
        assert meter.held_bytes == 2048
    assert meter.peak_bytes == 2048 + 4000 + 4  # and the sum


def test_the_meter_sees_what_a_recomputed_layer_computes_again():
    layer = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU()) for _ in range(1)))
    rows, meter, peaks = torch.ones(100, 8), CpuMeter(), {}
    for name in ("none", "full"):
        handle = apply(layer, ["0"] if name == "full" else [])
        with meter.watch(layer.parameters(), [rows]):
            loss = layer(rows).sum()
            peaks[name, "kept"] = meter.held_bytes
            loss.backward()
        peaks[name] = meter.peak_bytes
        handle.remove()
        layer.zero_grad()
        del loss
    once = 100 * 64 * 4
    assert peaks["none", "kept"] - peaks["full", "kept"] == pytest.approx(once, abs=64)
    assert peaks["full"] >= peaks["none", "kept"]
    assert np.isclose(peaks["full"], peaks["none"], rtol=0.3)
