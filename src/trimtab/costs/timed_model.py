"""What the real layers of a model are handed: one of each kind with random weights, fed by the whole model.

Needs torch and Transformers (tested with 5.23), loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from trimtab.costs.kind_model import KindModel, count_pairs, refusing
from trimtab.costs.settings import CostSettings
from trimtab.costs.traced_fit import PATCHES, TOKENS
from trimtab.errors import TrimtabError
from trimtab.models.asking.batches import Batch
from trimtab.specs import ModelSpec, SampleTable, Terms

_FEW = 16  # words beside images whose towers are timed
_COPIES = 4  # a second run of each size is divided among this many images, where images may be of any size


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
    """One forward of the model: what each layer of the towers it is for was handed, and the work it was."""

    calls: Mapping[int, Sequence[Call]]  # by number of the layer
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
        raise TrimtabError(
            f"flash attention was to be timed on {device}, and it needs a CUDA device and the package flash_attn: "
            "give --set attention=sdpa or eager"
        )
    kinds = KindModel(config, model, settings, chosen)
    return RealModel(module=kinds.build(device), kinds=kinds, chosen=tuple(chosen), device=device)


def runs(real: RealModel, sizes: Sequence[int]) -> Iterator[Run]:
    """Steps with images of about each size in patches, for towers and projector; with each size in words for the rest.

    A pack is a sample and a second of one token, so that there is a mask where attention needs one: the mask of
    several samples costs what it costs one, and all its pairs are computed. A model whose forward wants an image is
    handed words beside images.
    """
    batches, layers = real.kinds.batches, real.model.layers
    texts = {size: batches.make_text(size) for size in sorted(set(sizes))}
    seeing = {i for i in real.chosen if layers[i].tower != "language"}
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
    for batch in texts.values():
        if batch is not None:
            yield run_of(real, batch, set(real.chosen) - seeing)


def _work_of_one(real: RealModel) -> Terms:
    """Of the smallest images."""
    run = run_of(real, real.kinds.batches.make(1, _FEW), set(real.chosen))
    return next(iter(run.work.values()))


def run_of(real: RealModel, batch: Batch, numbers: set[int]) -> Run:
    """One forward on `batch`: what the layers `numbers` were handed, and the work it was for each layer."""
    calls: dict[int, list[Call]] = {}

    def keep(number: int) -> Callable[..., None]:
        return lambda _module, args, kwargs: calls.setdefault(number, []).append(Call(args=args, kwargs=kwargs))

    layers, modules = real.model.layers, dict(real.module.named_modules())
    with ExitStack() as stack:
        for number in real.kinds.numbers:
            hooked = modules[layers[number].name].register_forward_pre_hook(keep(number), with_kwargs=True)
            stack.callback(hooked.remove)
        stack.enter_context(refusing(real.model))
        stack.enter_context(torch.no_grad())
        real.module(**{name: _moved(x, real.device) for name, x in batch.inputs.items()})
    seen = {i: those[0] for i, those in calls.items() if layers[i].tower in ("vision", "projector")}
    work = real.kinds.work({i: count_pairs(call.args, call.kwargs) for i, call in seen.items()}, batch)
    tokens = _token_work(batch, real.model.token_window)
    return Run(
        calls={i: those for i, those in calls.items() if i in numbers},
        work={i: (*terms[:TOKENS], *tokens) for i, terms in work.items()},
    )


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _token_work(batch: Batch, token_window: int | None) -> Terms:
    """As a plan counts them: of each sample by itself, and what a window leaves of it."""
    tokens = np.array(batch.lengths * batch.num_rows, dtype=np.int64)
    table = SampleTable.of(np.zeros_like(tokens), tokens)
    return tuple(table.work(token_window=token_window).sum(axis=0).tolist()[TOKENS:])
