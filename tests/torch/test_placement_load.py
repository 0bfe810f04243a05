"""Loading a folder by a device map: memory, offload, and what is refused. Needs torch and Transformers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from simulated_devices import counted, simulated
from spread_cases import GENERATE, make_case, maps_of
from tiny_models import IMAGE_TOKEN, INTERNVIT, TEXT
from transformers.integrations.accelerate import expand_device_map

from refusals import refused
from trimtab.errors import ConfigError, PartitionError
from trimtab.placement.placed import Placement, read_device_map
from trimtab.plan.file.placement import map_json
from trimtab.runtime.placing.device_units import resolve_units
from trimtab.runtime.placing.load import load_placed, move_inputs

MIB = 2**20
LLM = "model.language_model"


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    return make_case("internvl", tmp_path_factory.mktemp("internvl"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return make_case("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture
def folder(internvl, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(internvl.folder, tmp_path / "copy"))


def whole(case, device):
    return {name: device for names in case.chain for name in names}


def answers(model, case):
    with torch.no_grad():
        return torch.equal(model.generate(**case.inputs, **GENERATE).cpu(), case.tokens)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_host_memory_never_holds_a_shard_beside_what_stays_there(tmp_path):
    shapes = {
        "small": {},
        "large": {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 9},
    }
    for name, shape in shapes.items():
        config = transformers.AutoConfig.for_model(
            "internvl",
            vision_config=INTERNVIT,
            text_config={**TEXT, "model_type": "qwen2", **shape},
            image_token_id=IMAGE_TOKEN,
            tie_word_embeddings=False,
        )
        model = transformers.AutoModelForImageTextToText.from_config(config)
        model.save_pretrained(tmp_path / name, max_shard_size="100MB")
    shards = sorted((tmp_path / "large").glob("*.safetensors"))
    largest = max(shard.stat().st_size for shard in shards)
    assert len(shards) == 6
    script = Path(__file__).with_name("load_memory.py")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "large")], capture_output=True, text=True, check=True, timeout=300
    )
    found = json.loads(run.stdout)
    assert found["gpu"]["devices"] > 5 * largest > found["disk"]["devices"]  # all of it went there, or next to nothing
    assert found["gpu"]["peak"] <= largest
    assert found["disk"]["peak"] <= largest
    # what was resident before and lay free counts in neither: the lower end shows only that the layers were seen
    assert 0.9 * found["cpu"]["layers"] < found["cpu"]["peak"] <= found["cpu"]["layers"] + largest


# -- offload ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_tied_weights_may_be_spilled_together(gemma3, home):
    """The embedding runs in host memory by rows, the head borrows the same weight for each token."""
    placed = {**whole(gemma3, 0), f"{LLM}.embed_tokens": home, "lm_head": home}
    with simulated():
        model = load_placed(gemma3.folder, placed)
        with torch.no_grad(), counted() as traffic:
            tokens = model.generate(**move_inputs(model, gemma3.inputs), **GENERATE)
        assert torch.equal(tokens.cpu(), gemma3.tokens)
        head = gemma3.model.lm_head.weight
        rows = (gemma3.inputs["input_ids"].shape[1] + GENERATE["max_new_tokens"]) * head.shape[1] * 4
        moved = GENERATE["max_new_tokens"] * head.numel() * 4
        pixels = gemma3.inputs["pixel_values"].numel() * 4
        assert moved < traffic.host_to_device < moved + rows + pixels + 1000


def test_disk_without_a_folder_writes_nothing(internvl, folder):
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    placed = {**whole(internvl, 0), f"{LLM}.layers.1": "disk", "model.vision_tower.embeddings": "disk"}
    with simulated():
        assert answers(load_placed(folder, placed), internvl)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_disk_with_a_folder_reads_from_there(internvl, folder, tmp_path):
    placed = {**whole(internvl, 0), f"{LLM}.layers.1": "disk"}
    with simulated():
        model = load_placed(folder, placed, offload_folder=tmp_path / "offload")
        shutil.rmtree(folder)
        assert answers(model, internvl)
    assert all(f"{LLM}.layers.1." in path.name for path in (tmp_path / "offload").iterdir())


def test_what_is_stored_in_another_dtype_cannot_stay_in_its_files(internvl, tmp_path):
    placed = {**whole(internvl, 0), "lm_head": "disk"}
    with simulated():
        with refused(PartitionError, "lm_head.weight"):
            load_placed(internvl.folder, placed, dtype=torch.bfloat16)
        model = load_placed(internvl.folder, placed, dtype=torch.bfloat16, offload_folder=tmp_path / "offload")
        assert model(**internvl.inputs).logits.dtype == torch.bfloat16


def test_without_an_accelerator_all_runs_on_the_cpu(internvl):
    model = load_placed(internvl.folder, {**whole(internvl, "cpu"), f"{LLM}.layers.0": "disk"})
    assert answers(model, internvl)
    assert not hasattr(model, "_hf_hook")


# -- maps -------------------------------------------------------------------------------------------------------------


def test_a_coarse_map_is_refined_so_that_no_name_is_taken_for_another():
    config = transformers.AutoConfig.for_model("qwen2", **{**TEXT, "num_hidden_layers": 12})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_parameters()]
    coarse = {"": "cpu", "model.layers.1": "disk"}
    placed = resolve_units(model, coarse)
    refined = {unit.name: unit.home for unit in placed.units}
    right = {name: "disk" if name.startswith("model.layers.1.") else "cpu" for name in names}
    assert expand_device_map(refined, names) == right
    assert expand_device_map(coarse, names) != right  # layers 10 and 11 are taken for parts of layer 1


def test_a_written_map_runs_what_is_copied_where_the_plan_says(internvl, tmp_path):
    """A bare map alone would run it on the GPU of the next module, whose memory the plan has given away."""
    guessed = 0
    for number, drawn in enumerate(maps_of(internvl, 36)):
        if not isinstance(drawn.placement, Placement) or not drawn.placement.spilled:
            continue
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(map_json(drawn.placement)))
        written = read_device_map(path)
        with simulated():
            planned = load_placed(internvl.folder, drawn.placement)
            read = load_placed(internvl.folder, written.device_map, runs_on=written.runs_on)
            bare = load_placed(internvl.folder, written.device_map)
        devices = [
            [
                getattr(getattr(m.get_submodule(name), "_hf_hook", None), "execution_device", None)
                for name in written.runs_on
            ]
            for m in (planned, read, bare)
        ]
        assert devices[0] == devices[1]
        guessed += devices[1] != devices[2]
    assert guessed > 0
    with simulated(), refused(PartitionError, "lm_head", "9"):
        load_placed(internvl.folder, whole(internvl, 0), runs_on={"lm_head": 9})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"lm_head": None}, ("lm_head",)),
        ({f"{LLM}.rotary_emb": None}, ("model.language_model.rotary_emb",)),
        ({"lm_head": 8}, ("lm_head", "8", "0", "7")),
        ({"lm_head": "gpu"}, ("lm_head", "gpu")),
        ({"lm_head": -1}, ("lm_head",)),
        ({f"{LLM}.layers.3": 0}, ("model.language_model.layers.3", "InternVL")),
    ],
)
def test_a_map_that_does_not_fit_is_refused(internvl, change, names):
    placed = {name: device for name, device in {**whole(internvl, 0), **change}.items() if device is not None}
    with simulated(), refused(PartitionError, names):
        load_placed(internvl.folder, placed)


def test_all_problems_of_a_map_are_named_at_once(internvl):
    placed = {**whole(internvl, 0), "lm_head": 9, "phantom": 0}
    del placed[f"{LLM}.norm"]
    with simulated(), pytest.raises(PartitionError) as caught:
        load_placed(internvl.folder, placed)
    assert [word in str(caught.value) for word in ("on 9", "phantom", "language_model.norm: add it")] == [True] * 3


def test_the_map_of_another_model_is_named_as_such(internvl):
    with simulated(), refused(PartitionError, "InternVL", "3"):
        load_placed(internvl.folder, {"vision_model": 0, "mlp1": 0, "language_model.output": 1})

    with simulated(), pytest.raises(PartitionError) as caught:
        load_placed(internvl.folder, {"vision_model": 0, "mlp1": 1})
    assert "model.vision_tower" not in str(caught.value)  # for each of its modules
    with simulated(), refused(PartitionError, "9"):
        load_placed(internvl.folder, {"": 9})


def test_a_tower_without_a_device_is_named_once(internvl):
    placed = {k: v for k, v in whole(internvl, 0).items() if not k.startswith("model.vision_tower")}
    with simulated(), pytest.raises(PartitionError) as caught:
        load_placed(internvl.folder, placed)
    assert str(caught.value).count("model.vision_tower") == 1


def test_tied_weights_on_two_devices_are_refused(gemma3):
    with simulated(), refused(PartitionError, "0"):
        load_placed(gemma3.folder, {**whole(gemma3, 0), "lm_head": 1})


def test_an_accelerator_that_is_not_there_is_refused(internvl):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with refused(PartitionError, "0"):
        load_placed(internvl.folder, whole(internvl, 0))


# -- folders ----------------------------------------------------------------------------------------------------------


def damage(folder, what):
    index = folder / "model.safetensors.index.json"
    shards = sorted(folder.glob("*.safetensors"))
    written = json.loads(index.read_text())
    if what == "shard missing":
        shards[1].unlink()
    elif what == "shard cut short":
        shards[1].write_bytes(shards[1].read_bytes()[:-8])
    elif what == "header cut short":
        shards[1].write_bytes(b"\xff" * 7)
    elif what == "no header":
        shards[1].write_bytes((4).to_bytes(8, "little") + b"nono")
    elif what == "tensor missing":
        name = next(iter(written["weight_map"]))
        written["weight_map"]["model.extra"] = written["weight_map"][name]
    elif what == "outside":
        written["weight_map"]["lm_head.weight"] = "../x.safetensors"
    elif what == "pickle":
        written["weight_map"]["lm_head.weight"] = "pytorch_model.bin"
    elif what == "no weights":
        for path in [index, *shards]:
            path.unlink()
        torch.save({}, folder / "pytorch_model.bin")
    elif what == "weight missing":
        del written["weight_map"]["language_model.lm_head.weight"]
    elif what == "index":
        written = []
    if what != "no weights":
        index.write_text(json.dumps(written))


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("shard missing", ("00002",)),
        ("shard cut short", ("model-00002-of-00007.safetensors",)),
        ("header cut short", ("model-00002-of-00007.safetensors",)),
        ("no header", ("safetensors",)),
        ("tensor missing", ("model.extra",)),
        ("outside", ("../x.safetensors",)),
        ("pickle", ("pytorch_model.bin",)),
        ("no weights", ("model.safetensors",)),
        ("weight missing", ("lm_head.weight",)),
        ("index", ("weight_map",)),
    ],
)
def test_a_damaged_folder_is_refused(folder, what, names):
    damage(folder, what)
    with refused(ConfigError, names):
        load_placed(folder, {"": "cpu"})


@pytest.mark.parametrize(
    ("change", "names"),
    [({"vocab_size": 230}, ("lm_head.weight", "config.json")), ({"num_hidden_layers": "four"}, ("config.json",))],
)
def test_a_config_that_cannot_be_placed_is_refused(folder, change, names):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with refused(ConfigError, names):
        load_placed(folder, {"": "cpu"})


def test_a_generation_config_that_is_none_is_refused(folder):
    (folder / "generation_config.json").write_text("{")
    with refused(ConfigError, "generation_config.json"):
        load_placed(folder, {"": "cpu"})


def test_code_of_the_folder_does_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}})
    )
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Mine: ...\n")
    with refused(ConfigError, "config.json"):
        load_placed(folder, {"": "cpu"})
    assert not (folder / "ran").exists()


def test_a_model_that_generates_no_text_is_refused(tmp_path):
    config = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.SiglipVisionModel(config).save_pretrained(tmp_path)
    with refused(ConfigError, "siglip_vision_model"):
        load_placed(tmp_path, {"": "cpu"})


def test_a_folder_that_is_none_is_refused(tmp_path):
    with refused(ConfigError, "config.json"):
        load_placed(tmp_path / "nowhere", {"": "cpu"})
