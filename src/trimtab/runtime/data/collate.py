"""Processed samples of one pack to the arguments of one forward, and the loss of packs: start at `PackedCollator`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from trimtab.errors import TrimtabError, UnsupportedPlanError, join_problems
from trimtab.models.asking.inputs import image_token
from trimtab.models.families import PackFormat
from trimtab.runtime.data.conversations import IGNORED, ProcessedSample, read_processed
from trimtab.runtime.data.formats import alike_videos, model_classes, pack_format, smallest_image

# The loss of packs: weighted per token or per sample, right under gradient accumulation and over ranks.
#
# Let S be the samples of one optimizer step, over all its micro-batches and ranks; c_st the cross-entropy of predicting
# token t of sample s; n_s the number of tokens with a label in s, but for its first, which nothing predicts.
#
#     token:   L = sum_s sum_t c_st / sum_s n_s
#     sample:  L = sum_s (1 / n_s) sum_t c_st / |{s : n_s > 0}|
#
# Both are sum w c / W with W = sum w over the whole step: w = 1 per token, or w = 1 / n_s. So every pack adds its
# sum w c / W, and it does not matter which pack, micro-batch or rank a sample is in. A mean of packs' means would weigh
# it by its company.
#
# `W` comes from `step_denominator`: one all-reduce of one number per step. DDP and FSDP average gradients over the dp
# ranks, so each rank's loss is multiplied by dp: (1 / dp) sum_ranks dp sum w c / W = L.


def label_weights(batch: Mapping[str, Any]) -> Tensor:
    """Return (1, tokens) w of each label: the collator's `loss_weights`, or 1 wherever there is a label."""
    weights: Tensor | None = batch.get("loss_weights")
    return (batch["labels"] != IGNORED).float() if weights is None else weights


def step_denominator(batches: Iterable[Mapping[str, Any]], *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return W of one optimizer step: the weights of this rank's micro-batches, summed over the data-parallel `group`.

    Use it once a step, before the first `packed_loss`.

    A collective call where torch.distributed is initialised: every rank of the group must make it once a step, with at
    least one micro-batch, filler or not. float32: counts are exact to 2^24 labels, off by 6e-8 of themselves beyond.

    >>> step_denominator([{"labels": torch.tensor([[IGNORED, 5, 7]])}, {"labels": torch.tensor([[IGNORED, 3]])}])
    tensor(3.)
    """
    total = torch.stack([label_weights(batch).sum() for batch in batches]).sum()
    if dist.is_available() and dist.is_initialized():
        if dist.get_backend(group) == "nccl":
            total = total.cuda()
        dist.all_reduce(total, group=group)
    return total


def packed_loss(logits: Tensor, batch: Mapping[str, Any], *, denominator: Tensor | float, num_ranks: int = 1) -> Tensor:
    """Return num_ranks * sum w c / W of one pack, in float32; 0 with a zero gradient for a pack without labels.

    Use it in your own loop in place of `outputs.loss`, which would weigh tokens by the pack they lie in.

    `num_ranks`: ranks whose gradients are averaged afterwards, 1 where they are summed. Only rows with a label are cast
    to float32, so prompts and image tokens cost no vocabulary-wide copy.

    >>> batch = {"labels": torch.tensor([[IGNORED, 1, 2]])}
    >>> packed_loss(torch.zeros(1, 3, 4), batch, denominator=step_denominator([batch]))  # log(4): nothing is learnt yet
    tensor(1.3863)
    """
    targets = batch["labels"][:, 1:].to(logits.device)
    weights = label_weights(batch)[:, 1:].to(logits.device)
    kept = targets != IGNORED
    costs = torch.nn.functional.cross_entropy(logits[:, :-1][kept].float(), targets[kept], reduction="none")
    W = torch.as_tensor(denominator, device=logits.device, dtype=torch.float32)
    W = torch.where(W > 0, W, torch.ones_like(W))  # a step of nothing but fillers: 0 / 1
    return (costs * weights[kept]).sum() * num_ranks / W


# Samples that weigh nothing: for empty slots, and for packs that would leave the vision tower idle.


TEXT_TOKEN = 0
"""Any id of the vocabulary does: nothing reads what it predicts."""


def filler_sample(config: Any, *, with_image: bool, family: PackFormat | None = None) -> dict[str, Any]:
    """Make a processed sample of zero loss weight: one token of text, the smallest image of the family before it.

    That image is 1 token for the Qwen families, 256 for most InternVL and Gemma 3, 576 for LLaVA-1.5. Black pixels.
    """
    num_image_tokens = 0
    image: dict[str, torch.Tensor] = {}
    if with_image:
        smallest = (family or pack_format(config)).smallest
        if smallest is None:
            raise UnsupportedPlanError(
                f"the smallest image of {config.model_type!r} is unknown: give vision_in_every_pack=False"
            )
        num_image_tokens, image = smallest_image(smallest, config)
    ids = torch.tensor([image_token(config)] * num_image_tokens + [TEXT_TOKEN])
    return {"input_ids": ids, "labels": torch.full_like(ids, IGNORED), "loss_weight": 0.0, **image}


# Who may attend to whom in a pack: block-diagonal masks, sliding windows, image tokens that see their whole image.


def cumulative_lengths(lengths: Sequence[int]) -> Tensor:
    """Return (samples + 1,) int32 offsets of the samples, as varlen attention kernels take them."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def sample_numbers(lengths: Sequence[int]) -> Tensor:
    """Return (1, tokens) int32 number of the sample each token belongs to, as convolution and scan kernels take it."""
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]


def prefix_numbers(token_types: Sequence[Tensor]) -> Tensor:
    """Return (tokens,) the sample's number for each token of type 0 (PaliGemma's image and question), -1 elsewhere."""
    return torch.cat([torch.where(types == 0, sample, -1) for sample, types in enumerate(token_types)])


def image_numbers(token_types: Sequence[Tensor]) -> Tensor:
    """Return (tokens,) the run of image tokens each token belongs to, -1 for text; runs end where their sample does.

    Gemma 3's own numbering goes through the row and would take an image at a sample's end and one at the next
    sample's start for one image.
    """
    runs, count = [], 0
    for types in token_types:
        is_image = types == 1
        starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0), value=False)[:-1]
        runs.append(torch.where(is_image, starts.cumsum(0) - 1 + count, -1))
        count += int(starts.sum())
    return torch.cat(runs)


def pack_mask(lengths: Sequence[int], *, window: int | None = None, images: Tensor | None = None) -> Tensor:
    """Return (1, 1, tokens, tokens) True where query q may attend to key k.

    same sample and (k <= q, or both in one image) and k > q - window; `images` as `image_numbers` gives them.
    tokens^2 bytes; work goes into the samples' own blocks.
    """
    mask = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        own = torch.ones(length, length, dtype=torch.bool).tril_()
        if images is not None:
            number = images[here]
            own |= (number[:, None] == number[None, :]) & (number >= 0)
        mask[here, here] = own if window is None else own.triu_(1 - window)
        start += length
    return mask[None, None]


def additive(mask: Tensor) -> Tensor:
    """Return what eager attention adds to its scores: 0, or float32's smallest number; 4 tokens^2 bytes."""
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


def text_masks(text_config: Any, lengths: Sequence[int], *, images: Tensor | None = None) -> Tensor | dict[str, Tensor]:
    """The masks a text model of Transformers 5.23 takes as its `attention_mask`.

    One tensor where all layers see alike; one for each layer type where full and sliding layers alternate.
    """
    types = set(getattr(text_config, "layer_types", None) or ())
    window = getattr(text_config, "sliding_window", None)
    if not types:
        return pack_mask(lengths, window=window, images=images)
    if types == {"full_attention"} and images is None:
        return pack_mask(lengths)
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: pack_mask(lengths, window=windows[kind], images=images) for kind in sorted(types)}


# SDPA without that mask: a call for each sample, where samples see themselves causally and nothing else.


BY_SAMPLE = "sdpa_by_sample"
"""The name under which Transformers finds `_attend_by_sample` and the borders that it takes in place of a mask."""


def attend_by_sample(model: Any) -> None:
    """Let the language model of a model loaded with SDPA attend sample by sample; with other attention, do nothing.

    Use it where a model runs packs (`balanced` and `trimtab train` do): one call over a whole pack computes and masks
    tokens^2 pairs, the samples' own calls only theirs. Whatever else the model is asked for runs as before: padded
    batches, masks of its own (images that see themselves whole), windows shorter than a sample, generation.

    >>> import transformers
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, intermediate_size=48,
    ...     num_hidden_layers=2, vocab_size=64, num_attention_heads=2, num_key_value_heads=2))
    >>> attend_by_sample(model)
    >>> pack = PackedCollator(model.config)([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 2)
    >>> model(**pack).logits.shape
    torch.Size([1, 6, 64])
    """
    text = model.config.get_text_config()
    parts = [part for part in model.modules() if getattr(part, "config", None) is text]
    takes_it = any(getattr(part, "_supports_attention_backend", False) for part in parts)  # code of its own may not
    if takes_it and getattr(text, "_attn_implementation", None) == "sdpa":
        AttentionInterface.register(BY_SAMPLE, _attend_by_sample)
        AttentionMaskInterface.register(BY_SAMPLE, _borders_or_mask)
        text._attn_implementation = BY_SAMPLE


def loaded_attention(config: Any) -> Any:
    """Return the attention of the language model as `PackedCollator` names it, however it is computed."""
    loaded = getattr(config.get_text_config(), "_attn_implementation", None)
    return "sdpa" if loaded == BY_SAMPLE else "flash_attention_2" if "flash" in str(loaded) else loaded


def _borders_or_mask(**given: Any) -> Tensor | None:
    """Return (samples + 1,) offsets on the CPU where the mask is nothing but causal samples, else SDPA's own mask.

    `given` is what Transformers gives the function that makes SDPA's masks. A sample starts where a token does not see
    the one before it. Masks that were added to the causal one (`use_vmap`) and rows where a token sees the next one are
    SDPA's.
    """
    cached = given.get("cache_position")  # of Transformers 4; 5 gives q_length and q_offset
    length = given["q_length"] if cached is None else len(cached)
    is_whole = given["batch_size"] == 1 and given.get("attention_mask") is None and length == given["kv_length"]
    if is_whole and not given.get("use_vmap"):
        device = given.get("device") if cached is None else cached.device
        sees, index = given["mask_function"], torch.arange(length, device=device)
        here, before, first = index[1:], index[:-1], index[:1]
        starts = here[~sees(first, first, here, before)].tolist()
        offsets, window = torch.tensor([0, *starts, length]), given.get("local_size")
        is_causal = not bool(sees(first, first, before, here).any())
        if starts and is_causal and (window is None or window >= int(offsets.diff().max())):
            return offsets
    mask: Tensor | None = sdpa_mask(**given)
    return mask


def _attend_by_sample(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as Transformers' SDPA does; (samples + 1,) offsets in place of a mask: each sample by itself."""
    if attention_mask is None or attention_mask.dim() > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    parts = [
        sdpa_attention_forward(module, *(x[:, :, first:last] for x in (query, key, value)), None, **options)[0]
        for first, last in itertools.pairwise(attention_mask.tolist())
    ]
    return torch.cat(parts, dim=1), None


# Position ids that restart with every sample of a pack.


RopeIndex = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(tokens,) ids, (tokens,) token types and a sample's grids -> (3, tokens) positions."""


def text_positions(lengths: Sequence[int]) -> Tensor:
    """Return (1, tokens) 0 1 2 .. 0 1 .. : Transformers takes every restart for a new sample."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def rope_index(config: Any) -> RopeIndex:
    """Return a family's own `get_rope_index`, without the layers and weights of the model it is a method of.

    The method reads the configuration, sibling methods and what `__init__` copies from the configuration, so it is
    bound to an empty module of its class; where that lacks a field, to the whole model on the meta device.
    """
    core, _ = model_classes(config)
    model: Any = core.__new__(core)
    nn.Module.__init__(model)
    model.config = config

    def positions(ids: Tensor, token_types: Tensor, grids: Mapping[str, Tensor]) -> Tensor:
        nonlocal model
        if not grids:  # the method expects an image; the model itself counts text the same way
            return torch.arange(len(ids)).expand(_num_axes(config), -1)
        taken = inspect.signature(model.get_rope_index).parameters
        given = {"mm_token_type_ids": token_types[None], **grids}
        if "second_per_grids" in taken and "second_per_grid_ts" in given:
            given["second_per_grids"] = given.pop("second_per_grid_ts")
        given = {key: value for key, value in given.items() if key in taken}
        if "attention_mask" in taken and "mm_token_type_ids" not in taken:
            given["attention_mask"] = torch.ones_like(ids)[None]
        try:
            result: Tensor = _ask(model, ids, given)
        except AttributeError:  # a field that only `__init__` makes
            with torch.device("meta"):
                model = core._from_config(config)
            try:
                result = _ask(model, ids, given)
            except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
                raise UnsupportedPlanError(
                    f"{core.__name__}.get_rope_index fails ({type(error).__name__}: {error}): train without packing"
                ) from error
        return result[:, 0].long()

    return positions


def _ask(model: Any, ids: Tensor, given: Mapping[str, Any]) -> Tensor:
    found: Tensor = model.get_rope_index(ids[None], **given)[0]
    return found


def _num_axes(config: Any) -> int:
    """Return three, or as many as the rotary embedding has sections (4 in hunyuan_vl)."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    sections = rope.get("mrope_section", ())
    return 4 if len(sections) == 4 else 3


def mrope_rows(lengths: Sequence[int], axes: Sequence[Tensor]) -> Tensor:
    """Make (1 + axes, 1, tokens): the text positions that mark where samples start, then temporal, height and width."""
    return torch.cat([text_positions(lengths), torch.cat(tuple(axes), dim=1)])[:, None]


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
        """Return `batch` of one pack for `model(**batch)`: input_ids, position_ids, labels, images, samples' borders.

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
        if not any(sample.grids for sample in pack):  # text counts the same way on all axes
            num_rows = _num_axes(self.config) + family.text_row
            return text_positions(lengths)[None].repeat(num_rows, 1, 1)
        positions = rope_index(self.config)
        rows = mrope_rows(lengths, [positions(s.input_ids, s.token_types, s.grids) for s in pack])
        return rows if family.text_row else rows[1:]

    def _apart(self, family: PackFormat, pack: Sequence[ProcessedSample], lengths: Sequence[int]) -> dict[str, Any]:
        """Return what keeps samples apart in addition to the positions: lengths, numbers, masks, token types."""
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
    """Return `labels`, and `loss_weights` unless they are 1 for each label."""
    labels, weights = [], []
    weighted = weighting == "sample" or any(sample.weight not in (0, 1) for sample in pack)
    for sample in pack:
        own = sample.labels.clone()
        own[0] = IGNORED
        if sample.weight == 0:
            own[:] = IGNORED
        labels.append(own)
        if weighted:
            kept = own != IGNORED
            share = sample.weight / max(int(kept.sum()), 1) if weighting == "sample" else sample.weight
            weights.append(kept.float() * share)
    result = {"labels": torch.cat(labels)[None]}
    if weighted:
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
    """Return zeros after each dimension but the first, up to the largest: tiles of LLaVA-NeXT, images of Idefics."""
    most = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return [torch.nn.functional.pad(part, _behind(part.shape[1:], most)) for part in parts]


def _behind(sizes: Sequence[int], most: Sequence[int]) -> list[int]:
    """Return it as `pad` takes it: 0 before and the rest after, last dimension first."""
    missing = [size - own for own, size in zip(sizes, most, strict=True)]
    return [x for num in reversed(missing) for x in (0, num)]


def _has_pixels(sample: Mapping[str, Any]) -> bool:
    values = (sample.get("pixel_values"), sample.get("pixel_values_videos"))
    return any(value is not None and len(value) > 0 for value in values)


def _problems_of(collator: PackedCollator) -> list[str]:
    """Return what the settings ask for and no pack of this model can give."""
    family, text = collator.family, collator.config.get_text_config()
    assert family is not None, "filled in when made"
    for name, choices in (("attention", Attention), ("loss_weighting", LossWeighting)):
        if getattr(collator, name) not in get_args(choices):
            asked, allowed = getattr(collator, name), ", ".join(get_args(choices))
            raise TrimtabError(f"{name} {asked!r} is unknown: choose one of {allowed}")
    problems = []
    loaded = loaded_attention(collator.config)
    if loaded is not None and loaded != collator.attention:
        problems.append(f"attn_implementation is {loaded}, attention {collator.attention!r}: give one to both")
    if collator.attention == "flash_attention_2" and family.sees is not None:
        problems.append(f"images of {collator.config.model_type} see themselves whole: load it with sdpa")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all") and family.sees is None:
        problems.append(
            "masks of packs are causal, and the text model has use_bidirectional_attention: train without packing"
        )
    kind = collator.config.model_type
    if collator.vision_in_every_pack and family.joined and family.smallest is None:
        problems.append(f"the smallest image of {kind!r} is not known: give vision_in_every_pack=False")
    unlike = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if _needs_masks(family) and unlike:
        problems.append(
            f"packs of {kind!r} have no masks for {', '.join(sorted(unlike))} layers: train without packing"
        )
    return problems


def _needs_masks(family: PackFormat) -> bool:
    """Return whether Transformers cannot make the masks of a pack from its positions."""
    return family.sees is not None or not family.text_row
