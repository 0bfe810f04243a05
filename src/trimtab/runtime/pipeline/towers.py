"""Vision towers as steps, each calling the model's own modules as the tower's forward does (Transformers 5.23)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.runtime.pipeline.flow import PIXELS, Batch, Run, Shape, Step, StepFunction

PATCHES = "patches"  # the tower's rows, whichever block they left last
UNREAD = "unread"  # states behind the last that the projector reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Steps of a tower, and the states that the projector reads."""

    steps: tuple[Step, ...]
    states: tuple[str, ...]  # as the projector takes them
    shape: Callable[[Batch], Shape]  # of `patches` and of every such state


def select_states(states: Sequence[Tensor], strategy: str) -> Tensor:
    """The states beside each other; "default" leaves out the first row, a class token."""
    kept = [state[:, 1:] for state in states] if strategy == "default" else list(states)
    return kept[0] if len(kept) == 1 else torch.cat(kept, dim=-1)


# -- towers over tiles of one size ----------------------------------------------------------------------------------


def internvit_tower(model: Any) -> Tower:
    """InternViT: embeddings, blocks, and a norm that -1 as the state means to include."""
    prefix, tower = "model.vision_tower", model.model.vision_tower
    first = [Step(layer=f"{prefix}.embeddings", part="images", writes=(PATCHES,), run=_embed_pixels)]
    blocks = [f"{prefix}.encoder.layer.{i}" for i in range(len(tower.encoder.layer))]
    last = [f"{prefix}.layernorm"] if next(tower.layernorm.parameters(), None) is not None else []
    # `vision_feature_layer` -1 is the tower's result; the same state by its positive number lies in front of the norm
    reads_last = model.config.vision_feature_layer == -1
    return _tile_tower(model, first, blocks, _call, last, reads_last=reads_last)


def clip_tower(model: Any) -> Tower:
    """CLIP or SigLIP: nothing reads the norm behind the blocks, nor SigLIP's pooling head."""
    prefix, tower = "model.vision_tower", model.model.vision_tower
    first = [Step(layer=f"{prefix}.embeddings", part="images", writes=(PATCHES,), run=_embed_pixels)]
    if hasattr(tower, "pre_layrnorm"):  # Transformers spells it without the e
        first.append(
            Step(layer=f"{prefix}.pre_layrnorm", part="images", reads=(PATCHES,), writes=(PATCHES,), run=_call)
        )
    blocks = [f"{prefix}.encoder.layers.{i}" for i in range(len(tower.encoder.layers))]
    last = [f"{prefix}.{name}" for name in ("post_layernorm", "head") if hasattr(tower, name)]
    return _tile_tower(model, first, blocks, _call_unmasked, last, reads_last=False)


def _tile_tower(
    model: Any, first: list[Step], blocks: list[str], run_block: StepFunction, last: list[str], *, reads_last: bool
) -> Tower:
    """State 0 enters the first block, state k leaves block k - 1; behind the last that is read: `UNREAD`."""
    chosen = model.config.vision_feature_layer
    numbers = [x % (len(blocks) + 1) for x in (chosen if isinstance(chosen, list | tuple) else [chosen])]
    end = max(numbers)

    def names(state: int) -> tuple[str, ...]:
        return (PATCHES, f"state.{state}") if state in numbers and state < end else (PATCHES,)

    steps = [*first[:-1], replace(first[-1], writes=names(0))]
    for i, layer in enumerate(blocks):
        read = (PATCHES,) if i <= end else (UNREAD,)
        writes = names(i + 1) if i < end else (UNREAD,)
        steps.append(Step(layer=layer, part="images", reads=read, writes=writes, run=run_block))
    for layer in last:
        writes = (PATCHES,) if reads_last else (UNREAD,)
        steps.append(Step(layer=layer, part="images", reads=(PATCHES,), writes=writes, run=_call))
    states = tuple(f"state.{x}" if x < end else PATCHES for x in numbers)
    return Tower(steps=tuple(steps), states=states, shape=_tile_shape(model))


def _tile_shape(model: Any) -> Callable[[Batch], Shape]:
    vision = model.config.vision_config
    patch = vision.patch_size
    patch_height, patch_width = (patch, patch) if isinstance(patch, int) else patch
    class_token = 0 if vision.model_type.startswith("siglip") else 1

    def shape(batch: Batch) -> Shape:
        tiles, _, height, width = batch["pixel_values"].shape
        return tiles, height // patch_height * (width // patch_width) + class_token, vision.hidden_size

    return shape


# -- towers over patches in rows, images of any size one after the other --------------------------------------------


def qwen2_5_tower(model: Any) -> Tower:
    """Windows of patches stand together from the embedding to the merger, which puts its rows back in order."""

    def embed(layer: nn.Module, run: Run) -> Tensor:
        visual, notes = run.model.model.visual, _window_notes(run)
        rows = _embed_patches(layer, run)
        result: Tensor = visual.permute_input_for_window_attn(rows, notes["window_index"], seq_len=len(rows))
        return result

    def block(number: int) -> Callable[..., Tensor]:
        full = number in model.config.vision_config.fullatt_block_indexes

        def run_block(layer: nn.Module, run: Run, rows: Tensor) -> Tensor:
            notes = _window_notes(run)
            which = "full" if full else "window"
            result: Tensor = layer(
                rows,
                cu_seqlens=notes[f"{which}_offsets"],
                max_seqlen=notes[f"{which}_longest"],
                position_embeddings=notes["rotary"],
            )
            return result

        return run_block

    def merge(layer: nn.Module, run: Run, rows: Tensor) -> Tensor:
        result: Tensor = layer(rows)[torch.argsort(_window_notes(run)["window_index"])]
        return result

    steps = [Step(layer="model.visual.patch_embed", part="images", writes=(PATCHES,), run=embed)]
    steps += [
        Step(layer=f"model.visual.blocks.{i}", part="images", reads=(PATCHES,), writes=(PATCHES,), run=block(i))
        for i in range(len(model.model.visual.blocks))
    ]
    steps.append(Step(layer="model.visual.merger", part="images", reads=(PATCHES,), writes=("images",), run=merge))
    return Tower(steps=tuple(steps), states=(PATCHES,), shape=_row_shape(model))


def qwen2_tower(model: Any) -> Tower:
    """Every block sees whole images."""
    steps = [Step(layer="model.visual.patch_embed", part="images", writes=(PATCHES,), run=_embed_patches)]
    steps += [_full_block(i) for i in range(len(model.model.visual.blocks))]
    steps.append(Step(layer="model.visual.merger", part="images", reads=(PATCHES,), writes=("images",), run=_call))
    return Tower(steps=tuple(steps), states=(PATCHES,), shape=_row_shape(model))


def qwen3_tower(model: Any) -> Tower:
    """Behind each tapped block a merger makes the features of one text layer: the k-th tap's, of layer k."""
    taps = list(model.config.vision_config.deepstack_visual_indexes)
    steps = [
        Step(layer="model.visual.patch_embed", part="images", writes=(PATCHES,), run=_embed_patches),
        Step(layer="model.visual.pos_embed", part="images", reads=(PATCHES,), writes=(PATCHES,), run=_add_positions),
    ]
    for i in range(len(model.model.visual.blocks)):
        steps.append(_full_block(i))
        if i in taps:
            merger, feeds = f"model.visual.deepstack_merger_list.{taps.index(i)}", f"deepstack.{sorted(taps).index(i)}"
            steps.append(Step(layer=merger, part="images", reads=(PATCHES,), writes=(feeds,), run=_call))
    steps.append(Step(layer="model.visual.merger", part="images", reads=(PATCHES,), writes=("images",), run=_call))
    return Tower(steps=tuple(steps), states=(PATCHES,), shape=_row_shape(model))


def _full_block(number: int) -> Step:
    def run_block(layer: nn.Module, run: Run, rows: Tensor) -> Tensor:
        notes = _grid_notes(run)
        result: Tensor = layer(
            rows, cu_seqlens=notes["offsets"], max_seqlen=notes["longest"], position_embeddings=notes["rotary"]
        )
        return result

    layer = f"model.visual.blocks.{number}"
    return Step(layer=layer, part="images", reads=(PATCHES,), writes=(PATCHES,), run=run_block)


def _add_positions(layer: nn.Module, run: Run, rows: Tensor) -> Tensor:
    """Learned positions of a square grid, interpolated to each image's."""
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    visual = run.model.model.visual
    corners, weights = get_vision_interpolation_indices_and_weights(
        _grids(run),
        num_grid_per_side=visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=visual.config.spatial_merge_size,
    )
    positions: Tensor = (layer(corners) * weights[:, :, None]).sum(1)
    return rows + positions.to(rows.dtype)


def num_deepstack(model: Any) -> int:
    """Text layers that take features of the tower, the first ones."""
    return len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ())


def _row_shape(model: Any) -> Callable[[Batch], Shape]:
    vision = model.config.vision_config
    width = vision.embed_dim if vision.model_type == "qwen2_vl_vision" else vision.hidden_size

    def shape(batch: Batch) -> Shape:
        return sum(len(batch[key]) for key in PIXELS if batch.get(key) is not None), width

    return shape


def _grids(run: Run) -> Tensor:
    return _joined(run, "image_grid_thw", "video_grid_thw")


def _joined(run: Run, *keys: str) -> Tensor:
    parts = [run.batch[key] for key in keys if run.batch.get(key) is not None]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _window_notes(run: Run) -> dict[str, Any]:
    """What Qwen2.5-VL's tower works out from the grids before its blocks."""
    from transformers.utils.generic import get_max_seqlen
    from transformers.vision_utils import (
        get_vision_attention_seqlens,
        get_vision_position_ids,
        get_vision_window_index,
    )

    if not run.notes:
        visual, grids = run.model.model.visual, _grids(run)
        offsets, longest = get_vision_attention_seqlens(grids, visual.config)
        index, window_offsets = get_vision_window_index(
            grids,
            spatial_merge_size=visual.spatial_merge_size,
            window_size=visual.window_size,
            patch_size=visual.patch_size,
        )
        rotary = visual.rotary_pos_emb(grids, get_vision_position_ids(grids, visual.spatial_merge_size))
        run.notes.update(
            window_index=index,
            full_offsets=offsets,
            full_longest=longest,
            window_offsets=window_offsets,
            window_longest=get_max_seqlen(window_offsets, visual.config),
            rotary=tuple(visual.permute_input_for_window_attn(x, index, seq_len=len(x)) for x in rotary),
        )
    return run.notes


def _grid_notes(run: Run) -> dict[str, Any]:
    """What Qwen2-VL's and Qwen3-VL's towers work out from the grids before their blocks."""
    from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids

    if not run.notes:
        visual, grids = run.model.model.visual, _grids(run)
        offsets, longest = get_vision_attention_seqlens(grids, visual.config)
        rotary = visual.rotary_pos_emb(grids, get_vision_position_ids(grids, visual.spatial_merge_size))
        run.notes.update(offsets=offsets, longest=longest, rotary=rotary)
    return run.notes


def _embed_patches(layer: nn.Module, run: Run) -> Tensor:
    """Patches of the images, then of the videos."""
    result: Tensor = layer(_joined(run, *PIXELS).to(_device_of(layer), non_blocking=True))
    return result


def _embed_pixels(layer: nn.Module, run: Run) -> Tensor:
    result: Tensor = layer(run.batch["pixel_values"].to(_device_of(layer), non_blocking=True))
    return result


def _device_of(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


def _call(layer: nn.Module, _: Run, rows: Tensor) -> Tensor:
    result: Tensor = layer(rows)
    return result


def _call_unmasked(layer: nn.Module, _: Run, rows: Tensor) -> Tensor:
    """CLIP's blocks take a mask, which images do not need."""
    result: Tensor = layer(rows, None)
    return result
