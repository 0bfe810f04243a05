"""Training batches for a model of any family: words and images of chosen sizes, as its own forward takes them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trimtab.errors import UnknownModelError
from trimtab.models.asking.forward import Weightless
from trimtab.models.asking.inputs import (
    ImageSource,
    Values,
    image_token,
    num_embeddings,
    other_words,
    plain_ids,
    quietly,
)
from trimtab.models.asking.units import Unit

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""What processors call 0 text, 1 image, 2 video per token."""
PLACES = "image_embeds_position_mask"
"""Says where rows of images go, of models that have no token for them."""

MERGES = ("get_placeholder_mask", "get_image_placeholder_mask", "inputs_merger")
"""Functions of models that are handed rows of images, and refuse another number of them than there are places."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What the model is called with, and its rows of text and image tokens."""

    inputs: Values
    lengths: tuple[int, ...]  # of the samples in one row, in tokens
    num_rows: int
    packed: bool  # positions restart: more than one sample lies in a row
    has_images: bool

    @property
    def num_tokens(self) -> int:
        return self.num_rows * sum(self.lengths)

    @property
    def num_pairs(self) -> int:
        """Return the pairs of tokens in one row."""
        return self.num_tokens * sum(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrangement:
    """How a batch is put together; the first that the model takes is kept."""

    images: int | None  # which of the calls with images; None: only text
    axes: int | None  # rows of positions; None: the model makes them
    types: bool
    samples: bool  # a sample for each image; else one with all of them


class Batches:
    """Batches of growing sizes for one model; its parameters may be fake.

    `packed`: a token more, a sample of its own, so that there are masks where attention needs them; where the model
    takes no positions that restart, a batch is one sample. Where it takes no image of ours, a batch is only text: see
    `Batch.has_images`. Raises `UnknownModelError` where no batch is taken.
    """

    def __init__(self, model: Any, units: list[Unit], *, packed: bool) -> None:
        self.model, self.packed = model, packed
        self.images = ImageSource(model, units)
        self.token = image_token(model.config)
        self.word = int(plain_ids(model.config, num_embeddings(model))[5])
        self._taken = set(inspect.signature(model.forward).parameters)
        self._chosen: _Arrangement | None = None
        self._rows: dict[tuple[_Arrangement, int], int] = {}

    def make(self, times: int, num_text: int, *, multiple: int = 1, copies: int = 1) -> Batch:
        """Make `times` the smallest images, `num_text` words around them; more, for a `multiple` of tokens in a row.

        `copies`: so many images of that size, where `has_grid`.
        """
        if self._chosen is None:
            self._chosen = self._choose(num_text, multiple)
        return self._put(self._chosen, times, num_text, multiple, copies=copies)

    @property
    def has_grid(self) -> bool:
        """Return whether images of any size come as patches next to a table of sizes."""
        return (
            self._chosen is not None and self._chosen.images is not None and self.images.has_grid(self._chosen.images)
        )

    def make_text(self, num_tokens: int) -> Batch | None:
        """Make so many words and no image, as `make` arranged its first batch; None: its forward wants an image."""
        assert self._chosen is not None, "asked for after `make`"
        alone = replace(self._chosen, images=None, samples=False)
        batch = self._put(alone, 1, num_tokens - (alone.axes is not None), 1)
        try:
            with torch.no_grad(), quietly(), Weightless():
                self.model(**batch.inputs)
        except Exception:  # of any class that the model's own code likes
            return None
        return batch

    def _choose(self, num_text: int, multiple: int) -> _Arrangement:
        said, sizes = "", (1,) if self.images.asks else (1, 2)
        for arrangement in self._arrangements():
            try:
                with torch.no_grad(), quietly(), Weightless():
                    if all(
                        self.model(**self._put(arrangement, x, num_text, multiple).inputs).loss is not None
                        for x in sizes
                    ):
                        return arrangement
            except Exception as error:  # of any class that the model's own code likes
                said = said or f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise UnknownModelError(
            f"{self.model.config.model_type!r} takes no batch of ours ({said or 'no loss'}): plan with formulas"
        )

    def _arrangements(self) -> Iterator[_Arrangement]:
        """Yield the likeliest first: with images, packed, with types; at last only text."""
        axes: list[int | None] = [None]
        if self.packed:
            asks = hasattr(getattr(self.model, "model", self.model), "get_rope_index")
            axes = [4, 3, 1, None] if asks else [1, None]
        types = [True, False] if self._taken & set(TOKEN_TYPES) else [False]
        for which in itertools.chain(self.images.choices(), [None]):
            apart = [False] if which is None or self.images.asks else [False, True]
            for a, s, t in itertools.product(axes, apart, types):
                yield _Arrangement(images=which, axes=a, types=t, samples=s)

    def _put(self, how: _Arrangement, times: int, num_text: int, multiple: int, *, copies: int = 1) -> Batch:
        if (how, times) not in self._rows:
            self._rows[how, times] = self._count_rows(how, times, num_text)
        num_image = copies * self._rows[how, times]
        num_text += -(num_image + num_text + (how.axes is not None)) % multiple
        return self._fill(how, times, num_text, num_image, copies=copies)

    def _count_rows(self, how: _Arrangement, times: int, num_text: int) -> int:
        """Count the rows that these images take in each row of text; 0 where other layers than its own see them."""
        if how.images is None or (self.token is None and PLACES not in self._taken):
            return 0
        found = find_scattered(self.model, self._fill(how, times, num_text, 1).inputs)
        return (found or 0) // (times if how.samples else 1)

    def _fill(self, how: _Arrangement, times: int, num_text: int, num_image: int, *, copies: int = 1) -> Batch:
        images = {} if how.images is None else self.images.draw(how.images, times, copies=copies)
        before = num_text // 2
        text, place = self.word, self.word if self.token is None else self.token
        row = [text] * before + [place] * num_image + [text] * (num_text - before)
        lengths = [len(row)]
        if how.axes is not None:
            row, lengths = [*row, text], [*lengths, 1]
        num_samples = times if how.samples else 1
        ids = torch.tensor([row] * num_samples)
        labels = ids if self.token is None else ids.masked_fill(ids == self.token, -100)
        inputs: Values = {"input_ids": ids, "labels": labels.clone(), "use_cache": False}
        inputs |= {name: x for name, x in other_words(self.model, len(ids)).items() if name in self._taken} | images
        if "bbox" in self._taken:
            inputs["bbox"] = torch.zeros(*ids.shape, 4)
        if how.axes is not None:
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            inputs["position_ids"] = positions if how.axes == 1 else positions.expand(how.axes, 1, -1)
        if how.types:
            inputs |= dict.fromkeys(self._taken & set(TOKEN_TYPES), ids.eq(self.token or -1).long())
        if how.images is not None:
            inputs |= other_masks(self._taken, ids, images)
        if how.images is not None and PLACES in self._taken:
            at = torch.arange(ids.shape[1])
            inputs[PLACES] = at.ge(before).logical_and(at.lt(before + num_image)).expand(ids.shape)
        return Batch(
            inputs=inputs,
            lengths=tuple(lengths),
            num_rows=len(ids),
            packed=how.axes is not None,
            has_images=how.images is not None,
        )


class _Scattered(Exception):  # noqa: N818 - what is looked for
    """Ends a forward at the place where rows of images are put among those of words."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows


class _Watch(TorchFunctionMode):
    """Raises `_Scattered` where values are put into the words' embeddings by a mask."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.masked_scatter, Tensor.masked_scatter_, Tensor.__setitem__):
            target, mask, *source = args
            is_words = target.is_floating_point() and target.dim() == 3 and target.shape[:2] == self.shape
            rows = source[0] if is_words and source and isinstance(mask, Tensor) else None
            if isinstance(rows, Tensor) and rows.dim() > 1:
                raise _Scattered(rows.numel() // target.shape[-1])
        return func(*args, **(kwargs or {}))


def find_scattered(model: Any, inputs: Values) -> int | None:
    """Return the rows of images that the forward puts among the words, whatever number the words leave place for.

    Seen where one of `MERGES` is handed them, or where they are written. None: it does neither.
    """
    ids = inputs["input_ids"]

    def watched(own: Callable[..., Any]) -> Callable[..., Any]:
        def merge(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(own).bind(*args, **kwargs).arguments
            words = given.pop("inputs_embeds", None)
            given.pop("input_ids", None)
            features = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()]
            if features and words is not None:
                raise _Scattered(sum(x.numel() for x in features) // words.shape[-1])
            return own(*args, **kwargs)

        return merge

    with contextlib.ExitStack() as stack:
        for part, name in itertools.product(model.modules(), MERGES):
            own = getattr(part, name, None)
            if own is not None:
                setattr(part, name, watched(own))
                stack.callback(delattr, part, name)
        try:
            with torch.no_grad(), quietly(), Weightless(), _Watch(ids.shape):
                model(**inputs)
        except _Scattered as found:
            return found.num_rows
        except Exception:  # of any class that the model's own code likes
            return None
    return None


def other_masks(taken: set[str], ids: Tensor, images: Values) -> Values:
    """Return what says which words see which image, by the names that processors have for it."""
    found: Values = {}
    if "aspect_ratio_mask" in images and "cross_attention_mask" in taken:
        num_images, num_tiles = images["aspect_ratio_mask"].shape[1:]
        found["cross_attention_mask"] = torch.ones(*ids.shape, num_images, num_tiles, dtype=torch.long)
    if "image_attention_mask" in taken and images["pixel_values"].dim() > 4:
        found["image_attention_mask"] = torch.ones(*ids.shape, images["pixel_values"].shape[1], dtype=torch.long)
    return found
