"""Folders of tiny models as they are published, drawn data, and plans of them; needs torch and Transformers."""

import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import transformers
import yaml
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from plans import origin_of
from sample_sets import SPECIAL, write_tokenizer
from tiny_models import ODD_CONFIGS, as_saved

import trimtab
from trimtab import PlanOptions, SizingResult, describe
from trimtab.models import VideoOptions, clip_rule_of
from trimtab.models.families import MARKUPS

READ = yaml.safe_load(Path(__file__).with_name("small_models.yaml").read_text(encoding="utf-8"))["folders"]
CASES: dict[str, str] = {family: x.get("case", family) for family, x in READ.items()}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}IMAGE{% elif c.type == 'video' %}VIDEO"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SQUARE = {"height": 56, "width": 56}


def write_model(folder: Path, family: str, *, videos: bool = False, **text_fields: Any) -> Any:
    """config.json, tokenizer, template and processors' files of a tiny model; its configuration."""
    model_type, vision, text, outer = copy.deepcopy(ODD_CONFIGS[CASES[family]])
    markup = MARKUPS[family]
    template = TEMPLATE.replace("IMAGE", markup.written or markup.placeholder)
    template = template.replace("VIDEO", READ[family].get("video", ""))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **READ[family].get("named", {})}
    write_tokenizer(folder, template, special=(*SPECIAL, "<end_of_turn>"), config=named)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    number = tokenizer.convert_tokens_to_ids
    if family in ("qwen2_vl", "qwen2_5_vl"):
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text |= {"vocab_size": len(tokenizer), **text_fields}
    outer["image_token_index" if family.startswith("llava") else "image_token_id"] = number(markup.soft)
    if family.startswith("qwen"):
        outer |= {"video_token_id": number("<|video_pad|>"), "vision_start_token_id": number("<|vision_start|>")}
        outer["vision_end_token_id"] = number("<|vision_end|>")
    elif family == "llava_onevision":
        outer["video_token_index"] = number("<video>")
    elif family == "gemma3":
        outer |= {"boi_token_index": number("<start_of_image>"), "eoi_token_index": number("<end_of_image>")}
    config = transformers.AutoConfig.for_model(model_type, vision_config=vision, text_config=text, **outer)
    (folder / "config.json").write_text(json.dumps(as_saved(config)))
    for name, content in _processor_files(family, config, videos=videos).items():
        (folder / name).write_text(json.dumps(content))
    return config


def _processor_files(family: str, config: Any, *, videos: bool) -> dict[str, dict[str, Any]]:
    """Small settings of the family's real ones."""
    images, sides, limits = dict(READ[family].get("images", {})), {}, {"size": _SQUARE}
    if family.startswith("qwen"):
        vision = config.vision_config
        sides = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "temporal_patch_size": 2}
        size = {"shortest_edge": 3136, "longest_edge": 50176}
        images = {"image_processor_type": "Qwen2VLImageProcessor", "size": size, **sides}
        limits = {"size": {**size, "longest_edge": 400000}, "do_sample_frames": True, "fps": 2, **sides}
    if "image_grid_pinpoints" in config:
        images["image_grid_pinpoints"] = config.image_grid_pinpoints
    if not videos:
        return {"preprocessor_config.json": images}
    processor, kind, more = READ[family]["video_processor"]
    return {
        "preprocessor_config.json": {"processor_class": processor, **images},
        "processor_config.json": {"processor_class": processor, **more},
        "video_preprocessor_config.json": {"video_processor_type": kind, **limits},
    }


def write_data(folder, *, num=8, seed=0):
    folder.mkdir()
    rng = random.Random(seed)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(num):
            names = []
            for image in range(number % 3):
                names.append(f"{number}-{image}.png")
                size = (rng.randrange(40, 220), rng.randrange(40, 220))
                pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), np.uint8)
                Image.fromarray(pixels).save(folder / names[-1])
            turns = [
                {"from": "human", "value": "<image>\n" * len(names) + "what is in the picture"},
                {"from": "gpt", "value": "a red cat " * (1 + number)},
            ]
            file.write(json.dumps({"id": f"s{number}", "image": names, "conversations": turns}) + "\n")
    return folder / "data.jsonl"


def write_plan_of(
    folder: Path,
    data: Path,
    options: dict[str, Any],
    cluster: str = "1xA100-80GB",
    *,
    video: VideoOptions | None = None,
    **limits: int,
) -> SizingResult:
    """plan/ for the model in model/ and this data, whose largest sample fills a pack unless `options` say otherwise."""
    spec = describe(folder / "model", **limits)
    sized = trimtab.size_samples(
        data,
        image_rule=spec.image_rule,
        clip_rule=clip_rule_of(spec, video) if video else None,
        image_markup=MARKUPS[spec.family],
        tokenizer=folder / "model",
    )
    plain: dict[str, Any] = {"schedule": "1F1B", "zero_stage": 1}
    most = {"max_patches": int(sized.table.num_patches.max()), "max_tokens": int(sized.table.num_tokens.max())}
    details = trimtab.make_plan(
        spec, sized.table, trimtab.parse_cluster(cluster), PlanOptions(**plain | most | options), origin=origin_of(data)
    )
    trimtab.write_plan(details, folder / "plan")
    return sized
