"""Packs as a Hugging Face data set, in the Trainer and in TRL's SFTTrainer: the steps of the plan, with its losses.

pip install datasets==5.2.0
pip install --no-deps trl==1.16.0
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch")
pytest.importorskip("datasets", reason="needs datasets 5.2.0")
transformers = pytest.importorskip("transformers")

from trimtab import PackedCollator, PlanDataset, PlanTrainerMixin, ReadingOptions, open_conversations  # noqa: E402
from trimtab.demo.draw import draw_dataset  # noqa: E402
from trimtab.errors import PlanError  # noqa: E402
from trimtab.runtime.data.dataset import collate_packs  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_with_trainer as example  # noqa: E402


class Planned(PlanTrainerMixin, transformers.Trainer):  # type: ignore[misc,name-defined]
    """The way that needs Transformers 5.17."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, PlanDataset]:
    folder = tmp_path_factory.mktemp("hf")
    data = draw_dataset(folder / "data", num_samples=36)
    tokenizer = transformers.AutoTokenizer.from_pretrained(data.folder)
    processor = example.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16)
    config = example.tiny_config(tokenizer)
    example.plan_data(config, processor, data, folder)
    rows = open_conversations(folder / "plan", folder / "model", ReadingOptions(tokenizer=data.tokenizer))
    return folder, config, PlanDataset(rows, rows.records.samples, on_error="filler")


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    return kind(
        output_dir=str(folder / "run"),
        max_steps=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        **more,
    )


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trl_and_the_trainer_run_the_steps_of_the_plan(made: tuple[Path, Any, PlanDataset], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs trl 1.16.0: pip install --no-deps trl==1.16.0")
    folder, config, data = made
    collate = PackedCollator(config, attention="sdpa")

    def model() -> Any:
        torch.manual_seed(0)
        return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")

    usual = arguments(transformers.TrainingArguments, tmp_path)
    planned = losses(
        Planned(
            model=model(), args=usual, train_dataset=data, data_collator=collate, plan=folder / "plan", reshuffle=False
        )
    )
    packs = data.as_hf(folder / "plan")
    given = {"train_dataset": packs, "data_collator": collate_packs(collate)}
    plain = losses(transformers.Trainer(model=model(), args=usual, **given))
    sft = arguments(trl.SFTConfig, tmp_path, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "data")
    tuned = losses(trl.SFTTrainer(model=model(), args=sft, processing_class=tokenizer, **given))
    assert len(planned) == 4
    assert plain == pytest.approx(planned, rel=1e-5)
    assert tuned == pytest.approx(planned, rel=1e-5)


def test_items_are_the_packs_in_the_order_of_the_plan(made: tuple[Path, Any, PlanDataset]) -> None:
    folder, _, data = made
    packs = data.as_hf(folder / "plan")
    samples = [sample["id"] for number in range(len(packs)) for sample in packs[number]["samples"]]
    assert sorted(samples) == sorted(data[row]["id"] for row in range(len(data)) if data[row]["id"] in set(samples))
    assert len(samples) == len(set(samples)) > 10
    with pytest.raises(PlanError, match="2 packs came as one batch"):
        collate_packs(list)([packs[0], packs[1]])
