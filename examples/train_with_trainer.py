"""Train from a plan with Transformers' Trainer: `python examples/train_with_trainer.py [FOLDER]`.

Draws a small data set into FOLDER (default: a temporary one), makes a tiny Qwen2.5-VL with random weights, sizes and
plans the data for it, and trains four steps on a CPU: the plan's packs in the plan's order, one row a pack. A
checkpoint taken behind the second step resumes to the same losses.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import trimtab
from trimtab import ReadingOptions, open_conversations
from trimtab.testing import draw_dataset
from trimtab.torch import PackedCollator, PlanDataset


def tiny_config(tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Qwen2.5-VL of two layers each."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    }
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}
    tokens: dict[str, Any] = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()
    }
    return AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens
    )


def plan_data(config: PreTrainedConfig, processor: Qwen2VLImageProcessorPil, data: Path, folder: Path) -> None:
    """Save what the model folder holds apart from weights, and let `trimtab plan` size and plan the data for it."""
    config.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    options = "--cluster 1xA100-80GB --dp 1 --pp 1 --set num_microbatches=2 --set max_patches=512 --set max_tokens=2048"
    words = [*options.split(), "--set", "oversize=skip", "--on-bad", "skip"]
    words += ["--tokenizer", str(data.parent / "tokenizer.json"), "--out", str(folder / "plan")]
    command = [sys.executable, "-m", "trimtab", "plan", str(folder / "model"), str(data), *words]
    subprocess.run(command, check=True)


def make_trainer(folder: Path, config: PreTrainedConfig, data: PlanDataset, *, checkpoint: Path | None) -> Trainer:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")  # a resumed run restores it
    arguments = TrainingArguments(
        output_dir=str(folder / ("run" if checkpoint is None else "resumed")),
        max_steps=4,
        gradient_accumulation_steps=2,  # the plan's micro-batches
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    collate = PackedCollator(config, attention="sdpa")  # or your own: packs are then made of what it gives of a sample
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
    return trimtab.balanced(trainer, folder / "plan")  # the one line


def main(folder: Path) -> None:
    print(f"data, plan and checkpoints: {folder}; takes half a minute, most of it imports and compiling")
    transformers.logging.disable_progress_bar()
    data = draw_dataset(folder / "data", num_samples=20)
    tokenizer = AutoTokenizer.from_pretrained(data)
    processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16)
    config = tiny_config(tokenizer)
    plan_data(config, processor, data / "data.jsonl", folder)

    # row i of the plan as token ids, labels and patches; your own data set may take its place
    rows = open_conversations(folder / "plan", folder / "model", ReadingOptions(tokenizer=data / "tokenizer.json"))
    dataset = PlanDataset(rows, rows.records.samples, on_error="filler")

    losses = []
    for checkpoint in (None, folder / "run" / "checkpoint-2"):
        print("\nfour steps from the beginning" if checkpoint is None else f"\nonce more, from {checkpoint.name}")
        trainer = make_trainer(folder, config, dataset, checkpoint=checkpoint)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        losses.append({log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log})
    assert losses[0] == losses[1]
    print(f"\n{len(dataset)} samples, {dataset.num_fillers} of them replaced by fillers; loss of each step:")
    print(", ".join(f"{step}: {loss:.4f}" for step, loss in losses[0].items()))
    print("steps 3 and 4 resumed from the checkpoint have the same losses")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
