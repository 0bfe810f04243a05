"""As Accelerate's examples/by_feature/gradient_accumulation.py; model and data of `trimtab demo`, in FOLDER."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from PIL import Image
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForImageTextToText

from trimtab.serve.application import load_processor

folder, batch_size = Path(sys.argv[1]), 8
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(42)
processor = load_processor(folder / "model")
model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder / "model"))
dataset = [json.loads(line) for line in (folder / "data" / "data.jsonl").read_text().splitlines()][:512]


def collate_fn(examples):
    texts, images = [], []
    for example in examples:
        names = example.get("image", [])
        images += [Image.open(folder / "data" / name) for name in ([names] if isinstance(names, str) else names)]
        text = "".join(f"{turn['from']}: {turn['value']}\n" for turn in example["conversations"])
        texts.append(text.replace("<image>", processor.image_token))
    batch = processor(text=texts, images=images or None, return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    labels[batch["attention_mask"] == 0] = -100
    labels[labels == processor.image_token_id] = -100
    batch["labels"] = labels
    return batch


train_dataloader = DataLoader(dataset, shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-3)
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
losses = []
model.train()
for batch in train_dataloader:
    with accelerator.accumulate(model):
        output = model(**batch)
        loss = output.loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if len(losses) == 4:
        break
