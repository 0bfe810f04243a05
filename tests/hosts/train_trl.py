"""TRL's `SFTTrainer` on the data of `prepare.py`: accelerate launch train_trl.py FOLDER plain|balanced."""

import sys

import datasets
import torch
import transformers
from trl import SFTConfig, SFTTrainer

import trimtab

folder = sys.argv[1]
data = datasets.load_dataset("json", data_files=f"{folder}/data/messages.jsonl", split="train")
data = data.filter(lambda row: len(row["images"]) > 0)  # its collator wants an image in every row, and writes its mark
data = data.map(
    lambda row: {"messages": [{**x, "content": x["content"].replace("<image>\n", "")} for x in row["messages"]]}
)
data = data.cast_column("images", datasets.List(datasets.Image()))
model = transformers.AutoModelForImageTextToText.from_pretrained(f"{folder}/model", dtype=torch.float32)
processor = transformers.AutoProcessor.from_pretrained(f"{folder}/model")
arguments = SFTConfig(
    output_dir=f"{folder}/trl",
    max_steps=4,
    max_length=None,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    logging_steps=1,
    learning_rate=1e-3,
    save_strategy="no",
    report_to=[],
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
)
trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=processor)
if "balanced" in sys.argv:
    trainer = trimtab.balanced(trainer)
trainer.train()
