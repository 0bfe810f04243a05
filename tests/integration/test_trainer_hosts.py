"""Trainers and collators of other projects on a plan: the losses of the plain loop. Each is the project's own code.

pip install datasets==5.2.0 peft modelscope modelscope_hub addict
pip install --no-deps trl==1.16.0 llamafactory==0.9.5 ms-swift==4.6.0
"""

import importlib.machinery
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
PIL = pytest.importorskip("PIL.Image")

from trimtab import balanced  # noqa: E402
from trimtab.demo import draw_dataset  # noqa: E402
from trimtab.errors import PlanError  # noqa: E402

sys.path[:0] = [str(Path(__file__).parents[1] / "torch"), str(Path(__file__).parents[2] / "examples")]
import balanced_cases  # noqa: E402

import train_with_trainer as example  # noqa: E402

TEXTS = ("a red square", "what is written here", "two lines", "nothing", "a longer answer to it", "blue", "words alone")


class Case:
    """A tiny Qwen2.5-VL with the tokenizer of the demo, and its image processor."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(draw_dataset(folder, num_samples=2))
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.config = example.tiny_config(self.tokenizer)
        self.images = example.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 8)

    def model(self) -> Any:
        torch.manual_seed(0)
        return transformers.AutoModelForImageTextToText.from_config(self.config, attn_implementation="sdpa")

    def rows(self) -> list[dict[str, Any]]:
        """Conversations with an image each, but for two of words alone."""
        made = []
        for row, text in enumerate(TEXTS):
            image = [] if row in (1, 6) else [PIL.new("RGB", (56 + 28 * (row % 3), 84), (40 * row, 90, 200))]
            made.append({"question": "say" if not image else "see", "answer": text, "images": image})
        return made


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("hosts"))


def check(
    case: Case, folder: Path, data: Any, collate: Any, *, kind: Any = None, options: Any = None, **more: Any
) -> None:
    """`balanced` on this trainer with this collator, against each sample alone through the same collator.

    Then a run of other weights resumes it, and one whose weights the host leaves as they are is refused.
    """
    saving = {"save_strategy": "steps", "save_steps": 1, **more.pop("arguments", {})}

    def make(factor: float = 1.0) -> Any:
        model = case.model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        arguments = balanced_cases.arguments(folder, kind=options, **saving)
        of = balanced_cases.noted(kind or transformers.Trainer)
        trainer = of(model=model, args=arguments, train_dataset=data, data_collator=collate, **more)
        return balanced(trainer, balanced_cases.tables_of(), reshuffle=False)

    trainer, again, left = make(), make(1.5), make(1.5)
    trainer.train()
    assert trainer.losses == pytest.approx(balanced_cases.plain_losses(case.model(), data, collate), rel=1e-5)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert again.losses == pytest.approx(trainer.losses[2:], rel=1e-6)
    left._load_from_checkpoint = lambda *_: None
    with pytest.raises(PlanError, match="was not restored"):
        left.train(resume_from_checkpoint=str(folder / "checkpoint-2"))


class Processor(transformers.ProcessorMixin):  # type: ignore[misc,name-defined]
    """What TRL's trainer and collator ask of a processor, for conversations as `Case.rows` has them."""

    def __init__(self, case: Case) -> None:
        self.case, self.tokenizer, self.image_processor = case, case.tokenizer, case.images
        self.chat_template = None

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Nothing of it belongs to a checkpoint."""

    def apply_chat_template(self, conversations: list[Any], *, return_tensors: str, **_: Any) -> Any:
        parts = [[part for turn in talk for part in turn["content"]] for talk in conversations]
        images = [[part["image"] for part in talk if part["type"] == "image"] for talk in parts]
        text = ["\n".join(map(self.text, talk)) for talk in parts]
        return self(images=images if any(images) else None, text=text, return_tensors=return_tensors)

    @staticmethod
    def text(part: dict[str, Any]) -> str:
        return "<|vision_start|><|image_pad|><|vision_end|>" if part["type"] == "image" else str(part["text"])

    def __call__(self, *, images: Any, text: list[str], return_tensors: str, **_: Any) -> Any:
        given: dict[str, Any] = {}
        if images is not None:
            given = dict(self.case.images(images=[x for row in images for x in row], return_tensors=return_tensors))
            for grid in given["image_grid_thw"]:
                num = int(grid.prod()) // self.case.images.merge_size**2
                text = [x.replace("<|image_pad|>", "<|image|>" * num, 1) for x in text]
            text = [x.replace("<|image|>", "<|image_pad|>") for x in text]
        rows = self.case.tokenizer(text, padding=True, return_tensors=return_tensors)
        types = (rows["input_ids"] == self.case.config.image_token_id).long()
        return {
            **given,
            "input_ids": rows["input_ids"],
            "attention_mask": rows["attention_mask"],
            "mm_token_type_ids": types,
        }


def test_trls_trainer_and_its_collator_for_images(case: Case, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs trl 1.16.0: pip install --no-deps trl==1.16.0")
    datasets = pytest.importorskip("datasets", reason="needs datasets 5.2.0")
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    def turn(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    data = datasets.Dataset.from_list(
        [
            {"messages": [turn("user", row["question"]), turn("assistant", row["answer"])], "images": row["images"]}
            for row in case.rows()
        ],
        features=datasets.Features(
            {
                "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
                "images": datasets.List(datasets.Image()),
            }
        ),
    )
    processor = Processor(case)
    collate = DataCollatorForVisionLanguageModeling(processor)
    skipped = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    given = {"kind": trl.SFTTrainer, "options": trl.SFTConfig, "processing_class": processor}
    check(case, tmp_path, data, collate, arguments=skipped, **given)


def test_llama_factorys_trainer_and_collator(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="needs peft")
    sound = ModuleType("torchaudio")  # imported beside the images' code, for sound alone
    sound.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    monkeypatch.setitem(sys.modules, "torchaudio", sound)
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")  # it asks for an older Transformers
    pytest.importorskip("llamafactory", reason="needs llamafactory 0.9.5: pip install --no-deps llamafactory==0.9.5")
    from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask
    from llamafactory.data.template import TEMPLATES

    template, tokenizer = TEMPLATES["qwen2_vl"], case.tokenizer
    processor: Any = SimpleNamespace(
        image_processor=case.images, video_processor=object(), tokenizer=tokenizer, image_max_pixels=28 * 28 * 8,
        image_min_pixels=28 * 28,
    )  # fmt: skip
    data = []
    for row in case.rows():  # as its SupervisedDatasetProcessor encodes them
        talk = [
            {"role": "user", "content": "<image>" * len(row["images"]) + row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        talk = template.mm_plugin.process_messages(talk, row["images"], [], [], processor)
        ((prompt, answer),) = template.encode_multiturn(tokenizer, talk, None, None)
        ids = [*prompt, *answer]
        masked = [-100] * len(prompt) + list(answer)
        data.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": masked, "images": row["images"]})
    collate = SFTDataCollatorWith4DAttentionMask(
        template=template, model=case.model(), tokenizer=tokenizer, processor=processor, pad_to_multiple_of=8
    )
    check(case, tmp_path, data, collate, **own_trainer(tokenizer))


def own_trainer(tokenizer: Any) -> dict[str, Any]:
    """LLaMA-Factory's own class, where TRL is as old as it asks for."""
    try:
        from llamafactory.hparams import FinetuningArguments, TrainingArguments
        from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
    except ImportError:
        return {}
    own = {"finetuning_args": FinetuningArguments(), "processor": None, "tokenizer": tokenizer}
    return {"kind": CustomSeq2SeqTrainer, "options": TrainingArguments, **own}


def test_ms_swifts_collator(case: Case, tmp_path: Path) -> None:
    reason = "needs ms-swift 4.6.0 and modelscope"
    pytest.importorskip("modelscope", reason=reason)
    template = pytest.importorskip("swift.template.base", reason=reason).Template
    collate = swift_collator(template, case)
    processed = Processor(case)
    data = []
    for row in case.rows():
        text = "<|vision_start|><|image_pad|><|vision_end|>" * len(row["images"]) + row["question"]
        batch = processed(images=[row["images"]] if row["images"] else None, text=[text], return_tensors="pt")
        front = batch.pop("input_ids")[0].tolist()
        answer = case.tokenizer(row["answer"])["input_ids"]
        types = batch["mm_token_type_ids"][0].tolist() + [0] * len(answer)
        batch |= {"input_ids": front + answer, "labels": [-100] * len(front) + answer, "mm_token_type_ids": types}
        batch.pop("attention_mask")
        data.append(batch)
    check(case, tmp_path, data, collate)


def swift_collator(template: Any, case: Case) -> Callable[[list[Any]], Any]:
    """ms-swift's own `data_collator`, of a template without the registry that downloads models."""
    made = template.__new__(template)
    made.__dict__ |= {
        "packing": False, "task_type": "causal_lm", "mode": "train", "remove_unused_columns": True, "is_training": True,
        "padding_side": "right", "padding_free": False, "use_megatron": False, "sequence_parallel_size": 1,
        "processor": case.tokenizer, "model_info": SimpleNamespace(), "use_chat_template": True,
    }  # fmt: skip
    collate: Callable[[list[Any]], Any] = made.data_collator
    return collate
