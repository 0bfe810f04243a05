"""Saved folders of tiny chat models with random weights: model, tokenizer, chat template, image processor.

Needs torch, Transformers, Pillow and tokenizers.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from PIL import Image
from sample_sets import SPECIAL, write_tokenizer
from tiny_models import CLIP, INTERNVIT, QWEN3_VIT, QWEN25_VIT, SIGLIP, TEXT

VOCAB = 420 + len(SPECIAL)
START = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGES = {  # how each family's template writes an image
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "llava": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<start_of_image>",
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_TOWERS: dict[str, tuple[dict, dict, dict]] = {
    "qwen2_5_vl": (QWEN25_VIT, {**TEXT, "rope_parameters": _ROPE}, {}),
    "qwen3_vl": (QWEN3_VIT, {**TEXT, "head_dim": 16}, {}),
    "llava": (CLIP, {**TEXT, "model_type": "llama"}, {"image_seq_length": 16}),
    "internvl": (INTERNVIT, {**TEXT, "model_type": "qwen2"}, {}),
    "gemma3": (SIGLIP, {**TEXT, "head_dim": 32, "sliding_window": 8}, {"mm_tokens_per_image": 4}),
}
FAMILIES = tuple(_TOWERS)


def save_chat_model(folder: Path, family: str = "qwen2_5_vl", *, seed: int = 0, positions: int = 4096) -> Path:
    """A folder that `trimtab serve` takes. Its weights are drawn wide: greedy answers differ with every image."""
    write_tokenizer(
        folder,
        template=START.replace("IMAGE", IMAGES[family]),
        config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "image_token": "<image_soft_token>" if family == "gemma3" else None,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
        if family in ("gemma3", "internvl")
        else {"tokenizer_class": "PreTrainedTokenizerFast"},
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    vision, text, outer = copy.deepcopy(_TOWERS[family])
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text |= {"vocab_size": VOCAB, "max_position_embeddings": positions, "eos_token_id": ends, "bos_token_id": None}
    marker = {"gemma3": "<image_soft_token>"}.get(family, IMAGES[family].split("><")[-1 if family == "llava" else 0])
    marker = "<|image_pad|>" if family.startswith("qwen") else marker
    token = "image_token_index" if family in ("llava", "gemma3") else "image_token_id"
    outer |= {token: tokenizer.convert_tokens_to_ids(marker), "tie_word_embeddings": False}
    if family.startswith("qwen"):
        outer["vision_start_token_id"] = tokenizer.convert_tokens_to_ids("<|vision_start|>")
        outer["vision_end_token_id"] = tokenizer.convert_tokens_to_ids("<|vision_end|>")
        outer["video_token_id"] = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    if family == "gemma3":
        outer["boi_token_index"] = tokenizer.convert_tokens_to_ids("<start_of_image>")
        outer["eoi_token_index"] = tokenizer.convert_tokens_to_ids("<end_of_image>")
    config = transformers.AutoConfig.for_model(family, vision_config=vision, text_config=text, **outer)
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends, ends
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_preprocessor(family)))
    (folder / "processor_config.json").write_text(json.dumps(_processor(family)))
    return folder


def _preprocessor(family: str) -> dict[str, Any]:
    if family.startswith("qwen"):
        kind = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
        return {**kind, "temporal_patch_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 784 * 16}}
    side = {"size": {"height": 56, "width": 56}}
    if family == "internvl":
        return {"image_processor_type": "GotOcr2ImageProcessor", **side, "min_patches": 1, "max_patches": 4}
    if family == "gemma3":
        return {"image_processor_type": "Gemma3ImageProcessor", **side}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
    }


def _processor(family: str) -> dict[str, Any]:
    if family == "llava":
        return {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return {"internvl": {"image_seq_length": 4}, "gemma3": {"image_seq_length": 4}}.get(family, {})


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
