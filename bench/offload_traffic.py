"""Bytes that cross a link when a model does not fit: our map and loader, and Accelerate's, on simulated devices.

One small model with a real one's proportions: a vocabulary that outweighs layers, and a vision tower of a few layers.
Both get the same memory for weights, which is all that Accelerate knows of. Needs torch and Transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from simulated_devices import Traffic, counted, simulated
from tiny_models import IMAGE_TOKEN, INTERNVIT, QWEN25_VIT, SIGLIP, TEXT, describe_here, preprocessor_of

from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import Gpu, Machine, Workload
from trimtab.placement.place import place
from trimtab.runtime.placing.load import load_placed, move_inputs
from trimtab.specs import ModelSpec

LANGUAGE = {**TEXT, "num_hidden_layers": 6, "vocab_size": 6000}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "internvl": (INTERNVIT, {**LANGUAGE, "model_type": "qwen2"}, {"tie_word_embeddings": False}),
    "qwen2_5_vl": ({**QWEN25_VIT, "depth": 4}, LANGUAGE, {}),
    "gemma3": (SIGLIP, {**LANGUAGE, "head_dim": 32, "sliding_window": 64}, {"mm_tokens_per_image": 4}),
}


@dataclass(frozen=True)
class Shop:
    """A saved model, its description, and a request."""

    folder: Path
    spec: ModelSpec
    inputs: dict[str, torch.Tensor]
    num_new: int
    tokens: torch.Tensor

    @property
    def weights(self) -> int:
        return 4 * self.spec.num_params

    @property
    def movable(self) -> int:
        """Vision tower and projector, and the embedding where it is not the head's weight as well."""
        own = {x.name for x in self.spec.layers if x.kind == "embed"} if not self.spec.tied else set()
        return 4 * sum(x.num_params for x in self.spec.layers if x.tower != "language" or x.name in own)


def open_shop(family: str, folder: Path, *, num_new: int) -> Shop:
    torch.manual_seed(0)
    vision, text, outer = FAMILIES[family]
    text = dict(text)
    if family == "qwen2_5_vl":
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.AutoConfig.for_model(
        family, vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, **outer
    )
    spec = describe_here(config, preprocessor=preprocessor_of(family, vision))
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder, max_shard_size="1MB")
    inputs = _request(family)
    return Shop(folder, spec, inputs, num_new, model.generate(**inputs, **_settings(num_new)))


def _request(family: str) -> dict[str, torch.Tensor]:
    num_tokens = 8 if family == "qwen2_5_vl" else 4
    ids = torch.tensor([[3] * 5 + [IMAGE_TOKEN] * num_tokens + [4] * 3])
    if family == "qwen2_5_vl":
        return {
            "input_ids": ids,
            "pixel_values": torch.randn(32, 3 * 2 * 14 * 14),
            "image_grid_thw": torch.tensor([[1, 8, 4]]),
            "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
        }
    extra = {"token_type_ids": (ids == IMAGE_TOKEN).long()} if family == "gemma3" else {}
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 56, 56), **extra}


def _settings(num_new: int) -> dict[str, Any]:
    return {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False}


def accelerate_map(shop: Shop, gpus: Mapping[int, int]) -> dict[str, int | str]:
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(
            transformers.AutoConfig.from_pretrained(shop.folder)
        )
    model.tie_weights()
    limits = {**gpus, "cpu": 10 * shop.weights}
    found = accelerate.infer_auto_device_map(model, limits, no_split_module_classes=list(model._no_split_modules))
    return dict(found)


def run_accelerate(shop: Shop, gpus: Mapping[int, int]) -> Traffic:
    """Accelerate's own map, loader and hooks; pixels on the GPU of the tower, as its users put all inputs."""
    with simulated():
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            shop.folder, device_map=accelerate_map(shop, gpus)
        )
        main = torch.device("sim", min(gpus))
        with torch.no_grad(), counted() as traffic:
            tokens = model.generate(
                **{key: value.to(main) for key, value in shop.inputs.items()}, **_settings(shop.num_new)
            )
        assert torch.equal(tokens.cpu(), shop.tokens)
    return traffic


def run_ours(shop: Shop, gpus: Mapping[int, int]) -> Traffic:
    """Our map for the same memory, plus what it counts for the cache and activations of this very request."""
    ids = shop.inputs["input_ids"]
    num_text = int((ids != IMAGE_TOKEN).sum())
    workload = Workload(seq_len=num_text, max_new_tokens=shop.num_new, images=((56, 56),), dtype="fp32")
    table = inference_table(shop.spec, workload)
    running = int((table.kv_full + table.held).sum() + table.prefill.max())
    machine = Machine(
        gpus=tuple(Gpu(index=i, free_bytes=size + running) for i, size in gpus.items()),
        cpu_bytes=10 * shop.weights,
        context_bytes=0,
    )
    placement = place(shop.spec, machine, workload)
    with simulated():
        model = load_placed(shop.folder, placement)
        with torch.no_grad(), counted() as traffic:
            tokens = model.generate(**move_inputs(model, shop.inputs), **_settings(shop.num_new))
        assert torch.equal(tokens.cpu(), shop.tokens)
    return traffic
