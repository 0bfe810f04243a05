"""A model of which one layer of each kind is real: what tracing counts and timing runs, with batches that it takes.

The other layers hand their rows on and cost nothing. So the model itself feeds each real layer what it would get in
training: positions, masks, windows. Needs torch and Transformers (tested with 5.23), loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trimtab.costs.settings import Attention, CostSettings
from trimtab.costs.traced_fit import PATCHES, PATCHES_SQ, PATCHES_WINDOWED, TOKENS, TOKENS_SQ
from trimtab.costs.traced_kernels import FLASH, fuse_kernels, register_flash
from trimtab.costs.traced_lora import adapt_module
from trimtab.errors import ConfigError, TrimtabError, UnknownModelError
from trimtab.models.asking.batches import Batch, Batches
from trimtab.models.asking.forward import make_real, make_weightless
from trimtab.models.asking.inputs import quietly
from trimtab.models.asking.model import build, complete
from trimtab.models.asking.units import split_units
from trimtab.specs import NUM_WORK_TERMS, ModelSpec, Terms

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IMPLEMENTATIONS: dict[Attention, str] = {"flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}
ROW = 256
"""Tokens of a step that is counted are multiples of this, which chunks of linear attention (64 to 256) divide."""

Pairs = Mapping[int, tuple[int, int]]
"""By number of a layer: rows that entered it, and pairs of them that its attention computes."""


class KindModel:
    """The model without weights, real in the layers `chosen` and in those that are like none of them.

    Raises `UnknownModelError` where Transformers has no such model or its forward takes no batch of ours,
    `ConfigError` where Transformers builds other layers than were described.
    """

    def __init__(
        self, config: Mapping[str, Any], model: ModelSpec, settings: CostSettings, chosen: Sequence[int]
    ) -> None:
        self.model, self.settings = model, settings
        self._fields = config
        for idle in (_find_idle(model, chosen), {}):
            self.idle: Mapping[str, str] = idle
            self.module = self.build()
            parts = dict(self.module.named_modules())
            self.numbers = tuple(i for i, x in enumerate(model.layers) if x.name in parts and x.name not in idle)
            self.names = [model.layers[i].name for i in self.numbers]
            _compare_sizes(parts, model, self.numbers)
            if settings.lora is not None:
                adapt_module(self.module, [model.layers[i] for i in self.numbers], settings)
            with quietly():
                self.batches = Batches(self.module, split_units(self.module), packed=settings.packed)
            try:
                first = self.batches.make(1, 16, multiple=ROW)
            except UnknownModelError:
                if not idle:
                    raise
                continue
            self.packed, self.has_images = first.packed, first.has_images
            if self.has_images:  # else a block that is real may lie in a tower that images never reach
                break

    def build(self, device: torch.device | None = None) -> Any:
        """The model in training mode; with random weights on `device`, else without any."""
        settings = self.settings
        with quietly():
            module = build_to_run(
                complete(self._fields),  # a new one: running without weights changes it
                dtype=DTYPES[settings.dtype],
                attention=settings.attention,
                fused_kernels=settings.fused_kernels,
                idle=self.idle,
                device=device,
            )
        parts = dict(module.named_modules())
        for layer in self.model.layers:
            if layer.tower in settings.frozen_towers and layer.name in parts:
                parts[layer.name].requires_grad_(False)
        return module

    def say(self) -> list[str]:
        """What the steps are not."""
        said = []
        if not self.has_images and any(x.tower == "vision" for x in self.model.layers):
            said.append("No image could be passed through the model: its vision tower has the bytes of formulas.")
        if self.settings.packed and not self.packed:
            said.append("The model takes no positions that restart: steps were of one sample each.")
        return said

    def work(self, pairs: Pairs, batch: Batch) -> dict[int, Terms]:
        """Of each layer: a windowed block's own pairs are in its windowed term, those of others in the squares."""
        layers = self.model.layers
        blocks = [i for i in pairs if layers[i].tower == "vision" and layers[i].kind == "block"]
        patches = pairs[(blocks or list(pairs))[0]][0] if pairs else 0
        squares = next((pairs[i][1] for i in blocks if self._is_full(i)), patches**2)
        result = {}
        for number in self.numbers:
            terms = [0.0] * NUM_WORK_TERMS
            terms[0], terms[PATCHES], terms[TOKENS] = 1.0, float(patches), float(batch.num_tokens)
            terms[PATCHES_SQ] = float(squares)
            terms[PATCHES_WINDOWED] = float(pairs[number][1] if number in blocks else squares)
            terms[TOKENS_SQ] = terms[TOKENS_SQ + 1] = float(batch.num_pairs)
            result[number] = tuple(terms)
        return result

    def _is_full(self, number: int) -> bool:
        attention = self.model.layers[number].attention
        return attention is not None and attention.window is None


@contextmanager
def refusing(model: ModelSpec) -> Iterator[None]:
    """Whatever the model's own code raises on a step becomes one sentence."""
    try:
        yield
    except (TrimtabError, AssertionError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any class that it likes
        said = " ".join(str(error).split())[:160].rstrip(".")
        raise UnknownModelError(
            f"steps of {model.name} were to be run layer by layer, and Transformers' code of {model.family} fails on "
            f"one ({type(error).__name__}: {said}): give the config.json as the model ships it, or plan with formulas"
        ) from error


def count_pairs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows that enter a block of the vision tower, and the pairs between them that its attention computes.

    Pairs are those between `cu_seqlens` (images, or windows), or all of each entry of a batch.
    """
    hidden = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    rows = hidden.shape[:-1].numel()
    ends = kwargs.get("cu_seqlens")
    if ends is None:
        return rows, rows * (hidden.shape[-2] if hidden.dim() > 1 else 1)
    return rows, int((ends.diff().long() ** 2).sum())


def _find_idle(model: ModelSpec, chosen: Sequence[int]) -> dict[str, str]:
    """Blocks that need not be real, each with the earlier one that stands for it; those that change their rows are."""
    first = {model.layers[i].alike: model.layers[i].name for i in reversed(chosen)}
    return {
        x.name: first[x.alike]
        for i, x in enumerate(model.layers)
        if x.kind == "block"
        and i not in chosen
        and x.alike in first
        and (x.hidden_size, x.rows_per_input) == (x.output_size, x.rows_out_per_input)
    }


def _compare_sizes(parts: Mapping[str, nn.Module], model: ModelSpec, numbers: Sequence[int]) -> None:
    seen: set[int] = set()
    for layer in (model.layers[i] for i in numbers):
        own = {id(p): p.numel() for p in parts[layer.name].parameters()}
        count = sum(own.values())
        fresh = sum(num for key, num in own.items() if key not in seen)  # a tied weight is an earlier layer's
        seen |= own.keys()
        if layer.num_params and layer.num_params not in (count, fresh):
            raise ConfigError(
                f"{layer.name} has {layer.num_params} parameters by its description, and Transformers "
                f"{transformers.__version__} builds it with {count}: give the config.json as the model ships it"
            )


# -- building -------------------------------------------------------------------------------------------------------


def build_to_run(
    config: Any,
    *,
    dtype: torch.dtype,
    attention: Attention,
    fused_kernels: bool = False,
    idle: Mapping[str, str] | None = None,
    device: torch.device | None = None,
) -> Any:
    """The image-text model of a Transformers configuration in training mode, on `device` or (None) without weights.

    attention: "sdpa", "eager", or "flash", for which `attend_flash` stands in where there are no weights; eager where
    the model has no other. fused_kernels: as `fuse_kernels` has them. idle: blocks that hand their rows on and cost
    nothing, each with the earlier one that it is like.
    """
    stands_in = attention == "flash" and device is None
    module = build(config, dtype=dtype, attention="sdpa" if stands_in else IMPLEMENTATIONS[attention])
    make_idle(module, idle or {})
    if device is None:
        make_weightless(module, without=idle or ())
    else:
        make_real(module, device, without=idle or ())
    if stands_in:  # set behind Transformers' back, which would look for the package
        register_flash()
        for part in module.modules():
            if isinstance(part, transformers.PreTrainedModel) and part.config._attn_implementation == "sdpa":
                part.config._attn_implementation = FLASH
    if fused_kernels:
        fuse_kernels(module)
    return module.train()


def make_idle(module: nn.Module, idle: Mapping[str, str]) -> None:
    """The blocks named (instances, never classes) hand their rows on, in a tuple where the block they are like has one.

    idle: block -> an earlier block that is real.
    """
    widths: dict[str, int | None] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda _module, _args, result: widths.__setitem__(name, _width(result))

    def hand_on(name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            rows = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            width = widths[name]
            return rows if width is None else (rows, *[None] * (width - 1))

        return forward

    for name in set(idle.values()):
        module.get_submodule(name).register_forward_hook(note(name))
    for name, real in idle.items():
        module.get_submodule(name).forward = hand_on(real)


def _width(result: Any) -> int | None:
    return None if isinstance(result, Tensor) else len(result)
