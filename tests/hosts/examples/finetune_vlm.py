"""As Hugging Face's notebook that fine-tunes SmolVLM; model and data are those of `trimtab demo`, in FOLDER."""

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainingArguments

from trimtab.serve.application import load_processor

folder = Path(sys.argv[1])
torch.manual_seed(0)
processor = load_processor(folder / "model")
model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder / "model"))
train_ds = [json.loads(line) for line in (folder / "data" / "data.jsonl").read_text().splitlines()]


def collate_fn(examples):
    texts, images = [], []
    for example in examples:
        names = example.get("image", [])
        images += [Image.open(folder / "data" / name) for name in ([names] if isinstance(names, str) else names)]
        messages = []
        for turn in example["conversations"]:
            parts = turn["value"].split("<image>\n")
            content = [{"type": "image"}] * (len(parts) - 1) + [{"type": "text", "text": parts[-1]}]
            messages.append({"role": "user" if turn["from"] == "human" else "assistant", "content": content})
        texts.append(processor.apply_chat_template(messages, add_generation_prompt=False))
    batch = processor(text=texts, images=images or None, return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    labels[labels == processor.tokenizer.pad_token_id] = -100
    labels[labels == model.config.image_token_id] = -100
    batch["labels"] = labels
    return batch


training_args = TrainingArguments(
    num_train_epochs=1,
    max_steps=2,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    warmup_steps=1,
    learning_rate=1e-3,
    weight_decay=0.01,
    logging_steps=1,
    save_strategy="no",
    output_dir=str(folder / "finetuned"),
    remove_unused_columns=False,
    report_to=[],
    use_cpu=True,
)
trainer = Trainer(model=model, args=training_args, data_collator=collate_fn, train_dataset=train_ds)
trainer.train()
