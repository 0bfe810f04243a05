"""What packing gains in training: padded random and length-grouped batches, ISF packs, balanced packs; measured.

    python bench/training_gain.py [--data ../shared/data] [--size 10m] [--samples 200] [--dp 4]
    python bench/training_gain.py --device cuda --dtype bfloat16 --attention flash_attention_2 --size 2b --scale 1

A model with random weights (`gain_models`) trains on samples of the real mixture's sizes, drawn as fitted distributions
have them where the file is not at hand, every side scaled down: a tile has 256 / scale tokens and 1024 / scale patches,
and text and limits shrink alike.
Every scheme trains on the very same samples, images and labels, with the same loss (their sum over labels by the
number of labels of the whole set): learning rate 0 keeps the weights, so the losses must agree, and do or it stops.
Timed: forward, backward, AdamW, for each micro-batch by itself, in one process; the least of `--repeats`. Not timed:
making and collating samples, the same for all.

`real` tokens are the samples' own, `computed` ones padding included. `kept` is what autograd keeps for backward at the
end of a forward, the most of any micro-batch; on CUDA `peak` is what the allocator held at most, weights and all.

Columns `dp N` are no run on N devices: they take each micro-batch's measured seconds, deal them out as the scheme
does, and let each step last as long as its slowest rank. Communication is not in them.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_pt_utils import get_length_grouped_indices

from gain_models import NAMES, GainModel, make_model
from lengths import DEFAULT_DATA, draw_lengths, make_table, read_mixture
from trimtab.balance.cost import LinearCost
from trimtab.balance.packing import PackResult, pack_samples
from trimtab.balance.schedule import schedule_packs
from trimtab.options import PackMethod
from trimtab.runtime.data.collate import IGNORED, PackedCollator, packed_loss
from trimtab.runtime.recompute import apply
from trimtab.specs import Packing, SampleTable

LIMITS = (9, 4096)  # tiles and tokens of a pack, before scaling
SCHEMES: tuple[tuple[str, PackMethod], ...] = (
    ("padded, random", "random"),
    ("padded, length-grouped", "length_group"),
    ("ISF packs", "isf"),
    ("balanced packs", "balanced"),
)
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What a forward takes, and how much of it is real."""

    inputs: dict[str, Any]
    real_tokens: int
    computed_tokens: int
    tiles: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scheme's line of the table."""

    scheme: str
    num_microbatches: int
    real_tokens: int
    computed_tokens: int
    real_flops: float  # forward and backward of the real tokens, nothing twice
    loss: float
    seconds: float  # of all micro-batches, one after the other
    memory_bytes: int
    dp_seconds: float  # steps of dp ranks, each as long as its slowest


def draw_sizes(folder: Path, num_samples: int, scale: int, seed: int) -> SampleTable:
    """`num_samples` of the mixture (or drawn ones of its kind) that fit a pack, scaled down."""
    whole = read_mixture(folder)
    r = np.random.default_rng(seed)
    if whole is None:
        print(f"the mixture is not in {folder}: sizes are drawn from distributions fitted to it")
        whole = draw_lengths("mixture", 4 * num_samples, seed)
    v, t = whole.num_patches, whole.num_tokens
    fits = np.flatnonzero((v <= LIMITS[0]) & (t <= LIMITS[1]))
    chosen = r.permutation(fits)[:num_samples]
    v, t = v[chosen].astype(np.int64), t[chosen].astype(np.int64)
    text = np.maximum(2, -(-(t - 256 * v) // scale))
    tokens = np.minimum(256 // scale * v + text, LIMITS[1] // scale)
    return make_table(v, tokens, np.zeros(len(v), np.int32), ("drawn",), "tiles")


def group_by_length(table: SampleTable, batch_size: float, dp: int, seed: int) -> PackResult:
    """Transformers' sampling strategy `group_by_length`: alike lengths in a batch, a step dp batches in turn."""
    draw, size = torch.Generator().manual_seed(seed), max(1, round(batch_size))
    indices = np.array(get_length_grouped_indices(table.num_tokens.tolist(), size, generator=draw), np.int64)
    offsets = np.append(np.arange(0, len(indices), size), len(indices)).astype(np.int64)
    schedule = schedule_packs(np.empty((len(offsets) - 1, 0)), dp=dp)
    return PackResult(packing=Packing(offsets=offsets, indices=indices, limits=LIMITS), schedule=schedule)


def make_sample(model: GainModel, row: int, tiles: int, tokens: int, scale: int) -> dict[str, Any]:
    """Sample `row`: its image tokens first, then text to learn; the same whoever asks."""
    draw = torch.Generator().manual_seed(row)
    num_image = tiles * (256 // scale)
    text = torch.randint(0, model.image_token, (tokens - num_image,), generator=draw)
    sample: dict[str, Any] = {
        "input_ids": torch.cat([torch.full((num_image,), model.image_token), text]),
        "labels": torch.cat([torch.full((num_image,), IGNORED), text]),
    }
    sample["labels"][0] = IGNORED
    if model.square_tiles:
        sample["mm_token_type_ids"] = (sample["input_ids"] == model.image_token).long()
    return sample | (model.images(tiles, draw) if tiles else {})


def pad_samples(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A row for each sample, padded on the right to the longest."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def rows(values: list[torch.Tensor], filling: int) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(v, (0, longest - len(v)), value=filling) for v in values])

    ids = [sample["input_ids"] for sample in samples]
    batch: dict[str, Any] = {
        "input_ids": rows(ids, 0),
        "attention_mask": rows([torch.ones_like(i) for i in ids], 0),
        "labels": rows([sample["labels"] for sample in samples], IGNORED),
        "use_cache": False,
    }
    if "mm_token_type_ids" in samples[0]:
        batch["mm_token_type_ids"] = rows([sample["mm_token_type_ids"] for sample in samples], 0)
    for key in ("pixel_values", "image_grid_thw"):
        images = [sample[key] for sample in samples if key in sample]
        if images:
            batch[key] = torch.cat(images)
    return batch


def make_batch(
    model: GainModel, result: PackResult, pack: int, table: SampleTable, scale: int, collate: Callable[..., Any]
) -> MicroBatch:
    rows = result.packing.indices[result.packing.offsets[pack] : result.packing.offsets[pack + 1]]
    tiles, tokens = table.num_patches[rows], table.num_tokens[rows]
    samples = [make_sample(model, int(r), int(v), int(t), scale) for r, v, t in zip(rows, tiles, tokens, strict=True)]
    inputs = collate(samples)
    return MicroBatch(
        inputs=inputs,
        real_tokens=int(tokens.sum()),
        computed_tokens=inputs["input_ids"].numel(),
        tiles=int(tiles.sum()),
    )


def loss_of(model: torch.nn.Module, inputs: dict[str, Any], num_labels: int) -> torch.Tensor:
    moved = {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    logits = model(**{key: value for key, value in moved.items() if key != "labels"}).logits
    return packed_loss(logits, moved, denominator=num_labels)


def kept_bytes(model: torch.nn.Module, inputs: dict[str, Any], num_labels: int) -> int:
    """What autograd keeps between forward and backward, weights not counted; each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, inputs, num_labels)
    total = sum(kept.values())
    del loss
    return total


def heaviest(batches: list[MicroBatch]) -> list[MicroBatch]:
    """Those that can need the most memory: of the most tokens, the most tiles, the most of both."""
    most_tokens, most_tiles = max(b.computed_tokens for b in batches), max(1, *(b.tiles for b in batches))
    orders: tuple[Callable[[MicroBatch], float], ...] = (
        lambda b: b.computed_tokens,
        lambda b: b.tiles,
        lambda b: b.computed_tokens / most_tokens + b.tiles / most_tiles,
    )
    return list({id(b): b for order in orders for b in sorted(batches, key=order)[-2:]}.values())


def time_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: MicroBatch, num_labels: int) -> Any:
    """(seconds, loss) of a forward, backward and optimizer step; CPU seconds on a CPU, which others may be using."""
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    clock = time.perf_counter if on_gpu else time.process_time
    start = clock()
    loss = loss_of(model, batch.inputs, num_labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start, float(loss.detach())


def compare(arguments: argparse.Namespace) -> list[Row]:
    """Every scheme on the same samples; raises if their losses differ."""
    dtype, scale = getattr(torch, arguments.dtype), arguments.scale
    gained = make_model(
        arguments.size,
        scale,
        attention=arguments.attention,
        dtype=dtype,
        device=arguments.device,
        text_layers=arguments.text_layers,
    )
    model = gained.module
    if arguments.recompute:
        apply(model, [name for name, x in model.named_modules() if isinstance(x, GradientCheckpointingLayer)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=arguments.device == "cuda")
    table = gained.price_by(draw_sizes(arguments.data, arguments.samples, scale, arguments.seed))
    num_labels = int((table.num_tokens - 256 // scale * table.num_patches - (table.num_patches == 0)).sum())
    packed = PackedCollator(model.config, attention=arguments.attention, vision_in_every_pack=False)
    results, batch_size = pack_all(table, gained.cost, arguments)
    num_params = sum(p.numel() for p in model.parameters())
    print(
        f"{num_params / 1e6:.1f} M parameters, {arguments.dtype}, {arguments.attention}, {arguments.device}; "
        f"{len(table)} samples, {table.num_tokens.sum():,} tokens, {table.num_patches.sum():,} tiles; packs of at most "
        f"{LIMITS[0]} tiles and {LIMITS[1] // scale} tokens, padded batches of {batch_size:.1f} samples"
    )

    def batch_of(method: PackMethod, number: int) -> MicroBatch:
        collate = pad_samples if method in ("random", "length_group") else packed
        return make_batch(gained, results[method], number, table, scale, collate)

    seconds: dict[PackMethod, np.ndarray] = {}
    losses: dict[PackMethod, float] = {}
    batches = {m: [batch_of(m, p) for p in range(results[m].packing.num_packs)] for _, m in SCHEMES}
    time_once(model, optimizer, batches["balanced"][0], num_labels)  # warm up; makes AdamW's state
    memory: dict[PackMethod, int] = {}
    for _ in range(arguments.repeats):
        for _, method in SCHEMES:
            if arguments.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found = [time_once(model, optimizer, batch, num_labels) for batch in batches[method]]
            least = np.array([s for s, _ in found])
            seconds[method] = np.minimum(seconds.get(method, least), least)
            losses[method] = sum(loss for _, loss in found)
            if arguments.device == "cuda":
                memory[method] = torch.cuda.max_memory_allocated()
    real_flops = 3 * float(gained.cost.of_samples(table).sum())
    if arguments.device != "cuda":
        memory = {m: max(kept_bytes(model, b.inputs, num_labels) for b in heaviest(own)) for m, own in batches.items()}
    rows = [
        _row_of(scheme, results[m], batches[m], seconds[m], real_flops=real_flops, loss=losses[m], memory=memory[m])
        for scheme, m in SCHEMES
    ]
    spread = max(row.loss for row in rows) / min(row.loss for row in rows) - 1
    if spread > LOSS_TOLERANCE[arguments.dtype]:
        raise ValueError(f"the schemes' losses differ by {spread:.1e}: {[row.loss for row in rows]}")
    return rows


def _row_of(
    scheme: str,
    result: PackResult,
    batches: list[MicroBatch],
    seconds: np.ndarray,
    *,
    real_flops: float,
    loss: float,
    memory: int,
) -> Row:
    slots = result.schedule.table
    work = np.where(slots >= 0, seconds[np.maximum(slots, 0)], 0.0)  # (steps, dp, 1)
    return Row(
        scheme=scheme,
        num_microbatches=len(batches),
        real_tokens=sum(b.real_tokens for b in batches),
        computed_tokens=sum(b.computed_tokens for b in batches),
        real_flops=real_flops,
        loss=loss,
        seconds=float(seconds.sum()),
        memory_bytes=memory,
        dp_seconds=float(work.sum(axis=2).max(axis=1).sum()),
    )


def pack_all(
    table: SampleTable, cost: LinearCost, arguments: argparse.Namespace
) -> tuple[dict[PackMethod, PackResult], float]:
    """Micro-batches of every scheme, and samples of a padded one: as many as of a balanced pack in the mean."""
    limits = (LIMITS[0], LIMITS[1] // arguments.scale)

    def pack(method: PackMethod, batch_size: float = 4) -> PackResult:
        return pack_samples(
            table, limits=limits, dp=arguments.dp, method=method, cost=cost, seed=arguments.seed, batch_size=batch_size
        )

    batch_size = len(table) / pack("balanced").packing.num_packs
    results = {method: pack(method, batch_size) for _, method in SCHEMES if method != "length_group"}
    results["length_group"] = group_by_length(table, batch_size, arguments.dp, arguments.seed)
    return results, batch_size


def show(rows: list[Row], dp: int, device: str) -> None:
    memory = "peak MiB" if device == "cuda" else "kept MiB"
    print(
        f"\n| scheme | micro-batches | padding | loss | real tokens/s | computed tokens/s | {memory} | "
        f"dp {dp}: real tokens/s a rank | dp {dp}: waiting |\n|---|---|---|---|---|---|---|---|---|"
    )
    for r in rows:
        print(
            f"| {r.scheme} | {r.num_microbatches} | {1 - r.real_tokens / r.computed_tokens:.1%} | {r.loss:.5f} | "
            f"{r.real_tokens / r.seconds:.0f} | {r.computed_tokens / r.seconds:.0f} | {r.memory_bytes / 2**20:.0f} | "
            f"{r.real_tokens / (dp * r.dp_seconds):.0f} | {1 - r.seconds / (dp * r.dp_seconds):.1%} |"
        )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--size", choices=NAMES, default="10m")
    parser.add_argument("--text-layers", type=int, help="of a published model: that many of its language model's")
    parser.add_argument("--recompute", action="store_true", help="every block again in backward")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--scale", type=int, choices=(1, 4, 16, 64), default=16, help="tokens of a tile: 256 / scale")
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=LOSS_TOLERANCE, default="float32")
    parser.add_argument("--attention", choices=("sdpa", "eager", "flash_attention_2"), default="sdpa")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    return parser.parse_args(words)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    show(compare(arguments), arguments.dp, arguments.device)


if __name__ == "__main__":
    main()
