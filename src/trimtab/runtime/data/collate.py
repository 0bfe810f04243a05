"""Processed samples of one pack to the keyword arguments of one forward: start at `PackedCollator.__call__`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trimtab.errors import TrimtabError, UnsupportedPlanError, join_problems
from trimtab.models.families import PackFormat
from trimtab.runtime.data.formats import pack_format
from trimtab.runtime.data.loss import IGNORED
from trimtab.runtime.data.masks import (
    additive,
    cumulative_lengths,
    image_numbers,
    prefix_numbers,
    sample_numbers,
    text_masks,
)
from trimtab.runtime.data.positions import mrope_rows, rope_index, text_positions
from trimtab.runtime.data.processed import ProcessedSample, read_processed
from trimtab.runtime.data.videos import alike_videos
from trimtab.runtime.data.zero_weight import filler_sample

Attention = Literal["sdpa", "eager", "flash_attention_2"]
LossWeighting = Literal["token", "sample"]


@dataclass(frozen=True, slots=True)
class PackedCollator:
    """A `collate_fn` for batches that are packs: one row, every sample as if it were alone.

    Use it as `data_collator` of a Trainer, or `collate_fn` of a `PlanDataLoader`. Tensors of shape (1, tokens of the
    pack), pixels of all its images.

    Samples are what the family's processor gives for one conversation, unpadded, with `labels` or `assistant_masks`.
    `loss_weight` (a number, 1 if absent) scales a sample; 0 takes it out of loss and denominator. `id` names it in
    errors. An empty pack gives a filler. Guarantee, tested to 1e-5 in float32: logits and gradients are those of the
    samples alone, unless the model looks at a whole micro-batch (an experts' balancing loss) or draws (dropout).

    `vision_in_every_pack` gives an image-free pack a filler image: FSDP hangs and DDP fails where a tower idles.
    `verify_packing` says whether the model at hand computes such a pack exactly.

    >>> import transformers
    >>> collate = PackedCollator(transformers.LlamaConfig(), vision_in_every_pack=False)
    >>> pack = collate([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}])
    >>> pack["position_ids"].tolist(), pack["labels"].tolist()
    ([[0, 1, 2, 0, 1]], [[-100, 6, 7, -100, 9]])
    """

    config: Any  # of the model, as Transformers loads it
    _: KW_ONLY
    attention: Attention = "sdpa"  # as the model was loaded
    loss_weighting: LossWeighting = "token"
    vision_in_every_pack: bool = True
    family: PackFormat | None = None  # None: declared in `models.families`, or asked of Transformers

    def __post_init__(self) -> None:
        if self.family is None:
            object.__setattr__(self, "family", pack_format(self.config))
        problems = _problems_of(self)
        if problems:
            raise UnsupportedPlanError(join_problems(problems))

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`model(**batch)` of one pack: input_ids, position_ids, labels, images, and what keeps samples apart.

        The first label of each sample is taken out: the token before it is another sample's. `loss_weights` (for
        `packed_loss`, not for the model) is there only if weights are not all 1. Transformers makes the masks from the
        restarting positions (where it cannot, they are here), and only if it keeps no cache: hence `use_cache`.
        """
        family = self.family
        assert family is not None, "filled in when made"
        with_image = self.vision_in_every_pack and family.smallest is not None
        if not samples:
            samples = [filler_sample(self.config, with_image=with_image, family=family)]
        elif with_image and not any(_has_pixels(sample) for sample in samples):
            samples = [*samples, filler_sample(self.config, with_image=True, family=family)]
        pack = read_processed(samples, self.config, family)
        lengths = [len(sample.input_ids) for sample in pack]
        return {
            "input_ids": torch.cat([sample.input_ids for sample in pack])[None],
            "position_ids": self._positions(family, pack, lengths),
            "use_cache": False,
            **self._apart(family, pack, lengths),
            **_images(family, pack),
            **_labels(pack, self.loss_weighting),
        }

    def _positions(self, family: PackFormat, pack: Sequence[ProcessedSample], lengths: Sequence[int]) -> Tensor:
        if not family.mrope:
            return text_positions(lengths)
        positions = rope_index(self.config)
        rows = mrope_rows(lengths, [positions(s.input_ids, s.token_types, s.grids) for s in pack])
        return rows if family.text_row else rows[1:]

    def _apart(self, family: PackFormat, pack: Sequence[ProcessedSample], lengths: Sequence[int]) -> dict[str, Any]:
        """What keeps samples apart beside the positions: lengths, numbers, masks, token types."""
        apart: dict[str, Any] = {}
        if self.attention == "flash_attention_2" or family.stateful:
            offsets, longest = cumulative_lengths(lengths), max(lengths)
            names = {"cu_seq_lens": offsets, "max_length": longest}
            apart = {f"{name}_{side}": value for name, value in names.items() for side in ("q", "k")}
        if family.stateful:
            apart["seq_idx"] = sample_numbers(lengths)
        types = [sample.token_types for sample in pack]
        if family.types_key is not None:
            apart[family.types_key] = torch.cat(types)[None]
        if self.attention != "flash_attention_2" and _needs_masks(family):
            blocks = None
            if family.sees is not None:
                blocks = image_numbers(types) if family.sees == "images" else prefix_numbers(types)
            masks = text_masks(self.config.get_text_config(), lengths, images=blocks)
            if self.attention == "eager":
                masks = {k: additive(m) for k, m in masks.items()} if isinstance(masks, dict) else additive(masks)
            apart["attention_mask"] = masks
        return apart


def _labels(pack: Sequence[ProcessedSample], weighting: LossWeighting) -> dict[str, Tensor]:
    """`labels`, and `loss_weights` unless they are 1 for each label."""
    labels, weights = [], []
    for sample in pack:
        own = sample.labels.clone()
        own[0] = IGNORED
        if sample.weight == 0:
            own[:] = IGNORED
        kept = own != IGNORED
        share = sample.weight / max(int(kept.sum()), 1) if weighting == "sample" else sample.weight
        labels.append(own)
        weights.append(kept.float() * share)
    result = {"labels": torch.cat(labels)[None]}
    if weighting == "sample" or any(sample.weight not in (0, 1) for sample in pack):
        result["loss_weights"] = torch.cat(weights)[None]
    return result


def _images(family: PackFormat, pack: Sequence[ProcessedSample]) -> dict[str, Tensor]:
    joined = {}
    for key in family.joined:
        parts = [sample.images[key] for sample in pack if key in sample.images]
        if parts and key != "second_per_grid_ts":  # the positions have used it
            joined[key] = torch.cat(_padded(alike_videos(key, parts)))
    return joined


def _padded(parts: Sequence[Tensor]) -> list[Tensor]:
    """Zeros after each dimension but the first, up to the largest: tiles of LLaVA-NeXT, images of Idefics."""
    most = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return [torch.nn.functional.pad(part, _behind(part.shape[1:], most)) for part in parts]


def _behind(sizes: Sequence[int], most: Sequence[int]) -> list[int]:
    """As `pad` takes it: 0 before and the rest after, last dimension first."""
    missing = [size - own for own, size in zip(sizes, most, strict=True)]
    return [x for num in reversed(missing) for x in (0, num)]


def _has_pixels(sample: Mapping[str, Any]) -> bool:
    values = (sample.get("pixel_values"), sample.get("pixel_values_videos"))
    return any(value is not None and len(value) > 0 for value in values)


def _problems_of(collator: PackedCollator) -> list[str]:
    """What the settings ask for and no pack of this model can give."""
    family, text = collator.family, collator.config.get_text_config()
    assert family is not None, "filled in when made"
    for name, choices in (("attention", Attention), ("loss_weighting", LossWeighting)):
        if getattr(collator, name) not in get_args(choices):
            asked, allowed = getattr(collator, name), ", ".join(get_args(choices))
            raise TrimtabError(
                f"{name} {asked!r} was asked for, but packs are tested with {allowed} only: choose one of these"
            )
    problems = []
    loaded = getattr(text, "_attn_implementation", None)
    both_flash = "flash" in str(loaded) and collator.attention == "flash_attention_2"  # 3, or a kernel from the Hub
    if loaded is not None and loaded != collator.attention and not both_flash:
        problems.append(
            f"packs for {collator.attention} attention were asked for, but the model was loaded with {loaded}: "
            f"load it with attn_implementation={collator.attention!r}, or give the attention it has"
        )
    if collator.attention == "flash_attention_2" and family.sees is not None:
        problems.append(
            f"packs for flash attention were asked for, but {collator.config.model_type} lets image tokens see their "
            "whole image, which a causal flash kernel cannot: load it with attn_implementation='sdpa'"
        )
    if getattr(text, "use_bidirectional_attention", None) in (True, "all") and family.sees is None:
        problems.append(
            "packs were asked for a text model with use_bidirectional_attention, but the masks here are causal: "
            "train it without packing"
        )
    kind = collator.config.model_type
    if collator.vision_in_every_pack and family.joined and family.smallest is None:
        problems.append(
            f"packs without images were to get a filler image, but the smallest one of {kind!r} is not known: give "
            "vision_in_every_pack=False, or family=PackFormat(...) with `smallest`"
        )
    unlike = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if _needs_masks(family) and unlike:
        problems.append(
            f"packs of {kind!r} need masks of their own, but there are none for {', '.join(sorted(unlike))} layers: "
            "train it without packing"
        )
    return problems


def _needs_masks(family: PackFormat) -> bool:
    """Whether Transformers cannot make the masks of a pack from its positions."""
    return family.sees is not None or not family.text_row
