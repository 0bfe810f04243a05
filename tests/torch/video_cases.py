"""Tiny model folders that take videos, drawn videos, and data of both; needs torch, Transformers and tokenizers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from sample_sets import SPECIAL, write_tokenizer
from tiny_models import ODD_CONFIGS

PLACEHOLDERS = {  # of an image and of a video, as the family's template writes them
    "qwen2_5_vl": ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"),
    "qwen3_vl": ("<|vision_start|><|image_pad|><|vision_end|>", "<|video_pad|>"),
    "internvl": ("<IMG_CONTEXT>\n", "<video>\n"),
    "llava_onevision": ("<image>", "<video>"),
}
_CASES = {"internvl": "internvl qwen2"}
_SQUARE = {"height": 56, "width": 56}
_NAMED = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
}


def write_video_model(folder: Path, family: str) -> Any:
    """config.json, both preprocessors, tokenizer and template of a tiny model; its configuration."""
    model_type, vision, text, outer = json.loads(json.dumps(ODD_CONFIGS[_CASES.get(family, family)]))
    image, video = PLACEHOLDERS[family]
    template = (
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for c in m.content %}{% if c.type == 'image' %}IMAGE{% elif c.type == 'video' %}VIDEO"
            "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        .replace("IMAGE", image)
        .replace("VIDEO", video)
    )
    write_tokenizer(
        folder,
        template,
        special=SPECIAL,
        config={"tokenizer_class": "PreTrainedTokenizerFast", **_NAMED.get(family, {})},
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    number = tokenizer.convert_tokens_to_ids
    if family == "qwen2_5_vl":
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text["vocab_size"] = len(tokenizer)
    if family.startswith("qwen"):
        outer |= {"image_token_id": number("<|image_pad|>"), "video_token_id": number("<|video_pad|>")}
        outer |= {"vision_start_token_id": number("<|vision_start|>"), "vision_end_token_id": number("<|vision_end|>")}
    elif family == "internvl":
        outer["image_token_id"] = number("<IMG_CONTEXT>")
    else:
        outer |= {"image_token_index": number("<image>"), "video_token_index": number("<video>")}
    config = transformers.AutoConfig.for_model(model_type, vision_config=vision, text_config=text, **outer)
    written = json.loads(config.to_json_string(use_diff=False))
    written.pop("image_seq_length", None)
    (folder / "config.json").write_text(json.dumps(written))
    for name, content in _processor_files(family, config).items():
        (folder / name).write_text(json.dumps(content))
    return config


def _processor_files(family: str, config: Any) -> dict[str, dict[str, Any]]:
    if family.startswith("qwen"):
        vision = config.vision_config
        sides = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "temporal_patch_size": 2}
        kinds = {"qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor")}
        processor, videos = kinds.get(family, ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"))
        images = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 3136, "longest_edge": 50176},
        }
        limits = {"size": {"shortest_edge": 3136, "longest_edge": 400000}, "do_sample_frames": True, "fps": 2}
        return {
            "preprocessor_config.json": {"processor_class": processor, **images, **sides},
            "video_preprocessor_config.json": {"video_processor_type": videos, **limits, **sides},
        }
    kinds = {
        "internvl": ("InternVLProcessor", "GotOcr2ImageProcessor", "InternVLVideoProcessor", {"image_seq_length": 4}),
        "llava_onevision": (
            *("LlavaOnevisionProcessor", "LlavaOnevisionImageProcessor", "LlavaOnevisionVideoProcessor"),
            {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
        ),
    }
    processor, images, videos, more = kinds[family]
    tiles = {"image_grid_pinpoints": config.image_grid_pinpoints} if family == "llava_onevision" else {}
    own = {"processor_class": processor, "image_processor_type": images, "size": _SQUARE, **tiles}
    return {
        "preprocessor_config.json": own,
        "processor_config.json": {"processor_class": processor, **more},
        "video_preprocessor_config.json": {"video_processor_type": videos, "size": _SQUARE},
    }


def draw_video(path: Path, *, width: int = 96, height: int = 64, num_frames: int = 30, fps: int = 10) -> Path:
    """A square that moves over a grey ground; the suffix says the container."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4" if path.suffix == ".mp4" else "libvpx", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(num_frames):
            pixels = np.full((height, width, 3), 90, np.uint8)
            pixels[8:24, number : number + 16] = (240, 8 * number % 256, 30)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def draw_frames(folder: Path, num: int, *, width: int = 96, height: int = 64) -> list[str]:
    """As images."""
    names = [f"frame{number}.png" for number in range(num)]
    for number, name in enumerate(names):
        Image.new("RGB", (width, height), (10 * number, 90, 30)).save(folder / name)
    return names


def records(folder: Path, *, files: bool) -> list[dict[str, Any]]:
    """One record of each spelling; what they name lies in `folder`. Without `files` no video but frames as images."""
    Image.new("RGB", (120, 60), (200, 40, 40)).save(folder / "c.png")
    frames = draw_frames(folder, 6)

    def chat(text: str) -> list[dict[str, str]]:
        return [{"from": "human", "value": text}, {"from": "gpt", "value": "a red cat"}]

    def parts(*content: dict[str, Any]) -> list[dict[str, Any]]:
        text = {"type": "text", "text": "what moves"}
        return [{"role": "user", "content": [*content, text]}, {"role": "assistant", "content": "a cat"}]

    without = [
        {"id": "frames", "messages": parts({"type": "video", "video": frames, "sample_fps": 2.0})},
        {"id": "text", "conversations": chat("what is in it")},
        {"id": "image", "image": "c.png", "conversations": chat("<image>\nwhat")},
        {"id": "column", "video": frames, "conversations": chat("what moves in <video>")},
    ]
    if not files:
        return without
    draw_video(folder / "a.mp4")
    draw_video(folder / "b.webm", width=64, height=96, num_frames=17, fps=8)
    return [
        {"id": "marked", "video": "a.mp4", "conversations": chat("<video>\nwhat moves")},
        {"id": "llava", "video": "b.webm", "conversations": chat("<image>\nwhat moves")},
        {"id": "both", "messages": parts({"type": "image", "image": "c.png"}, {"type": "video", "video": "a.mp4"})},
        {"id": "two", "videos": ["a.mp4", "b.webm"], "conversations": chat("<video> and <video>")},
        *without,
    ]
