"""Real layers and what the real model hands them: one of each kind with random weights, other blocks hand rows on.

The model is built from its configuration without weights; only one block of each kind, embeddings, norms, projector
and head are given any. So the model itself feeds each layer what it would get in training: positions, masks, windows.
Needs torch and Transformers (tested with 5.23), loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from trimtab.costs.analytic import find_columns
from trimtab.costs.settings import Attention, CostSettings
from trimtab.errors import ConfigError, TrimtabError, UnknownModelError
from trimtab.specs import NUM_WORK_TERMS, WORK_TERMS, LayerSpec, ModelSpec, SampleTable

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IMPLEMENTATIONS: dict[Attention, str] = {"flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}
GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe")
"""Images of any size as one row of patches with their grids; text positions of three axes."""
TILE_FAMILIES = ("internvl", "llava", "gemma3")
"""A batch of equal tiles."""
PINNED_FAMILIES = ("llava_next", "llava_onevision")
"""Images cut into the tiles of one of the configuration's grid points, with a thumbnail."""

_THREE_AXES = ("qwen2_vl", "qwen2_5_vl")  # whose rotary sections have no default
_PARTS = 4  # a second run of each size is divided among this many images or samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """What a module was handed in one forward of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def rows(self) -> Tensor:
        """The rows that enter: the first tensor handed over."""
        return next(x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One forward of a tower: what each layer that ran was handed, and the work it was, per WORK_TERMS."""

    calls: Mapping[int, Sequence[Call]]  # by number of the layer
    work: Mapping[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RealModel:
    """A model of which the layers in `chosen` are real."""

    module: Any  # of a class of Transformers
    model: ModelSpec
    chosen: tuple[int, ...]
    settings: CostSettings
    device: torch.device


def has_flash() -> bool:
    return bool(transformers.utils.is_flash_attn_2_available())


def build_model(
    config: Mapping[str, Any], model: ModelSpec, chosen: Sequence[int], settings: CostSettings, device: torch.device
) -> RealModel:
    """The model on `device` in training mode; blocks that are not `chosen` have no weights and hand their rows on.

    Weights are drawn as Transformers draws them for training from scratch. Raises `UnknownModelError` for a family
    with remote code only, `ConfigError` where Transformers builds other layers than were described.
    """
    known = (*GRID_FAMILIES, *TILE_FAMILIES, *PINNED_FAMILIES)
    if model.family not in known:
        raise UnknownModelError(
            f"layers of model_type {model.family!r} were to be timed, and Transformers has no code of its own for it: "
            f"give the configuration of one of {', '.join(known)}, or leave --timed out"
        )
    if settings.attention == "flash" and (device.type != "cuda" or not has_flash()):
        raise TrimtabError(
            f"flash attention was to be timed on {device}, and it needs a CUDA device and the package flash_attn: "
            "give --attention sdpa or eager"
        )
    fields = dict(config)
    built = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    if model.family in _THREE_AXES and "mrope_section" not in (built.text_config.rope_parameters or {}):
        raise ConfigError(
            f"mrope_section of text_config is missing in the configuration of {model.family}, and Transformers' layers "
            "read it, as a description needs not: give the config.json as the model ships it"
        )
    with torch.device("meta"):
        module = transformers.AutoModelForImageTextToText.from_config(
            built, attn_implementation=IMPLEMENTATIONS[settings.attention], dtype=DTYPES[settings.dtype]
        )
    modules = dict(module.named_modules())
    _compare_sizes(modules, [model.layers[i] for i in chosen])
    idle = [x.name for i, x in enumerate(model.layers) if x.kind == "block" and i not in chosen]
    for name in idle:
        modules[name].forward = _hand_on  # of this instance; its class stays as it is
    without = tuple(f"{name}." for name in idle)
    for name, part in modules.items():
        if not f"{name}.".startswith(without):
            part.to_empty(device=device, recurse=False)
    module.initialize_weights()
    return RealModel(module=module.train(), model=model, chosen=tuple(chosen), settings=settings, device=device)


def _compare_sizes(modules: Mapping[str, nn.Module], layers: Sequence[LayerSpec]) -> None:
    for layer in layers:
        if layer.name not in modules or layer.num_params == 0:  # a bare parameter; a tied head
            continue
        count = sum(p.numel() for p in modules[layer.name].parameters())
        if count != layer.num_params:
            raise ConfigError(
                f"{layer.name} has {layer.num_params} parameters by its description, and Transformers "
                f"{transformers.__version__} builds it with {count}: give the config.json as the model ships it"
            )


def _hand_on(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return hidden_states


@contextmanager
def _captured(real: RealModel, numbers: Sequence[int]) -> Iterator[dict[int, list[Call]]]:
    """What the modules of these layers are handed while the context lasts."""
    calls: dict[int, list[Call]] = {}
    modules = dict(real.module.named_modules())

    def keep(number: int) -> Callable[..., None]:
        return lambda _module, args, kwargs: calls.setdefault(number, []).append(Call(args=args, kwargs=kwargs))

    hooks = [
        modules[name].register_forward_pre_hook(keep(number), with_kwargs=True)
        for number in numbers
        if (name := real.model.layers[number].name) in modules
    ]
    try:
        with torch.no_grad():
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


# -- images ---------------------------------------------------------------------------------------------------------


def vision_runs(real: RealModel, sizes: Sequence[int]) -> Iterator[Run]:
    """The vision tower and the projector on images of about each size in patches."""
    layers = real.model.layers
    numbers = [i for i in real.chosen if layers[i].tower != "language"]
    block = next(i for i in numbers if layers[i].tower == "vision" and layers[i].kind == "block")
    for images in _image_inputs(real, sizes):
        with _captured(real, numbers) as calls:
            real.module.model.get_image_features(**images)
        patches = calls[block][0].rows.shape[:-1].numel()
        work = {i: _image_work(layers[i], calls[i][0], patches, real.settings) for i in calls}
        yield Run(calls=calls, work=work)


def _image_work(layer: LayerSpec, call: Call, patches: int, settings: CostSettings) -> tuple[float, ...]:
    """Pairs are those between `cu_seqlens` (images, or windows), or all of each entry of a batch."""
    values = [0.0] * NUM_WORK_TERMS
    values[0], values[WORK_TERMS.index("patches")] = 1.0, float(patches)
    if layer.attention is not None:
        ends = call.kwargs.get("cu_seqlens")
        pairs = call.rows.shape[0] * call.rows.shape[1] ** 2 if ends is None else int((ends.diff().long() ** 2).sum())
        values[find_columns(layer, settings).pairs] = float(pairs)
    return tuple(values)


def _image_inputs(real: RealModel, sizes: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    """Keyword arguments of `get_image_features`; each size twice, as one image and as four, where images may vary."""
    config, family = real.module.config, real.model.family
    vision, device, dtype = config.vision_config, real.device, DTYPES[real.settings.dtype]
    if family in GRID_FAMILIES:
        merge, width = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        for grids in sorted({(_grid(size // parts, merge),) * parts for size in sizes for parts in (1, _PARTS)}):
            yield {
                "pixel_values": torch.randn(sum(h * w for h, w in grids), width, device=device, dtype=dtype),
                "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids], device=device),
            }
        return
    (height, width), (patch_height, patch_width) = _pair(vision.image_size), _pair(vision.patch_size)
    tile_rows = (height // patch_height) * (width // patch_width)
    tile = (getattr(vision, "num_channels", 3), height, width)
    if family in TILE_FAMILIES:
        for count in sorted({max(1, round(size / tile_rows)) for size in sizes}):
            yield {"pixel_values": torch.randn(count, *tile, device=device, dtype=dtype)}
        return
    point = min(config.image_grid_pinpoints, key=lambda point: (point[0] * point[1], point))
    tiles = (point[0] // height) * (point[1] // width) + 1
    for count in sorted({max(1, round(size / tile_rows / tiles)) for size in sizes}):
        yield {
            "pixel_values": torch.randn(count, tiles, *tile, device=device, dtype=dtype),
            "image_sizes": torch.tensor([point] * count, device=device),
        }


def _grid(rows: int, merge: int) -> tuple[int, int]:
    """Height and width of about `rows` patches, near to square, whole groups of merge x merge."""
    height = merge * max(1, round(rows**0.5 / merge))
    return height, merge * max(1, round(rows / height / merge))


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


# -- text -----------------------------------------------------------------------------------------------------------


def language_runs(real: RealModel, sizes: Sequence[int]) -> Iterator[Run]:
    """The language model on packs of each size in tokens; the head is handed labels too.

    Flash attention: one sample, and four. Else a sample and a second of one token, so that there is a mask: the mask
    of several samples costs what it costs one, and all its pairs are computed.
    """
    layers, flash = real.model.layers, real.settings.attention == "flash"
    numbers = [i for i in real.chosen if layers[i].tower == "language"]
    head = next(i for i in numbers if layers[i].kind == "head")
    packs = {(size // parts,) * parts for size in sizes for parts in (1, _PARTS)}
    for lengths in sorted(packs if flash else {(size - 1, 1) for size in sizes}):
        tokens = sum(lengths)
        with _captured(real, numbers) as calls:
            result = real.module.model.language_model(
                input_ids=torch.randint(real.model.vocab_size, (1, tokens), device=real.device),
                use_cache=False,
                **_apart(real, lengths),
            )
        labels = torch.randint(real.model.vocab_size, (tokens,), device=real.device)
        calls[head] = [Call(args=(result.last_hidden_state,), kwargs={"labels": labels})]
        work = _sample_work(lengths, real.model.token_window)
        yield Run(calls=calls, work=dict.fromkeys(calls, work))


def _apart(real: RealModel, lengths: Sequence[int]) -> dict[str, Any]:
    """Positions that restart with each sample, from which Transformers makes masks; their ends for flash kernels."""
    positions = torch.cat([torch.arange(n, device=real.device) for n in lengths])[None]
    if real.model.family in GRID_FAMILIES:
        positions = positions.expand(4, 1, -1)
    if real.settings.attention != "flash":
        return {"position_ids": positions}
    ends = torch.tensor([0, *lengths], device=real.device).cumsum(0, dtype=torch.int32)
    named = {"cu_seq_lens": ends, "max_length": max(lengths)}
    return {"position_ids": positions, **{f"{name}_{side}": x for name, x in named.items() for side in ("q", "k")}}


def _sample_work(lengths: Sequence[int], token_window: int | None) -> tuple[float, ...]:
    tokens = np.array(lengths, dtype=np.int64)
    none = np.zeros_like(tokens)
    table = SampleTable(
        num_images=none,
        num_patches=none,
        num_tokens=tokens,
        patches_sq=none,
        patches_windowed=none,
        source=none.astype(np.int32),
    )
    _, *sums = table.work(token_window=token_window).sum(axis=0).tolist()
    return (1.0, *sums)
