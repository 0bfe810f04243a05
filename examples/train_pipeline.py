"""Train a model in a pipeline on two CPU processes: `python examples/train_pipeline.py [4]`, four being two replicas.

A tiny InternVL with random weights, cut inside its vision tower, learns twelve random samples by heart. Every
step has four packs, one of them without an image. A plan's own stages come from `read_layout(load_plan(...))`.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from trimtab.torch import PackedCollator, PipelineLayout, build_pipeline

PP, NUM_STEPS = 2, 15
LAYOUT = PipelineLayout(
    stages=(
        ("model.vision_tower.embeddings", *(f"model.vision_tower.encoder.layer.{i}" for i in range(3))),
        (
            "model.vision_tower.encoder.layer.3",
            "model.multi_modal_projector",
            "model.language_model.embed_tokens",
            "model.language_model.layers.0",
            "model.language_model.layers.1",
            "model.language_model.norm",
            "lm_head",
        ),
    ),
    schedule="1F1B",
    num_microbatches=4,
)


def tiny_config() -> PreTrainedConfig:
    text = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 200,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": [56, 56],
        "patch_size": [14, 14],
    }
    return AutoConfig.for_model(
        "internvl", vision_config=vision, text_config=text, image_token_id=199, tie_word_embeddings=False
    )


def draw_sample(number: int) -> dict[str, Any]:
    """Some text, in two of three samples around a tile of four tokens."""
    draw = torch.Generator().manual_seed(number)
    text = torch.randint(3, 190, (6 + number % 5,), generator=draw)
    if number % 3 == 1:
        return {"input_ids": text, "labels": text}
    image = torch.full((4,), 199)
    ids = torch.cat([text[:3], image, text[3:]])
    pixels = torch.randn(1, 3, 56, 56, generator=draw)
    return {"input_ids": ids, "labels": torch.where(ids == 199, -100, ids), "pixel_values": pixels}


def train(rank: int, num_ranks: int, store: str) -> None:
    """One process; under torchrun `init_process_group` needs the backend alone."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // PP, PP), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)  # the same weights on every rank
    model = AutoModelForImageTextToText.from_config(tiny_config())
    collator = PackedCollator(model.config, vision_in_every_pack=False)
    pipeline = build_pipeline(model, LAYOUT, pp_group=mesh["pp"].get_group(), dp_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)

    # the ranks of one pipeline take the same packs, its replicas different ones
    replica, replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()
    samples = [draw_sample(i) for i in range(replica, 12, replicas)]
    packs = [collator(samples[i::4]) for i in range(4)]
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(float(pipeline.step(packs).loss))
        pipeline.clip_gradients(1.0)
        optimizer.step()
    if rank == 0:
        held = sum(p.numel() for p in pipeline.parameters())
        print(f"rank 0 holds {held} parameters; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < 0.7 * losses[0]
    dist.destroy_process_group()


if __name__ == "__main__":
    num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else PP
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, args=(num_ranks, f"{folder}/store"), nprocs=num_ranks)
