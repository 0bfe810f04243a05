"""Layers timed one by one beside whole stages of the real model. Run: python bench/timed_profile.py [--device cuda]

A model is built twice: its layers are timed at some sizes and fitted (`trimtab profile --timed`), then its stages are
run whole, forward and backward, at sizes that the fit has not seen. Stage 1: vision tower and projector
(`get_image_features`). Stage 2: language model, head and loss. Both: the whole model, images put among the tokens.
The error is predicted / measured - 1; what stages have and layers have not (positions, masks, window order, images put
among tokens) is part of it. On the CPU the models are small; on CUDA they have the layers of real ones, four of each.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from trimtab.costs.measured.timed import Clock, TimingOptions, open_device, profile_timed, time_each
from trimtab.costs.measured.timed_fit import TimedProfile
from trimtab.costs.measured.timed_model import DTYPES
from trimtab.models.describe import describe
from trimtab.specs import ModelSpec, evaluate

IMAGE_TOKEN = 9
TEXT = {"vocab_size": 4096, "num_hidden_layers": 4, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
SMALL_TEXT = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGE_TEXT = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 8}
INTERNVL = {"num_hidden_layers": 4, "patch_size": 14}
SMALL_INTERNVL = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "image_size": 112}
LARGE_INTERNVL = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "image_size": 448}
QWEN = {"depth": 4, "patch_size": 14, "fullatt_block_indexes": [1, 3], "window_size": 112}
SMALL_QWEN = {"hidden_size": 128, "intermediate_size": 340, "num_heads": 4, "out_hidden_size": 128}
LARGE_QWEN = {"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}


@dataclass(frozen=True)
class Case:
    """A configuration, the sizes of the fit, and the sizes to be predicted."""

    name: str
    config: dict[str, Any]
    fitted: tuple[int, ...]
    predicted: tuple[tuple[int, int], ...]  # (images or tiles, text tokens)


def make_cases(*, large: bool) -> list[Case]:
    text = {**TEXT, **(LARGE_TEXT if large else SMALL_TEXT)}
    sizes = (1024, 2048, 4096, 8192) if large else (96, 192, 384, 768)
    internvl = transformers.AutoConfig.for_model(
        "internvl",
        vision_config={"model_type": "internvl_vision", **INTERNVL, **(LARGE_INTERNVL if large else SMALL_INTERNVL)},
        text_config={"model_type": "qwen2", **text},
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )
    head = text["hidden_size"] // text["num_attention_heads"] // 2
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [head // 4, head * 3 // 8, head * 3 // 8]}
    qwen = transformers.AutoConfig.for_model(
        "qwen2_5_vl",
        vision_config={**QWEN, **(LARGE_QWEN if large else SMALL_QWEN)},
        text_config={**text, "rope_parameters": rope},
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )
    few, many = ((3, 1500), (7, 3300)) if large else ((3, 160), (7, 320))
    return [
        Case("InternVL", as_written(internvl), sizes, (few, many)),
        Case("Qwen2.5-VL", as_written(qwen), sizes, (few, many)),
    ]


def as_written(config: Any) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    written.pop("image_seq_length", None)  # the class's own, whatever the sizes here
    return written


@dataclass(frozen=True)
class Inputs:
    """One micro-batch for the whole model, and its work per WORK_TERMS."""

    images: dict[str, torch.Tensor]
    text: dict[str, torch.Tensor]
    work: np.ndarray


def make_inputs(case: Case, model: ModelSpec, images: int, text: int, device: Any, dtype: Any) -> Inputs:
    """Equal images, then text; a second sample of one token, so that there is a mask as in a pack."""
    vision = case.config["vision_config"]
    if case.name == "InternVL":
        side = vision["image_size"][0]
        rows, per_image = (side // 14) ** 2 + 1, int((side // 14 * case.config["downsample_ratio"]) ** 2)
        pixels = {"pixel_values": torch.randn(images, 3, side, side, device=device, dtype=dtype)}
        squared = windowed = images * rows**2
    else:
        height = width = 24 if vision["hidden_size"] > 1000 else 12
        rows, per_image = height * width, height * width // 4
        pixels = {
            "pixel_values": torch.randn(images * rows, 3 * 2 * 14 * 14, device=device, dtype=dtype),
            "image_grid_thw": torch.tensor([[1, height, width]] * images, device=device),
        }
        counts = model.image_rule.count(width * 14, height * 14)
        assert counts.patches == rows
        squared, windowed = images * counts.patches_sq, images * counts.patches_windowed
    tokens = images * per_image + text
    ids = torch.tensor([[IMAGE_TOKEN] * (images * per_image) + [11] * text], device=device)
    positions = torch.cat([torch.arange(tokens - 1), torch.zeros(1, dtype=torch.long)])[None].to(device)
    if case.name != "InternVL":
        positions = positions.expand(4, 1, -1)
    pairs = (tokens - 1) ** 2 + 1
    return Inputs(
        images=pixels,
        text={"input_ids": ids, "position_ids": positions},
        work=np.array([[1, images * rows, squared, windowed, tokens, pairs, pairs]], np.float64),
    )


def stage_runs(model: Any, inputs: Inputs) -> dict[str, Callable[[], None]]:
    """Forward and backward of each stage; pixels have no gradient, what enters the language model has."""
    labels = inputs.text["input_ids"][0]

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[0].float(), labels)

    def vision() -> None:
        features = model.model.get_image_features(**inputs.images).pooler_output
        features = torch.cat(list(features)) if isinstance(features, tuple) else features
        features.backward(torch.ones_like(features))

    def language() -> None:
        hidden = model.model.language_model(**inputs.text, use_cache=False).last_hidden_state
        loss_of(model.lm_head(hidden)).backward()

    def both() -> None:
        loss_of(model(**inputs.text, **inputs.images, use_cache=False).logits).backward()

    return {"vision + projector": vision, "language + head": language, "whole model": both}


def predicted_seconds(timed: TimedProfile, inputs: Inputs) -> dict[str, float]:
    profile = timed.profile
    seconds = evaluate(profile.matrix("forward_s") + profile.matrix("backward_s"), inputs.work)[0]
    is_text = np.array([layer.tower == "language" for layer in profile.layers])
    text, vision = float(seconds[is_text].sum()), float(seconds[~is_text].sum())
    return {"vision + projector": vision, "language + head": text, "whole model": vision + text}


@dataclass(frozen=True)
class Outcome:
    """One stage at one size in one round."""

    images: int
    text: int
    stage: str
    predicted_s: float
    measured_s: float
    band: float


def run_round(case: Case, device: torch.device, dtype: str, *, repeats: int, clock: Clock) -> list[Outcome]:
    """Time the layers, then the stages of a whole model, at once behind each other."""
    vision = case.config["vision_config"]
    grids = {"min_pixels": 3136, "max_pixels": 10**6, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    tiles = {"min_patches": 1, "max_patches": 12}
    if case.name == "InternVL":
        tiles["size"] = dict(zip(("height", "width"), vision["image_size"], strict=True))
    model = describe(copy.deepcopy(case.config), preprocessor=tiles if case.name == "InternVL" else grids)
    options = TimingOptions(dtype=dtype, attention="sdpa", sizes=case.fitted, repeats=repeats, clock=clock)
    timed = profile_timed(case.config, model, device, options)
    fields = copy.deepcopy(case.config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    real = transformers.AutoModelForImageTextToText.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    real = real.to(device).train()
    outcomes = []
    for images, text in case.predicted:
        inputs = make_inputs(case, model, images, text, device, DTYPES[dtype])
        expected, runs = predicted_seconds(timed, inputs), stage_runs(real, inputs)
        seconds = time_each(list(runs.values()), device, repeats=repeats, clock=clock)
        outcomes += [
            Outcome(images, text, name, expected[name], statistics.median(measured), timed.profile.time_error)
            for name, measured in zip(runs, seconds, strict=True)
        ]
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3, help="times the layers and then the stages are timed")
    parser.add_argument("--clock", choices=("wall", "process"), default="wall", help="of the CPU")
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    large = device.type == "cuda"
    dtype = arguments.dtype or ("bf16" if large else "fp32")
    for case in make_cases(large=large):
        rounds = [
            run_round(case, device, dtype, repeats=arguments.repeats, clock=arguments.clock)
            for _ in range(arguments.rounds)
        ]
        bands = ", ".join(f"{outcomes[0].band:.1%}" for outcomes in rounds)
        print(f"\n{case.name}, {dtype}, {device}; fitted at {case.fitted}; bands of the rounds +-{bands}")
        print(f"{'images':>7}{'text':>6}  {'stage':20}{'measured':>12}   error of each round")
        for row in zip(*rounds, strict=True):
            first, measured = row[0], statistics.median(outcome.measured_s for outcome in row)
            errors = "".join(f"{outcome.predicted_s / outcome.measured_s - 1:+8.1%}" for outcome in row)
            print(f"{first.images:7}{first.text:6}  {first.stage:20}{1e3 * measured:9.2f} ms  {errors}")


if __name__ == "__main__":
    main()
