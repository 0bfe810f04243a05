"""As TRL's examples/scripts/sft_vlm.py; model and data are those of `trimtab demo`, in FOLDER."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset, Features, Image, List, Value
from transformers import AutoConfig, AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer

from trimtab.serve.application import load_processor

folder = Path(sys.argv[1])

################
# Model & Processor
################
torch.manual_seed(0)
processor = load_processor(folder / "model")
model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder / "model"))

################
# Dataset
################
rows = []
for line in (folder / "data" / "data.jsonl").read_text().splitlines():
    record = json.loads(line)
    names = record.get("image", [])
    roles = {"human": "user", "gpt": "assistant"}
    turns = [
        {"role": roles[x["from"]], "content": x["value"].replace("<image>\n", "")} for x in record["conversations"]
    ]
    images = [str(folder / "data" / name) for name in ([names] if isinstance(names, str) else names)]
    if images:  # its collator wants an image in every row
        rows.append({"messages": turns, "images": images})
turn = {"role": Value("string"), "content": Value("string")}
dataset = Dataset.from_list(rows, features=Features({"messages": [turn], "images": List(Image())}))

################
# Training
################
training_args = SFTConfig(
    output_dir=str(folder / "sft"),
    max_length=None,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    gradient_checkpointing=False,
    max_steps=2,
    logging_steps=1,
    learning_rate=1e-3,
    save_strategy="no",
    report_to=[],
    bf16=False,
    use_cpu=True,
)
trainer = SFTTrainer(model=model, args=training_args, train_dataset=dataset, processing_class=processor)
trainer.train()
