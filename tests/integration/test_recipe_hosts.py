"""Plans in LLaMA-Factory's own training and in axolotl's own plug-ins and Trainer: the losses of a plain one.

pip install datasets==5.2.0 omegaconf fire addict colorama posthog schedulefree
pip install --no-deps --ignore-requires-python llamafactory==0.9.5 axolotl==0.21.0 peft trl==1.16.0
For LLaMA-Factory trl==0.24.0 in the place of 1.16.0.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from export_cases import decide
from trimtab.adapters.frameworks import find_target
from trimtab.adapters.running import Launch
from trimtab.plan.file.reload import reload_plan
from trimtab.specs import ParallelDims

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch")
pytest.importorskip("datasets", reason="needs datasets 5.2.0")
transformers = pytest.importorskip("transformers")

from trimtab import balanced, open_conversations  # noqa: E402
from trimtab.demo import draw_dataset  # noqa: E402
from trimtab.torch import PackedCollator, PlanDataset  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_with_trainer as example  # noqa: E402

RUN: dict[str, Any] = {
    "max_steps": 4,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}


LAUNCH = Launch(dtype="fp32", attention="sdpa", fused_kernels=False)  # what a CPU without other packages runs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Folder of data, a tiny model with weights and tokenizer, its plan; and the losses of four steps."""
    folder = tmp_path_factory.mktemp("hosts")
    data = draw_dataset(folder / "data", num_samples=36)
    tokenizer = transformers.AutoTokenizer.from_pretrained(data)
    processor = example.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16)
    config = example.tiny_config(tokenizer)
    tokenizer.save_pretrained(folder / "model")
    example.plan_data(config, processor, data / "data.jsonl", folder)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "model")
    config.save_pretrained(folder / "model")
    rows = open_conversations(folder / "plan", folder / "model")
    trainer = transformers.Trainer(
        model=load(folder),
        args=transformers.TrainingArguments(
            output_dir=str(folder / "run"), gradient_accumulation_steps=2, remove_unused_columns=False, **RUN
        ),
        train_dataset=PlanDataset(rows, rows.records.samples, on_error="filler"),
        data_collator=PackedCollator(config, attention="sdpa"),
    )
    return folder, losses(balanced(trainer, folder / "plan"))


def load(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder / "model", attn_implementation="sdpa")


def losses(trainer: Any) -> list[float]:
    if not trainer.state.log_history:
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def settings(name: str, plan: Path) -> dict[str, Any]:
    """What `trimtab export NAME` prints of the plan."""
    case = reload_plan(plan).case
    found = decide(
        case.model, reload_plan(plan).stages, dims=ParallelDims(), num_microbatches=2, zero_stage=0, launch=LAUNCH
    )
    told = yaml.safe_load(find_target(name).export(found).text)
    assert isinstance(told, dict)
    return told


def test_llama_factory_trains_the_packs_of_the_plan(made, tmp_path, monkeypatch):
    folder, meant = made
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")  # it asks for Transformers 5.6 at most
    if importlib.util.find_spec("torchaudio") is None:  # imported, and not used for images
        audio = ModuleType("torchaudio")
        audio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        monkeypatch.setitem(sys.modules, "torchaudio", audio)
    pytest.importorskip("llamafactory", reason="needs llamafactory 0.9.5")
    trl = pytest.importorskip("trl")
    if not hasattr(trl, "PPOConfig"):
        pytest.skip("LLaMA-Factory imports what trl 0.24 had last: pip install --no-deps trl==0.24.0")
    from llamafactory.train.sft import workflow

    from trimtab.runtime.training import llama_factory_run

    trainers: list[Any] = []
    first = workflow.CustomSeq2SeqTrainer.__init__

    def remember(trainer: Any, *words: Any, **given: Any) -> None:
        trainers.append(trainer)
        first(trainer, *words, **given)

    monkeypatch.setattr(workflow.CustomSeq2SeqTrainer, "__init__", remember)
    for name in ("get_dataset", "CustomSeq2SeqTrainer"):
        monkeypatch.setattr(workflow, name, getattr(workflow, name))  # put back afterwards
    own = {"model_name_or_path": str(folder / "model"), "template": "qwen2_vl", "output_dir": str(tmp_path)}
    llama_factory_run.train(str(folder / "plan"), settings("llama-factory", folder / "plan") | own | RUN)
    assert losses(trainers[0]) == pytest.approx(meant, rel=1e-5)


def test_axolotl_reads_our_settings_and_its_trainer_trains_the_packs(made, tmp_path):
    folder, meant = made
    pytest.importorskip("axolotl", reason="needs axolotl 0.21.0")
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.config import AxolotlInputConfig

    given = settings("axolotl", folder / "plan") | {"base_model": str(folder / "model"), "learning_rate": 1e-2}
    given["datasets"][0]["path"] = str(folder / "plan")
    cfg = DictDefault(AxolotlInputConfig(**given).model_dump(exclude_none=True))
    manager = PluginManager.get_instance()
    manager.register(cfg.plugins[0])
    meta = manager.load_datasets(cfg)
    model = load(folder)
    manager.post_model_load(cfg, model)
    names = ("sample_packing", "gradient_accumulation_steps", "remove_unused_columns")
    arguments = AxolotlTrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=cfg.micro_batch_size, **{n: cfg[n] for n in names}, **RUN
    )
    trainer = AxolotlTrainer(model=model, args=arguments, train_dataset=meta.train_dataset)
    manager.post_trainer_create(cfg, trainer)
    assert meta.total_num_steps == reload_plan(folder / "plan").case.schedule.num_steps
    assert losses(trainer) == pytest.approx(meant, rel=1e-5)
