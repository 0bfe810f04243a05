"""Tiny models of the families that can be packed, and samples as their processors give them. Needs torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_models import IMAGE_TOKEN, TinyModel, make_tiny_model

from trimtab.models.images.rules import rule_in_sample

CASES = (
    *("qwen2_vl tied, sliding", "qwen2_5_vl", "qwen3_vl"),
    *("qwen3_vl_moe", "internvl qwen2", "llava mistral, window, three taps, siglip with head"),
    *("llava_next", "llava_onevision tied, sliding, head", "gemma3"),
)
VIDEO_TOKEN = 198
Sample = dict[str, Any]


@dataclass(frozen=True)
class TinyPacks:
    """A model in float32 and eval mode, and samples it can be fed one by one."""

    model: torch.nn.Module
    samples: list[Sample]
    layers: tuple[str, ...]  # as its description lists them


def make_tiny_packs(case: str, *, attention: str = "sdpa", seed: int = 0) -> TinyPacks:
    """Samples: text around an image; text; two images of two sizes; one that ends in an image; one that starts with
    one; a single token; in the Qwen families a video. Weights are drawn larger than at initialisation, so that
    attention is not uniform."""
    torch.manual_seed(seed)
    tiny = make_tiny_model(case)
    model = tiny.model.eval()
    model.set_attn_implementation(attention)
    if hasattr(model.config, "video_token_id"):
        model.config.video_token_id = VIDEO_TOKEN
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.12)
    draw = torch.Generator().manual_seed(seed)
    image = [_image(tiny, which, draw, num_together=2 if which in (1, 2) else 1) for which in range(5)]
    samples = [
        _sample(tiny, [5, image[0], 3], draw),
        _sample(tiny, [11], draw),
        _sample(tiny, [2, image[1], 1, image[2], 7], draw),
        _sample(tiny, [4, image[3]], draw),
        _sample(tiny, [image[4], 6], draw),
        _sample(tiny, [1], draw),
    ]
    if model.config.model_type.startswith("qwen"):
        samples.append(_video(tiny, draw))
    return TinyPacks(model, samples, tuple(layer.name for layer in tiny.spec.layers))


@dataclass(frozen=True)
class _Image:
    num_tokens: int
    keys: dict[str, torch.Tensor]


def _image(tiny: TinyModel, which: int, draw: torch.Generator, *, num_together: int) -> _Image:
    kind, vision = tiny.model.config.model_type, tiny.model.config.vision_config
    if kind.startswith("qwen"):
        merge = vision.spatial_merge_size
        h, w = [(2, 3), (4, 2), (1, 3), (3, 3), (2, 1)][which]
        pixels = torch.randn(h * w * merge**2, 3 * 2 * 14 * 14, generator=draw)
        return _Image(h * w, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, h * merge, w * merge]])})
    if kind in ("llava_next", "llava_onevision"):
        w, h = [(112, 56), (40, 90), (100, 100), (56, 30), (90, 50)][which]
        count = rule_in_sample(tiny.spec.image_rule, num_together).count(w, h)
        tiles = 1 if kind == "llava_onevision" and num_together > 1 else count.tiles
        pixels = torch.randn(1, tiles, 3, 56, 56, generator=draw)
        return _Image(count.tokens, {"pixel_values": pixels, "image_sizes": torch.tensor([[h, w]])})
    tiles = [1, 2, 1, 3, 1][which] if kind == "internvl" else 1
    tokens = {"internvl": 4, "gemma3": 4, "llava": tiny.spec.image_rule.count(56, 56).tokens}[kind]
    return _Image(tiles * tokens, {"pixel_values": torch.randn(tiles, 3, 56, 56, generator=draw)})


def _sample(tiny: TinyModel, parts: list[int | _Image], draw: torch.Generator) -> Sample:
    """`parts`: numbers of text tokens, and images."""
    ids, labels = [], []
    for part in parts:
        text = part if isinstance(part, int) else 0
        drawn = torch.randint(3, 190, (text,), generator=draw).tolist()
        ids += drawn if isinstance(part, int) else [IMAGE_TOKEN] * part.num_tokens
        labels += drawn if isinstance(part, int) else [-100] * part.num_tokens
    images = [part for part in parts if isinstance(part, _Image)]
    keys = {key: [image.keys[key] for image in images] for key in (images[0].keys if images else ())}
    if "image_sizes" in keys:
        most = max(p.shape[1] for p in keys["pixel_values"])
        keys["pixel_values"] = [
            torch.nn.functional.pad(p, (0, 0) * 3 + (0, most - p.shape[1])) for p in keys["pixel_values"]
        ]
    sample: Sample = {key: torch.cat(values) for key, values in keys.items()}
    sample |= {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
    types = (sample["input_ids"] == IMAGE_TOKEN).long()
    kind = tiny.model.config.model_type
    if kind == "gemma3":
        sample["token_type_ids"] = types
    elif kind.startswith("qwen"):
        sample["mm_token_type_ids"] = types
    elif kind == "llava_onevision" and len(images) > 1:  # a lone image's processor says 1, or nothing
        sample["batch_num_images"] = torch.tensor([len(images)])
    return sample


def _video(tiny: TinyModel, draw: torch.Generator) -> Sample:
    """Two frames of 1 x 2 tokens; Qwen3-VL puts a time stamp before each frame."""
    kind, merge = tiny.model.config.model_type, tiny.model.config.vision_config.spatial_merge_size
    a, b, c = ([x] for x in torch.randint(3, 190, (3,), generator=draw).tolist())
    frame = [VIDEO_TOKEN] * 2
    ids = torch.tensor(a + frame + (b if kind.startswith("qwen3") else []) + frame + c + a + b)
    sample = {
        "input_ids": ids,
        "labels": torch.where(ids == VIDEO_TOKEN, -100, ids),
        "mm_token_type_ids": 2 * (ids == VIDEO_TOKEN).long(),
        "pixel_values_videos": torch.randn(4 * merge**2, 3 * 2 * 14 * 14, generator=draw),
        "video_grid_thw": torch.tensor([[2, merge, 2 * merge]]),
    }
    if kind == "qwen2_5_vl":
        sample["second_per_grid_ts"] = torch.tensor([2.0])
    return sample


def alone(sample: Sample) -> Sample:
    """The sample as a batch of one, without labels: what `model(**...)` takes."""
    rows = ("input_ids", "mm_token_type_ids", "token_type_ids")
    return {key: value[None] if key in rows else value for key, value in sample.items() if key != "labels"}


def trainer_arguments(folder: Path, **more: Any) -> Any:
    """For a Transformers `Trainer`: plain SGD on the CPU at a constant rate, nothing reported or saved."""
    from transformers import TrainingArguments

    given: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "remove_unused_columns": False,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
    }
    return TrainingArguments(output_dir=str(folder), **given | more)
