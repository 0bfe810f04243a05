"""`bench/hosts.py` on sources of our own: what has drifted is said, what has not is not."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import hosts
from trimtab.adapters.pai_megatron import SCRIPTS


def source(files: dict[str, str]) -> hosts.Source:
    return hosts.Source(version="host-1.0", read=files.get, paths=tuple(files))


def pai_scripts(**changed: tuple[str, ...]) -> hosts.Source:
    files = {}
    for family, (folder, names) in SCRIPTS.items():
        lines = [f"{name}=${{{at}}}" for at, name in enumerate(changed.get(family, names), start=1)]
        files[f"examples/{folder}/run_mcore_qwen.sh"] = "\n".join([*lines, "MP_PP0_LAYERS MP_AC_LAYERS"])
    return source(files)


def test_a_script_with_other_arguments_has_drifted() -> None:
    assert list(hosts.check_pai(pai_scripts())) == []
    names = SCRIPTS["qwen2_vl"][1]
    (said,) = hosts.check_pai(pai_scripts(qwen2_vl=(*names[:12], "ETP", *names[12:])))
    assert said.startswith("examples/qwen2_vl/run_mcore_qwen.sh takes 25 arguments: ENV, MODEL_SIZE")


SWIFT = """
class Arguments:
    freeze_vit: bool = {freeze_vit}
    freeze_aligner: bool = True
    freeze_llm: bool = False
    recompute_granularity: str = 'selective'
"""
PACKING = "class PackingDataset:\n    self.packed_idx self.packed_length self.packing_length\n"


@pytest.mark.parametrize("freeze_vit", ["True", "False"])
def test_a_default_that_changed_and_a_field_that_went_have_drifted(freeze_vit: str) -> None:
    fields = "".join(f"    {name}: int = 0\n" for name in hosts.exported("ms-swift") if not name.startswith("freeze_"))
    fields = fields.replace("    recompute_granularity: int = 0\n", "").replace("    packing_length: int = 0\n", "")
    said = list(
        hosts.check_swift(
            source(
                {
                    "swift/arguments/sft_args.py": SWIFT.format(freeze_vit=freeze_vit) + fields,
                    "swift/dataset/packing.py": PACKING,
                }
            )
        )
    )
    assert "megatron sft has no packing_length" in said
    assert ("freeze_vit is True by default no longer, but False" in said) == (freeze_vit == "False")
    assert len(said) == 1 + (freeze_vit == "False")


def test_a_host_without_source_is_named_and_passed_over(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hosts.py", "--hosts", str(tmp_path)])
    assert hosts.main() == 0
    assert f"verl: no source in {tmp_path}" in capsys.readouterr().out


def test_a_hook_of_axolotl_and_a_name_of_llama_factory_that_went_have_drifted() -> None:
    said = list(hosts.check_axolotl(source({"axolotl/integrations/base.py": "def load_datasets(): ..."})))
    assert said[-2:] == ["BasePlugin has no post_model_load", "BasePlugin has no post_trainer_create"]
    said = list(hosts.check_llama_factory(source({})))
    assert "train/sft/workflow.py has no trainer = CustomSeq2SeqTrainer(, which our run replaces" in said
    said = list(hosts.check_mindspeed(source({})))
    assert len(said) == 6


# -- versions of Transformers ------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench.versions import COMMANDS, PAGE, VERSIONS, make_page, read_results  # noqa: E402


def test_the_page_is_what_the_results_say():
    assert PAGE.read_text(encoding="utf-8") == make_page(read_results())


def test_every_example_was_run_under_the_version_that_this_project_is_made_with():
    newest = read_results()["versions"][VERSIONS[-1]]
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert newest.keys() == examples | COMMANDS.keys()
    assert set(newest.values()) == {"yes"}
