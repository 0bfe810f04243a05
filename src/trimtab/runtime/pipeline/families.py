"""Which models can be cut, and how each family's forward decomposes: add a family by an entry in `FLOWS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import UnsupportedPlanError
from trimtab.runtime.pipeline.flow import LOGITS, Batch, Flow, Run, Shapes, Step, has_images
from trimtab.runtime.pipeline.towers import (
    Tower,
    clip_tower,
    internvit_tower,
    num_deepstack,
    qwen2_5_tower,
    qwen2_tower,
    qwen3_tower,
    select_states,
)

TEXT = "model.language_model"
NORM = f"{TEXT}.norm"


def internvl_flow(model: Any) -> Flow:
    """InternViT, pixel shuffle and projector, text."""
    config = model.config
    tower = internvit_tower(model)

    def project(layer: nn.Module, run: Run, *states: Tensor) -> Tensor:
        rows = select_states(states, config.vision_feature_select_strategy)
        side = int(rows.shape[1] ** 0.5)
        inner = run.model.model
        shuffled = inner.pixel_shuffle(
            rows.reshape(len(rows), side, side, -1), scale_factor=inner.config.downsample_ratio
        )
        return layer(shuffled.reshape(len(rows), -1, shuffled.shape[-1]))  # type: ignore[no-any-return]

    def image_shape(rows: tuple[int, ...]) -> tuple[int, ...]:
        kept = rows[1] - (config.vision_feature_select_strategy == "default")
        return rows[0], int(kept * config.downsample_ratio**2), config.text_config.hidden_size

    projector = Step(
        layer="model.multi_modal_projector", part="images", reads=tower.states, writes=("images",), run=project
    )
    return _flow(model, tower, (projector,), image_shape)


def llava_flow(model: Any) -> Flow:
    """CLIP or SigLIP, projector over one or several of its states, text."""
    config = model.config
    tower = clip_tower(model)

    def project(layer: nn.Module, _: Run, *states: Tensor) -> Tensor:
        return layer(select_states(states, config.vision_feature_select_strategy))  # type: ignore[no-any-return]

    def image_shape(rows: tuple[int, ...]) -> tuple[int, ...]:
        kept = rows[1] - (config.vision_feature_select_strategy == "default")
        return rows[0], kept, config.text_config.hidden_size

    projector = Step(
        layer="model.multi_modal_projector", part="images", reads=tower.states, writes=("images",), run=project
    )
    return _flow(model, tower, (projector,), image_shape)


def qwen2_vl_flow(model: Any) -> Flow:
    """ViT that ends in its merger, text with 3-D positions."""
    return _flow(model, qwen2_tower(model), (), _merged_shape(model.config))


def qwen2_5_vl_flow(model: Any) -> Flow:
    """Windowed ViT that ends in its merger, text with 3-D positions."""
    return _flow(model, qwen2_5_tower(model), (), _merged_shape(model.config))


def qwen3_vl_flow(model: Any) -> Flow:
    """ViT whose states enter the first text layers (DeepStack), text with 3-D positions."""
    return _flow(model, qwen3_tower(model), (), _merged_shape(model.config))


FLOWS: dict[str, Callable[[Any], Flow]] = {
    "internvl": internvl_flow,
    "llava": llava_flow,
    "qwen2_vl": qwen2_vl_flow,
    "qwen2_5_vl": qwen2_5_vl_flow,
    "qwen3_vl": qwen3_vl_flow,
    "qwen3_vl_moe": qwen3_vl_flow,
}


def flow_of(model: Any) -> Flow:
    """The steps of a Hugging Face model's forward (Transformers 5.23)."""
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if model_type not in FLOWS:
        raise UnsupportedPlanError(
            f"a pipeline of model_type {model_type!r} was asked for, but how its forward decomposes is known for "
            f"{', '.join(FLOWS)} only: use one of these, or export the plan to a framework that runs it"
        )
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise UnsupportedPlanError(
            "output_router_logits asks for an experts' balancing loss over all layers, which no stage sees whole: "
            "set it to False"
        )
    return FLOWS[model_type](model)


# -- text -----------------------------------------------------------------------------------------------------------


def _flow(model: Any, tower: Tower, between: tuple[Step, ...], image_shape: Callable[..., tuple[int, ...]]) -> Flow:
    """Tower, what lies `between`, and the text model behind them."""
    text = model.model.language_model
    num_deep = num_deepstack(model)
    steps = [*tower.steps, *between]
    steps.append(Step(layer=f"{TEXT}.embed_tokens", part="text", reads=("images",), writes=("hidden",), run=_embed))
    for i in range(len(text.layers)):
        deep = (f"deepstack.{i}",) if i < num_deep else ()
        steps.append(Step(layer=f"{TEXT}.layers.{i}", part="text", reads=("hidden", *deep), writes=("hidden",)))
    steps.append(Step(layer=NORM, part="text", reads=("hidden",), writes=("hidden",), run=_call))
    steps.append(Step(layer="lm_head", part="text", reads=("hidden",), writes=(LOGITS,), run=_call))

    def shapes(batch: Batch) -> Shapes:
        found: dict[str, tuple[int, ...]] = {
            "hidden": (*batch["input_ids"].shape, model.config.text_config.hidden_size)
        }
        if has_images(batch):
            rows = tower.shape(batch)
            found |= dict.fromkeys(tower.states, rows)
            found["images"] = image_shape(rows)
            found |= {f"deepstack.{k}": found["images"] for k in range(num_deep)}
        return found

    return Flow(steps=tuple(steps), shapes=shapes)


def run_text_blocks(run: Run, hidden: Tensor, deepstack: Mapping[str, Tensor]) -> Tensor:
    """The stage's blocks, and its norm where it holds that, by the text model's own forward.

    It makes masks (packs: from the positions that restart) and rotary embeddings, and finds `Elsewhere` for the rest.
    `deepstack`: the features that these blocks read.
    """
    keys = ("attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    options: dict[str, Any] = {key: run.batch[key] for key in keys if key in run.batch}
    if deepstack:
        order = _token_order(run)
        features = [deepstack.get(f"deepstack.{k}") for k in range(num_deepstack(run.model))]
        options["deepstack_visual_embeds"] = [x if x is None or order is None else x[order] for x in features]
        options["visual_pos_masks"] = _visual_tokens(run)
    text = run.model.model.language_model
    result: Tensor = text(inputs_embeds=hidden, use_cache=False, **options).last_hidden_state
    return result


def skip_absent_features(text: Any) -> None:
    """Lets a DeepStack text model pass over features that other stages add. Changes the instance."""
    add = getattr(text, "_deepstack_process", None)
    if add is not None:
        text._deepstack_process = lambda hidden, mask, features: (
            hidden if features is None else add(hidden, mask, features)
        )


def _embed(layer: nn.Module, run: Run, images: Tensor | None) -> Tensor:
    """Embedded ids, with the image features in the places of their tokens."""
    ids = run.batch["input_ids"]
    hidden: Tensor = layer(ids)
    if images is None:
        return hidden
    rows = images.reshape(-1, images.shape[-1]).to(hidden.dtype)
    is_image = ids == run.model.config.image_token_id
    num_videos = 0 if run.batch.get("pixel_values_videos") is None else _num_video_tokens(run)
    if num_videos < len(rows):
        hidden = hidden.masked_scatter(is_image[..., None], rows[: len(rows) - num_videos])
    if num_videos:
        is_video = ids == run.model.config.video_token_id
        hidden = hidden.masked_scatter(is_video[..., None], rows[len(rows) - num_videos :])
    return hidden


def _num_video_tokens(run: Run) -> int:
    merge = run.model.config.vision_config.spatial_merge_size
    return int(len(run.batch["pixel_values_videos"]) // merge**2)


def _visual_tokens(run: Run) -> Tensor:
    ids, config = run.batch["input_ids"], run.model.config
    result: Tensor = (ids == config.image_token_id) | (ids == config.video_token_id)
    return result


def _token_order(run: Run) -> Tensor | None:
    """Rows of (images, then videos) in the order of their tokens; None: they are in it already."""
    if run.batch.get("pixel_values_videos") is None or run.batch.get("pixel_values") is None:
        return None
    kinds = run.batch["input_ids"][_visual_tokens(run)]
    is_video = kinds == run.model.config.video_token_id
    order = torch.empty_like(kinds)
    num_images = int((~is_video).sum())
    order[~is_video] = torch.arange(num_images, device=order.device)
    order[is_video] = torch.arange(num_images, len(order), device=order.device)
    return order


def _call(layer: nn.Module, _: Run, hidden: Tensor) -> Tensor:
    result: Tensor = layer(hidden)
    return result


def _merged_shape(config: Any) -> Callable[..., tuple[int, ...]]:
    merge = config.vision_config.spatial_merge_size

    def shape(rows: tuple[int, ...]) -> tuple[int, ...]:
        return rows[0] // merge**2, config.text_config.hidden_size

    return shape
