"""Saved folders of tiny chat models with random weights: model, tokenizer, chat template, image processor.

Needs torch, Transformers, Pillow and tokenizers.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from model_folders import write_model
from PIL import Image
from tiny_models import as_saved

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava", "internvl", "gemma3")
_PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "internvl": {"image_seq_length": 4},
    "gemma3": {"image_seq_length": 4},
}


def save_chat_model(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """A folder that `trimtab serve` takes. Its weights are drawn wide: greedy answers differ with every image."""
    config = write_model(folder, family, max_position_embeddings=4096, bos_token_id=None)
    ends = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>")
    config.get_text_config().eos_token_id = ends
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends, ends
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(as_saved(model.config)))
    (folder / "processor_config.json").write_text(json.dumps(_PROCESSORS.get(family, {})))
    return folder


def picture(seed: int, width: int = 80, height: int = 60) -> Image.Image:
    """Noise in large squares: unlike pictures give unlike answers."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.randint(0, 256, (3, 4, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(colours.numpy()).resize((width, height), Image.Resampling.NEAREST)


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def question(text: str, *images: Image.Image, **fields: Any) -> dict[str, Any]:
    """The body of a chat request with the images before the text."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(x)}} for x in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], **fields}


def chat_inputs(processor: Any, text: str, *images: Image.Image) -> Any:
    """What a processor makes of one turn of the user, images before the text."""
    shown = [{"type": "image", "image": image} for image in images]
    return processor.apply_chat_template(
        [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
