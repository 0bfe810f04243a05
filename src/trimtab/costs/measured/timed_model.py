"""A model of which one layer of each kind is real: what tracing counts and timing runs, with batches that it takes.

The other layers hand their rows on and cost nothing. So the model itself feeds each real layer what it would get in
training: positions, masks, windows. Needs torch and Transformers (tested with 5.23), loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trimtab.costs.formula.settings import Attention, CostSettings
from trimtab.costs.measured.stand_ins import FLASH, adapt_module, fuse_kernels, register_flash
from trimtab.costs.measured.traced_fit import PATCHES, PATCHES_SQ, PATCHES_WINDOWED, TOKENS, TOKENS_SQ
from trimtab.errors import ConfigError, TrimtabError, UnknownModelError
from trimtab.models.asking.batches import Batch, Batches
from trimtab.models.asking.forward import make_real, make_weightless
from trimtab.models.asking.inputs import quietly
from trimtab.models.asking.model import build, complete
from trimtab.models.asking.units import split_units
from trimtab.specs import NUM_WORK_TERMS, ModelSpec, SampleTable, Terms

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
        # blocks that are like another one cost nothing to run; if that breaks the model, all are real
        for idle in (_find_idle(model, chosen), {}):
            self.idle: Mapping[str, str] = idle
            self.module = self.build()
            parts = dict(self.module.named_modules())
            self.numbers = tuple(i for i, x in enumerate(model.layers) if x.name in parts and x.name not in idle)
            self.names = [model.layers[i].name for i in self.numbers]
            _compare_sizes(parts, model, self.numbers)
            if settings.lora is not None:
                adapt_module(self.module, [model.layers[i] for i in self.numbers], settings)
            # a first batch shows whether images pass, and whether samples may share a row
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
        # frozen towers keep less
        parts = dict(module.named_modules())
        for layer in self.model.layers:
            if layer.tower in settings.frozen_towers and layer.name in parts:
                parts[layer.name].requires_grad_(False)
        return module

    def say(self) -> list[str]:
        """Say what the steps are not."""
        said = []
        if not self.has_images and any(x.tower == "vision" for x in self.model.layers):
            said.append("No image could be passed through the model: its vision tower has the bytes of formulas.")
        if self.settings.packed and not self.packed:
            said.append("The model takes no positions that restart: steps were of one sample each.")
        return said

    def work(self, pairs: Pairs, batch: Batch) -> dict[int, Terms]:
        """Return the work of each layer; a windowed block has its own pairs in its windowed term."""
        layers = self.model.layers
        # rows and pairs as the first vision block saw them
        blocks = [i for i in pairs if layers[i].tower == "vision" and layers[i].kind == "block"]
        patches = pairs[(blocks or list(pairs))[0]][0] if pairs else 0
        squares = next((pairs[i][1] for i in blocks if self._is_full(i)), patches**2)
        # each layer has its own windowed pairs, all else is the batch's
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
    """Make one sentence of whatever the model's own code raises on a step."""
    try:
        yield
    except (TrimtabError, AssertionError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any class that it likes
        said = " ".join(str(error).split())[:160].rstrip(".")
        raise UnknownModelError(
            f"a step of {model.name} ({model.family}) fails ({type(error).__name__}: {said}): plan with formulas"
        ) from error


def count_pairs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows that enter a block of the vision tower, and the pairs between them that its attention computes.

    Pairs are those between `cu_seqlens` (images, or windows), or all of each entry of a batch.
    """
    hidden = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    rows = hidden.shape[:-1].numel()
    ends = kwargs.get("cu_seqlens")
    if ends is None:
        return rows, rows * (hidden.shape[-2] if hidden.dim() > 1 else 1)
    return rows, int((ends.diff().long() ** 2).sum())


def _find_idle(model: ModelSpec, chosen: Sequence[int]) -> dict[str, str]:
    """Find blocks that need not be real, and the earlier one that stands for each; those that change rows are."""
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
        # with a shared weight, and without
        fresh = sum(num for key, num in own.items() if key not in seen)  # a tied weight is an earlier layer's
        seen |= own.keys()
        if layer.num_params and layer.num_params not in (count, fresh):
            raise ConfigError(
                f"{layer.name} has {layer.num_params} parameters, Transformers {transformers.__version__} builds "
                f"{count}: give the config.json as the model ships it"
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
    # weights: none, or random ones on the device
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
    # kernels of the host that is priced
    if fused_kernels:
        fuse_kernels(module)
    return module.train()


def make_idle(module: nn.Module, idle: Mapping[str, str]) -> None:
    """The blocks named (instances, never classes) hand their rows on, in a tuple where the block they are like has one.

    idle: block -> an earlier block that is real.
    """
    widths: dict[str, int | None] = {}

    # a real block shows how many results its kind returns
    def note(name: str) -> Callable[..., None]:
        return lambda _module, _args, result: widths.__setitem__(name, _width(result))

    # an idle one returns its rows in the same form
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


# -- what the real layers are handed ----------------------------------------------------------------------------------


_FEW = 16  # words next to images whose towers are timed
_COPIES = 4  # a second run of each size is divided among this many images, where images may be of any size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedCall:
    """What a module was handed in one forward of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def rows(self) -> Tensor:
        """The rows that enter: the first tensor handed over."""
        return next(x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedRun:
    """One forward of the model: what each layer of the towers it is for was handed, and the work it was."""

    calls: Mapping[int, Sequence[TimedCall]]  # by number of the layer
    work: Mapping[int, Terms]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model of which the layers in `chosen` have weights on `device`."""

    module: Any  # of a class of Transformers
    kinds: KindModel
    chosen: tuple[int, ...]
    device: torch.device

    @property
    def model(self) -> ModelSpec:
        return self.kinds.model


def has_flash() -> bool:
    return bool(transformers.utils.is_flash_attn_2_available())


def build_model(
    config: Mapping[str, Any], model: ModelSpec, chosen: Sequence[int], settings: CostSettings, device: torch.device
) -> RealModel:
    """The model on `device`, of which `chosen` and what is like none of them is real; `KindModel` says what it refuses.

    Weights are drawn as Transformers draws them for training from scratch.
    """
    if settings.attention == "flash" and (device.type != "cuda" or not has_flash()):
        raise TrimtabError(f"flash attention on {device} needs CUDA and flash_attn: give --set attention=sdpa or eager")
    kinds = KindModel(config, model, settings, chosen)
    return RealModel(module=kinds.build(device), kinds=kinds, chosen=tuple(chosen), device=device)


def runs(real: RealModel, sizes: Sequence[int]) -> Iterator[TimedRun]:
    """Yield steps with images of each size in patches, for towers and projector; with each size in words for the rest.

    A pack is a sample and a second of one token, so that there is a mask where attention needs one: the mask of
    several samples costs what it costs one, and all its pairs are computed. A model whose forward wants an image is
    handed words next to images.
    """
    batches, layers = real.kinds.batches, real.model.layers
    texts = {size: batches.make_text(size) for size in sorted(set(sizes))}
    seeing = {i for i in real.chosen if layers[i].tower != "language"}
    # towers and projector by images, with few words or, where a text needs an image, with many
    if real.kinds.has_images and seeing:
        unit = max(1.0, _work_of_one(real)[PATCHES])
        for times, words, copies in sorted(
            {
                (max(1, round(size / unit / copies)), _FEW if texts[size] is not None else size, copies)
                for size in texts
                for copies in ((1, _COPIES) if batches.has_grid else (1,))
            }
        ):
            seen = seeing if words == _FEW else set(real.chosen)
            yield run_of(real, batches.make(times, words, copies=copies), seen)
    # the decoder by words alone
    for batch in texts.values():
        if batch is not None:
            yield run_of(real, batch, set(real.chosen) - seeing)


def _work_of_one(real: RealModel) -> Terms:
    """Return the work of one of the smallest images."""
    run = run_of(real, real.kinds.batches.make(1, _FEW), set(real.chosen))
    return next(iter(run.work.values()))


def run_of(real: RealModel, batch: Batch, numbers: set[int]) -> TimedRun:
    """Run forward on `batch`: what the layers `numbers` were handed, and the work it was for each layer."""
    calls: dict[int, list[TimedCall]] = {}

    def keep(number: int) -> Callable[..., None]:
        return lambda _module, args, kwargs: calls.setdefault(number, []).append(TimedCall(args=args, kwargs=kwargs))

    # hooks note what each layer is handed
    layers, modules = real.model.layers, dict(real.module.named_modules())
    with ExitStack() as stack:
        for number in real.kinds.numbers:
            hooked = modules[layers[number].name].register_forward_pre_hook(keep(number), with_kwargs=True)
            stack.callback(hooked.remove)
        stack.enter_context(refusing(real.model))
        stack.enter_context(torch.no_grad())
        real.module(**{name: _moved(x, real.device) for name, x in batch.inputs.items()})
    # and from that the work, in the terms of a plan
    seen = {i: those[0] for i, those in calls.items() if layers[i].tower in ("vision", "projector")}
    work = real.kinds.work({i: count_pairs(call.args, call.kwargs) for i, call in seen.items()}, batch)
    tokens = _token_work(batch, real.model.token_window)
    return TimedRun(
        calls={i: those for i, those in calls.items() if i in numbers},
        work={i: (*terms[:TOKENS], *tokens) for i, terms in work.items()},
    )


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _token_work(batch: Batch, token_window: int | None) -> Terms:
    """Count pairs as a plan does: of each sample by itself, and what a window leaves of it."""
    tokens = np.array(batch.lengths * batch.num_rows, dtype=np.int64)
    table = SampleTable.of(np.zeros_like(tokens), tokens)
    return tuple(table.work(token_window=token_window).sum(axis=0).tolist()[TOKENS:])
