"""Training batches for a model of any family: words and images of chosen sizes, as its own forward takes them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from trimtab.errors import UnknownModelError
from trimtab.models.asking.inputs import (
    ImageSource,
    Values,
    image_token,
    num_embeddings,
    plain_ids,
    quietly,
    words_beside,
)
from trimtab.models.asking.units import Unit
from trimtab.models.asking.weightless import Weightless

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""What processors call 0 text, 1 image, 2 video per token."""


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
        """Of tokens in one row."""
        return self.num_tokens * sum(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrangement:
    """How a batch is put together; the first that the model takes is kept."""

    images: int | None  # which of the calls with images; None: text alone
    rows: int | None  # which count of rows has as many tokens in the text; None: images leave no tokens
    axes: int | None  # rows of positions; None: the model makes them
    types: bool
    samples: bool  # a sample for each image; else one with all of them


class Batches:
    """Batches of growing sizes for one model; its parameters may be fake.

    `packed`: a token more, a sample of its own, so that there are masks where attention needs them; where the model
    takes no positions that restart, a batch is one sample. Where it takes no image of ours, a batch is text alone: see
    `Batch.has_images`. Raises `UnknownModelError` where no batch is taken.
    """

    def __init__(self, model: Any, units: list[Unit], *, packed: bool) -> None:
        self.model, self.packed = model, packed
        self.images = ImageSource(model, units)
        self.token = image_token(model.config)
        self.word = int(plain_ids(model.config, num_embeddings(model))[5])
        self._taken = set(inspect.signature(model.forward).parameters)
        self._chosen: _Arrangement | None = None

    def make(self, times: int, num_text: int, *, multiple: int = 1, copies: int = 1) -> Batch:
        """`times` the smallest images, and `num_text` words around them; more, for a `multiple` of tokens in a row.

        `copies`: so many images of that size, where `has_grid`.
        """
        if self._chosen is None:
            self._chosen = self._choose(num_text, multiple)
        return self._put(self._chosen, times, num_text, multiple, copies=copies)

    @property
    def has_grid(self) -> bool:
        """Whether images of any size come as patches beside a table of sizes."""
        return (
            self._chosen is not None and self._chosen.images is not None and self.images.has_grid(self._chosen.images)
        )

    def make_text(self, num_tokens: int) -> Batch | None:
        """So many words and no image, arranged as `make` arranged its first batch; None: its forward wants an image."""
        assert self._chosen is not None, "asked for behind `make`"
        alone = replace(self._chosen, images=None, rows=None, samples=False)
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
            f"a step of model_type {self.model.config.model_type!r} was to be run, and its forward took none of our "
            f"batches ({said or 'no loss'}): give the config.json as the model ships it, or plan with formulas"
        )

    def _arrangements(self) -> Iterator[_Arrangement]:
        """Likeliest first: with images, packed, with types; at last text alone."""
        axes: list[int | None] = [None]
        if self.packed:
            asks = hasattr(getattr(self.model, "model", self.model), "get_rope_index")
            axes = [4, 3, 1, None] if asks else [1, None]
        types = [True, False] if self._taken & set(TOKEN_TYPES) else [False]
        for which in itertools.chain(self.images.choices(), [None]):
            counts = () if which is None else self.images.count_rows(which, 1)
            rows = (*range(len(counts)), None) if self.token is not None and which is not None else (None,)
            apart = [False] if which is None or self.images.asks else [False, True]
            for r, a, s, t in itertools.product(rows, axes, apart, types):
                yield _Arrangement(images=which, rows=r, axes=a, types=t, samples=s)

    def _put(self, how: _Arrangement, times: int, num_text: int, multiple: int, *, copies: int = 1) -> Batch:
        images = {} if how.images is None else self.images.draw(how.images, times, copies=copies)
        num_image = 0
        if how.images is not None and how.rows is not None:
            num_image = copies * self.images.count_rows(how.images, times)[how.rows]
        num_text += -(num_image + num_text + (how.axes is not None)) % multiple
        before = num_text // 2
        row = [self.word] * before + [self.token] * num_image + [self.word] * (num_text - before)
        lengths = [len(row)]
        if how.axes is not None:
            row, lengths = [*row, self.word], [*lengths, 1]
        ids = torch.tensor([row] * (times if how.samples else 1))
        inputs: Values = {"input_ids": ids, "labels": ids.clone(), "use_cache": False, **images}
        inputs |= {name: x for name, x in words_beside(self.model).items() if name in self._taken}
        if how.axes is not None:
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            inputs["position_ids"] = positions if how.axes == 1 else positions.expand(how.axes, 1, -1)
        if how.types:
            inputs |= dict.fromkeys(self._taken & set(TOKEN_TYPES), ids.eq(self.token or -1).long())
        if how.images is not None:
            inputs |= masks_beside(self._taken, self.model.config, ids, images)
        return Batch(
            inputs=inputs,
            lengths=tuple(lengths),
            num_rows=len(ids),
            packed=how.axes is not None,
            has_images=how.images is not None,
        )


def masks_beside(taken: set[str], config: Any, ids: torch.Tensor, images: Values) -> Values:
    """What says which words see which image, by the names that processors have for it."""
    found: Values = {}
    if "aspect_ratio_mask" in images and "cross_attention_mask" in taken:
        num_images, num_tiles = images["aspect_ratio_mask"].shape[1:]
        found["cross_attention_mask"] = torch.ones(*ids.shape, num_images, num_tiles, dtype=torch.long)
    if "image_attention_mask" in taken and images["pixel_values"].dim() > 4:
        found["image_attention_mask"] = torch.ones(*ids.shape, images["pixel_values"].shape[1], dtype=torch.long)
    if "image_embeds_position_mask" in taken:
        found["image_embeds_position_mask"] = torch.arange(ids.shape[1]).expand(ids.shape).lt(config.latent_query_num)
    return found
