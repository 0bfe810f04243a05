"""Any family of Transformers as a model of a few small layers: configurations shrunk by field name. Needs torch."""

import contextlib
import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn

from trimtab.runtime.data.formats import model_classes

READ = yaml.safe_load(Path(__file__).with_name("small_models.yaml").read_text(encoding="utf-8"))
SMALL: dict[str, Any] = {name: value for value, names in READ["small"].items() for name in names}
GIVEN: dict[str, dict[str, Any]] = READ["given"]
CHANGES: dict[str, dict[str, Any]] = READ["changes"]
VISION = {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 16}
COUNTS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers")
MAX_LAYERS = 6


def make_shrunk(model_type: str, *, changes: Mapping[str, Any] | None = None, attention: str = "sdpa") -> nn.Module:
    """The family's `AutoModelForImageTextToText` in float32, evaluating; weights drawn so that attention is uneven.

    `changes` by path, as {"text_config.sliding_window": None, "image_token_id": 99}. Where a family has no code for
    `attention`, it is eager.
    """
    config = shrink(model_type, changes or {})
    torch.manual_seed(0)
    make = transformers.AutoModelForImageTextToText.from_config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = make(config, attn_implementation=attention, dtype=torch.float32)
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            model = make(config, attn_implementation="eager", dtype=torch.float32)
    return draw_weights(model)


def draw_weights(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.12)
            elif not parameter.any() and "A_log" not in name:
                parameter.normal_(std=0.05)
    return model.eval()


def shrink(model_type: str, changes: Mapping[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(GIVEN.get(model_type, {})))
    _shrink_part(config, sees=False, ids={})
    if hasattr(model_classes(config)[0], "get_rope_index") and model_type not in GIVEN:
        _shrink_mrope(config.get_text_config())
    for path, value in {**CHANGES.get(model_type, {}), **changes}.items():
        *parts, name = path.split(".")
        holder = config
        for part in parts:
            holder = holder[part] if isinstance(holder, dict) else getattr(holder, part)
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)
    return config


def _shrink_part(config: Any, *, sees: bool, ids: dict[int, int]) -> None:
    """`ids`: small ones for those of special tokens, one for all parts that name the same."""
    rotated = vars(config).get("head_dim") and vars(config)["head_dim"] == vars(config).get("qk_rope_head_dim")
    num = next((getattr(config, name) for name in COUNTS if isinstance(getattr(config, name, None), int)), None)
    if num is not None and not vars(config).get("per_layer_config"):
        _cut_layers(config, num)
    for name, value in {**SMALL, **(VISION if sees else {})}.items():
        try:
            own = getattr(config, name, None)
        except Exception:  # fields that differ by layer have no value of their own
            continue
        if own is None or isinstance(own, bool):
            continue
        if isinstance(own, (list, tuple)) and all(isinstance(x, int) for x in own):
            value = type(own)([value] * len(own))
        elif not isinstance(own, int):
            continue
        with contextlib.suppress(AttributeError, NotImplementedError):
            setattr(config, name, value)
    if rotated:  # latent attention: the rotated part alone is called a head
        config.head_dim = SMALL["qk_rope_head_dim"]
    with contextlib.suppress(Exception):  # those that differ by layer are given small
        if getattr(config, "kv_lora_rank", None):  # latent attention has as many keys as queries
            config.num_key_value_heads = 4
    for name in list(vars(config)):
        value = vars(config)[name]
        if name.endswith(("token_id", "token_index")) and isinstance(value, int) and value > 255:
            setattr(config, name, ids.setdefault(value, 128 + len(ids)))
        if isinstance(value, transformers.PretrainedConfig):
            seen = sees or any(word in name for word in ("vis", "image", "video", "encoder"))
            _shrink_part(value, sees=seen, ids=ids)


def _cut_layers(config: Any, num: int) -> None:
    """One layer of each kind, in order, and at least two; lists with an entry for each layer are cut alike."""
    by_layer = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == num and num > 1
    }
    kinds: dict[str, int] = {}
    for layer in range(num):
        kinds.setdefault(repr([value[layer] for value in by_layer.values()]), layer)
    kept = sorted(kinds.values())[:MAX_LAYERS]
    kept = sorted({*kept, *[layer for layer in range(num) if layer not in kept][: max(0, 2 - len(kept))]})
    for name, value in by_layer.items():
        setattr(config, name, type(value)(value[layer] for layer in kept))
    for name in COUNTS:
        if getattr(config, name, None) == num:
            setattr(config, name, len(kept))
    for name, value in list(vars(config).items()):
        if name in by_layer or not name.endswith(("indexes", "indices", "_layers", "layer_ids")):
            continue
        if isinstance(value, (list, tuple)) and value and all(isinstance(x, int) for x in value):
            setattr(config, name, type(value)(range(min(len(value), len(kept)))))


def _shrink_mrope(text: Any) -> None:
    """M-RoPE sections add up to half of the rotated part of a head of 16."""
    rope = dict(getattr(text, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4})
    rotated = rope.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None)) or 1.0
    half = int(8 * rotated)
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    text.rope_parameters = rope
