"""`trimtab train`: the same losses on any number of ranks and stages, and after a resume; needs torch."""

import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from train_runs import load_tensors, run_on_ranks, settings_of, values_of, write_run, write_variant

from refusals import refused
from trimtab import ReadingOptions, load_plan
from trimtab.errors import ConfigError, PlanError, SampleError, TrimtabError
from trimtab.plan.file.reload import load_details
from trimtab.plan.runs import compare_times, read_run_log, read_run_of
from trimtab.report.html import html_report
from trimtab.report.run import run_lines
from trimtab.runtime.pipeline.pipeline import Pipeline, StepResult
from trimtab.runtime.training.checkpoint import list_checkpoints
from trimtab.runtime.training.loop import fit_layout, refuse_useless, train

FOLDERS = ("plan", "export")  # settings that name one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small InternVL and its plan for dp 2 x pp 2; losses of one process over four steps."""
    path = tmp_path_factory.mktemp("internvl")
    write_run(path, "internvl")
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """Losses of four steps by one process without stages, with checkpoints behind steps 2 and 4."""
    plan = write_variant(folder, "alone", num_stages=1)
    settings = settings_of(folder, plan, "run-alone", save_every=2, export=folder / "exported")
    train(settings)
    return values_of(settings)


@pytest.fixture(scope="module")
def pairs(folder, alone):
    """Runs of four steps on two pipeline ranks, by name, each with the run of one process that it should equal."""
    frozen = ("vision", "projector")
    whole = {
        "frozen": settings_of(
            folder, write_variant(folder, "whole-frozen", num_stages=1, frozen=frozen), "run-whole-frozen"
        ),
        "bfloat16": settings_of(folder, folder / "alone", "run-whole-bf16", dtype="bfloat16"),
        "momentum": settings_of(folder, folder / "alone", "run-whole-tight", max_grad_norm=0.05, optimizer="SGD"),
    }
    for settings in whole.values():
        train(settings)
    usual = settings_of(folder, folder / "alone", "run-alone")
    kinds = {
        "1F1B": (usual, {}, {}),
        "ZBVZeroBubble": (usual, {"name": "ZBVZeroBubble", "num_chunks": 2}, {}),
        "recompute": (usual, {"recompute": True}, {}),
        "frozen": (whole["frozen"], {"frozen": frozen}, {}),
        "bfloat16": (whole["bfloat16"], {}, {"dtype": "bfloat16"}),
        "clipped": (whole["momentum"], {}, {"max_grad_norm": 0.05, "optimizer": "SGD"}),
    }
    runs = {}
    for name, (one, change, more) in kinds.items():
        plan = write_variant(folder, f"two {name}", num_stages=2 * change.get("num_chunks", 1), **change)
        runs[name] = (one, settings_of(folder, plan, f"run-two {name}", **more))
    run_on_ranks([two for _, two in runs.values()], 2)
    return runs


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble", "recompute", "frozen", "clipped"])
def test_every_schedule_trains_as_one_process_does(pairs, name):
    one, two = pairs[name]
    assert values_of(two) == pytest.approx(values_of(one), rel=5e-6)
    assert values_of(two, "grad_norm") == pytest.approx(values_of(one, "grad_norm"), rel=1e-4)
    assert values_of(two, "num_tokens") == values_of(one, "num_tokens")
    assert len(set(values_of(two))) == 4


def test_gradients_are_clipped_over_all_stages_together(pairs):
    one, two = pairs["clipped"]
    assert min(values_of(two, "grad_norm")) > 0.05  # every step was clipped
    assert values_of(one) != values_of(pairs["1F1B"][0])


def test_recompute_changes_no_bit(pairs):
    assert values_of(pairs["recompute"][1]) == values_of(pairs["1F1B"][1])
    assert values_of(pairs["recompute"][1], "grad_norm") == values_of(pairs["1F1B"][1], "grad_norm")


def test_frozen_towers_stay_as_they_are(folder, pairs):
    one, two = pairs["frozen"]
    assert values_of(one) != values_of(pairs["1F1B"][0])
    before, after = (
        load_tensors(list_checkpoints(run.out)[-1], "model.vision_tower")
        for run in (settings_of(folder, folder / "alone", "run-alone"), two)
    )
    assert before.keys() == after.keys()
    drawn = load_tensors(list_checkpoints(one.out)[-1], "model.vision_tower")
    assert all(torch.equal(after[name], drawn[name]) for name in drawn)
    assert not all(torch.equal(before[name], drawn[name]) for name in drawn)


def test_bfloat16_loses_nearly_as_float32(pairs):
    one, two = pairs["bfloat16"]
    exact = values_of(pairs["1F1B"][0])
    assert values_of(two) == pytest.approx(exact, rel=2e-2)
    assert values_of(two) != pytest.approx(exact, rel=1e-6)  # something was rounded
    assert values_of(two) == pytest.approx(values_of(one), rel=1e-2)


def test_the_log_compares_every_step_with_the_plan(pairs):
    log = read_run_log(pairs["1F1B"][1].out / "run.jsonl")
    assert log.header.pp == 2
    assert len(log.header.planned_memory_bytes) == 2
    assert len(log.warm) == 3  # the first pays for warming up
    assert compare_times(log, band=0.5).ratio > 1  # no CPU is an A100


def test_the_report_takes_the_run(folder, pairs):
    settings = pairs["ZBVZeroBubble"][1]
    details = load_details(settings.plan)
    log = read_run_of(details.plan, settings.out / "run.jsonl")
    assert "4 steps on CPU" in run_lines(details, log)[0]
    assert "Training run" in html_report(details, run=log)


def test_a_broken_image_stops_the_run_or_becomes_a_filler(tmp_path, capsys):
    write_run(tmp_path, "internvl")
    plan = write_variant(tmp_path, "one", num_stages=1)
    whole = settings_of(tmp_path, plan, "run", steps=None)
    train(whole)
    image = sorted((tmp_path / "data").rglob("*.png"))[0]
    image.write_bytes(image.read_bytes()[:60])
    with refused(SampleError):
        train(settings_of(tmp_path, plan, "run-stopped", steps=None))
    filled = settings_of(tmp_path, plan, "run-filled", steps=None, on_bad_sample="filler")
    train(filled)
    assert values_of(filled, "num_tokens") == values_of(whole, "num_tokens")  # the plan's steps, of the plan's size
    assert sum(values_of(filled, "num_fillers")) == 1
    assert "1 samples could not be read, and fillers" in capsys.readouterr().err
    assert sum(values_of(whole, "num_fillers")) == 0
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    other = replace(filled, out=tmp_path / "run-other", reading=ReadingOptions(chat_template=plain))
    with refused(SampleError):
        train(other)
    assert values_of(filled) != values_of(whole)


def test_a_loss_that_is_no_number_ends_the_run_without_a_checkpoint(folder, alone):
    settings = settings_of(
        folder, folder / "alone", "run-nan", learning_rate=1e30, max_grad_norm=None, save_every=1, keep=None
    )
    with pytest.raises(TrimtabError, match=r"(loss|gradient norm) of step [234] is (nan|inf)"):
        train(settings)
    assert len(list_checkpoints(settings.out)) == len(values_of(settings)) > 0


@pytest.mark.parametrize("clip", [1.0, None])
def test_gradients_that_are_no_numbers_reach_no_weight(folder, alone, monkeypatch, clip):
    """A finite loss may have infinite gradients, which clipping scales to 0 x inf."""
    monkeypatch.setattr(Pipeline, "gradient_norm", lambda _: torch.tensor(float("inf")))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: pytest.fail("weights were changed"))
    settings = settings_of(folder, folder / "alone", f"run-inf {clip}", max_grad_norm=clip, save_every=1)
    with refused(TrimtabError, "1"):
        train(settings)
    assert list_checkpoints(settings.out) == []


def test_a_step_without_labels_ends_the_run():
    nothing = StepResult(loss=torch.zeros(()), denominator=torch.zeros(()))
    with refused(TrimtabError, "7"):
        refuse_useless(7, nothing, torch.zeros(()))


def test_resuming_gives_the_same_losses(folder, alone):
    shorter = settings_of(folder, folder / "alone", "run-resumed", steps=2)
    train(shorter)
    assert values_of(shorter) == alone[:2]
    with (shorter.out / "run.jsonl").open("a") as log:
        log.write('{"kind": "step", "st')  # as a kill leaves it
    longer = replace(shorter, steps=4, resume=True)
    records = train(longer)
    assert [record.step for record in records] == [3, 4]
    found = read_run_log(longer.out / "run.jsonl")
    assert [record.loss for record in found.steps] == alone
    assert found.starts == (1, 3)


def test_a_run_resumes_on_other_ranks_and_stages(folder, alone):
    settings = settings_of(folder, folder / "alone", "run-moved", steps=2)
    train(settings)
    moved = replace(settings, plan=folder / "plan", steps=4, resume=True)
    run_on_ranks([moved], 4)
    assert values_of(moved) == pytest.approx(alone, rel=5e-6)


def test_the_exported_model_is_the_trained_one(folder, alone):
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "exported")
    assert not [name for name, p in model.named_parameters() if p.is_meta]
    trained = folder / "model-trained"
    shutil.copytree(folder / "model", trained)
    for file in (folder / "exported").glob("*.safetensors*"):
        shutil.copy(file, trained)
    again = settings_of(folder, folder / "alone", "run-exported", steps=1, random_weights=False, learning_rate=1e-12)
    assert train(replace(again, model=trained))[0].loss < alone[0]


def test_packs_that_ranks_cannot_share_are_refused(folder, alone):
    plan = load_plan(folder / "alone")
    with refused(PlanError, "4", "3"):
        fit_layout(plan, dp=3)
    two = load_plan(folder / "plan")
    with refused(PlanError, "4", "GPipe"):
        fit_layout(two, dp=4)


@pytest.mark.parametrize(
    ("out", "change", "names"),
    [
        ("no", {"random_weights": False}, ("--random-weights",)),
        ("no", {"optimizer": "SGD", "optimizer_options": {"beta": 2}}, ("beta=2",)),
        ("no", {"plan": "plan"}, ("2", "1")),
        ("no", {"export": "model"}, ("--export",)),
        ("no", {"export": "model/config.json"}, ("--export",)),
        ("run-alone", {}, ("00000004",)),
        ("run-alone", {"optimizer": "SGD", "resume": True, "steps": 6}, ("optimizer", "run")),
    ],
)
def test_what_cannot_be_run_is_refused_and_covers_nothing(folder, alone, out, change, names):
    settings = settings_of(folder, folder / "alone", out, **{k: x for k, x in change.items() if k not in FOLDERS})
    settings = replace(settings, **{name: folder / change[name] for name in FOLDERS if name in change})
    before = {path: path.stat().st_mtime_ns for path in (*(folder / "model").iterdir(), folder / "run-alone/run.jsonl")}
    with refused(TrimtabError, names):
        train(settings)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_tied_model_trains_resumes_and_exports_wherever_its_halves_lie(tmp_path):
    """On one device, on two, and both again on the first of two (ZBV); Adam's state moves along."""
    write_run(tmp_path, "qwen2_5_vl", tie_word_embeddings=True)
    one = write_variant(tmp_path, "one", num_stages=1)
    two = write_variant(tmp_path, "two", num_stages=2)
    fold = write_variant(tmp_path, "fold", num_stages=4, name="ZBVZeroBubble", num_chunks=2)
    whole = settings_of(tmp_path, one, "run-whole", steps=6, learning_rate=1e-2, export=tmp_path / "exported")
    train(whole)
    moved = replace(whole, out=tmp_path / "run-two", steps=2, export=None)
    train(moved)
    folded = replace(moved, out=tmp_path / "run-fold")
    shutil.copytree(moved.out, folded.out)
    further = [
        replace(moved, plan=two, steps=4, resume=True),
        replace(folded, plan=fold, steps=4, resume=True, export=tmp_path / "folded"),
    ]
    run_on_ranks(further, 2)
    for settings in further:
        names = {name for path in list_checkpoints(settings.out)[-1:] for name in load_tensors(path, "")}
        assert "model/model.language_model.embed_tokens.weight" in names
        assert "model/lm_head.weight" not in names
        train(replace(settings, plan=one, steps=6, export=None))
        assert values_of(settings) == pytest.approx(values_of(whole), rel=5e-6)
    for folder in (tmp_path / "exported", tmp_path / "folded"):
        model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
        assert model.lm_head.weight is model.get_input_embeddings().weight


def test_resuming_gives_the_same_losses_under_dropout_and_with_momentum(alone, tmp_path):
    write_run(tmp_path, "internvl", attention_dropout=0.5)
    plan = write_variant(tmp_path, "one", num_stages=1)
    options = {"optimizer": "SGD", "optimizer_options": {"momentum": 0.9, "nesterov": True}}
    whole = settings_of(tmp_path, plan, "run-whole", **options)
    train(whole)
    assert values_of(whole) != alone  # something was dropped
    half = replace(whole, out=tmp_path / "run-half", steps=2)
    train(half)
    train(replace(half, steps=4, resume=True))
    assert values_of(half) == values_of(whole)


def test_a_model_that_cannot_be_loaded_is_named(folder, alone, tmp_path):
    base = replace(settings_of(folder, folder / "alone", "no"), model=tmp_path / "model")
    with pytest.raises(ConfigError):
        train(base)
    shutil.copytree(folder / "model", tmp_path / "model")
    if not transformers.utils.is_flash_attn_2_available():
        with refused(ConfigError, "flash_attention_2", "ImportError"):
            train(replace(base, attention="flash_attention_2"))
    (exported,) = (folder / "exported").glob("*.safetensors")
    weights = exported.read_bytes()
    (tmp_path / "model" / "model.safetensors").write_bytes(weights[:-100])
    with refused(ConfigError):
        train(replace(base, random_weights=False))
    (tmp_path / "model" / "config.json").write_text("{")
    with refused(ConfigError, "config.json"):
        train(base)


def test_a_run_at_its_end_says_so(folder, alone, capsys):
    assert train(settings_of(folder, folder / "alone", "run-alone", steps=1, resume=True)) == []
    assert f"nothing is left to train: the run in {folder / 'run-alone'} is at step 4 of 1" in capsys.readouterr().err


def test_what_runs_and_was_not_planned_is_said_once(folder, alone, capsys):
    for name, dtype, words in (("fp32", "float32", ["1 ranks"]), ("bf16", "bfloat16", ["1 ranks", "bf16, and fp32"])):
        train(settings_of(folder, folder / "alone", f"run-said-{name}", steps=2, save=False, dtype=dtype))
        said = [line for line in capsys.readouterr().err.splitlines() if "not as planned" in line]
        assert len(said) == len(words)  # of two steps; the plan is for two ranks
        assert all(word in line for word, line in zip(words, said, strict=True))


def test_the_log_of_a_run_without_checkpoints_is_kept(folder, alone, capsys):
    settings = settings_of(folder, folder / "alone", "run-measured", save=False, steps=1)
    train(settings)
    first = (settings.out / "run.jsonl").read_bytes()
    train(replace(settings, seed=1))
    assert (settings.out / "run.1.jsonl").read_bytes() == first
    assert "is now run.1.jsonl" in capsys.readouterr().err
    assert len(values_of(settings)) == 1
