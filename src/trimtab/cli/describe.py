"""`trimtab describe`, `image-size` and `uneven`: a model's layers, what an image costs, a published rule for stages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.data import ConfigArgument, ImageOptions
from trimtab.cli.output import JsonOption, console, log, print_json
from trimtab.cli.settings import verb
from trimtab.errors import ConfigError, ImageError, PartitionError

if TYPE_CHECKING:
    from trimtab.partition.published import StageMemory, UnevenModel, UnevenSplit


OutOption = Annotated[
    Path | None, typer.Option(help="Write a description file here: every verb takes it as CONFIG, without torch.")
]


@verb
def describe(
    config: ConfigArgument,
    images: ImageOptions,
    out: OutOption = None,
    run_its_code: Annotated[
        bool, typer.Option("--run-its-code", help="Let Python code in the folder of CONFIG build the model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print layers in forward order, parameters per tower, tied weights and forbidden cuts."""
    from trimtab.models.description import save_description

    if run_its_code:
        log(
            f"warning: Python code in {config} runs now, without network and with limits: it can still read and write "
            "what you can"
        )
    model = images.describe(config, run_its_code=run_its_code)
    if out is not None:
        save_description(model, out)
    towers = {tower: model.num_tower_params(tower) for tower in ("audio", "vision", "projector", "language")}
    if not towers["audio"]:
        del towers["audio"]
    if as_json:
        print_json(
            {
                "name": model.name,
                "family": model.family,
                "num_params": {**towers, "total": model.num_params},
                "num_layers": len(model.layers),
                "layers": model.layers,
                "tied": model.tied,
                "forbidden_cuts": sorted(model.forbidden_cuts),
                "forbidden_cut_reason": model.forbidden_cut_reason,
                "image_rule": model.image_rule.name,
                "vocab_size": model.vocab_size,
                "notes": model.notes,
            }
        )
        return
    from trimtab.report.tables import print_model

    print_model(model, console())


@verb
def image_size(
    config: ConfigArgument,
    size: Annotated[str, typer.Argument(help="Width and height in pixels, as in 1920x1080.")],
    images: ImageOptions,
    frames: Annotated[int | None, typer.Option(min=1, help="Of a clip: how many frames it has.")] = None,
    fps: Annotated[float, typer.Option(min=0.01, help="Of a clip: its frames a second.")] = 24.0,
    as_json: JsonOption = False,
) -> None:
    """Print ViT patches and LLM tokens of an image of SIZE pixels, or of a clip of --frames such images."""
    from trimtab.models.images.asked import NO_CLIPS
    from trimtab.specs import Clip

    width, height = read_size(size)
    model = images.describe(config)
    if frames is None:
        counts = model.image_rule.count(width, height)
    else:
        if model.clip_rule is None:
            raise ConfigError(f"videos of {model.name} cannot be counted: {NO_CLIPS}")
        counts = model.clip_rule.count_clip(Clip(width=width, height=height, num_frames=frames, fps=fps)).image
    if as_json:
        print_json({"model": model.name, "rule": model.image_rule.name, **asdict(counts)})
        return
    tiles = "1 tile" if counts.tiles == 1 else f"{counts.tiles} tiles"
    print(
        f"{model.name}: {counts.patches:,} ViT patches in {tiles}, "
        f"{counts.tokens:,} LLM tokens ({model.image_rule.name})"
    )


def read_size(text: str) -> tuple[int, int]:
    """Return the width and height of "1920x1080"."""
    match = re.fullmatch(r"([0-9]{1,7})[xX]([0-9]{1,7})", text.strip())
    if match is None:
        raise ImageError(f"{text!r} is not an image size: write width x height in pixels, as in 1920x1080")
    return int(match[1]), int(match[2])


# -- trimtab uneven ----------------------------------------------------------------------------------------------------


GB = 1e9  # the notebook's


def uneven(
    config: ConfigArgument,
    pp: Annotated[int, typer.Option(min=2, help="Pipeline stages.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")] = 1,
    first: Annotated[
        int | None, typer.Option(min=0, help="Show what your own number of layers on the first stage costs.")
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a sample in the language model, images included.")] = 1024,
    image: Annotated[str, typer.Option(help="Width and height of a sample's image in pixels.")] = "224x224",
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples of a micro-batch.")] = 1,
    fp8: Annotated[bool, typer.Option("--fp8", help="Activations by the notebook's FP8 formula.")] = False,
    device: Annotated[str, typer.Option(help="Device that the smallest tp is searched for.")] = "H20",
    out: Annotated[Path | None, typer.Option(help="Draw even and uneven stages into this HTML file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print layers for uneven pipeline stages by Pai-Megatron-Patch's notebook: FLOPs, split, memory, flags.

    The optimum in the same FLOPs is printed with it. `trimtab plan` decides by seconds and bytes of every layer.
    """
    from trimtab.costs.devices import find_device
    from trimtab.models.describe import describe
    from trimtab.partition.published import fitting_tp, stage_memory, uneven_model

    model, found = describe(config), find_device(device)
    counted = uneven_model(model, image=read_size(image), decoder_tokens=seq)
    splits, no_answer = _splits(counted, pp, first)
    memory = {name: stage_memory(counted, x.counts, tp=tp, batch=micro_batch, fp8=fp8) for name, x in splits.items()}
    chosen = splits.get("the rule", splits["optimum"]) if first is None else splits["yours"]
    fitting = fitting_tp(counted, chosen.counts, found.memory_bytes, batch=micro_batch, fp8=fp8)
    if out is not None:
        _draw(out, model.name, counted, splits, found.peak_flops)
    if as_json:
        rows = {
            name: {**asdict(split), "flags": megatron_flags(split.counts)[0], "memory": memory[name]}
            for name, split in splits.items()
        }
        rest = {"model": model.name, "no_answer": no_answer, "smallest_tp": fitting}
        print_json({**rest, **asdict(counted), "splits": rows})
        return
    print(
        f"{model.name}: {counted.vision_tokens:,} patches and {counted.decoder_tokens:,} tokens a sample. "
        f"TFLOP, forward and backward:\n"
        f"vision tower {counted.vision_flops / 1e12:.4f}, projector {counted.projector_flops / 1e12:.4f}, "
        f"a language layer {counted.llm_layer_flops / 1e12:.5f} (x {counted.llm_layers})"
    )
    _print_splits(splits, memory)
    print(f"GB = 10^9 bytes of one micro-batch, tp {tp}; 1F1B holds up to pp of them on the first stage.")
    if no_answer:
        print(f"The rule has no answer here: {no_answer}.")
    print(_advice(chosen, splits["optimum"]))
    print(f"Memory: {'no tp up to 8' if fitting is None else f'tp {fitting}'} fits {found.name}.")


def _draw(out: Path, name: str, counted: UnevenModel, splits: dict[str, UnevenSplit], flops_per_s: float) -> None:
    """Write the splits' steps of four micro-batches a stage as timelines."""
    from trimtab.files import write_atomically
    from trimtab.partition.published import draw_times
    from trimtab.partition.simulate import simulate
    from trimtab.report.html import uneven_page

    shown = {}
    for label, split in splits.items():
        num = 4 * len(split.counts)
        shown[label] = simulate(draw_times(counted, split.counts, num_microbatches=num, flops_per_s=flops_per_s))
    write_atomically(out, uneven_page(name, shown))
    log(f"timelines: {out}")


def _splits(counted: UnevenModel, pp: int, first: int | None) -> tuple[dict[str, UnevenSplit], str | None]:
    """Return those to compare by name, and why the rule's is not among them."""
    from trimtab.partition.published import best_split, flops_split, priced_split, split_with

    optimum, no_answer = best_split(counted, pp=pp), None  # first: it refuses more stages than layers
    splits = {"even": priced_split(counted, [(counted.llm_layers + i) // pp for i in range(pp)][::-1])}
    try:
        splits["the rule"] = flops_split(counted, pp=pp)
    except PartitionError as error:
        no_answer = str(error)
    splits["optimum"] = optimum
    if first is not None:
        splits["yours"] = split_with(counted, first, pp=pp)
    return splits, no_answer


def megatron_flags(counts: Sequence[int]) -> tuple[str, str]:
    """Return Megatron-LM's flags for these layers, and why the notebook's two do not say them ("" where they do)."""
    from trimtab.adapters.megatron import layout_of

    first, *middle, last = counts
    if len(set(counts)) == 1:
        return "", ""
    plain = (f"--decoder-first-pipeline-num-layers {first}", f"--decoder-last-pipeline-num-layers {last}")
    if first and last and len(set(middle)) <= 1:
        return " ".join(plain), ""
    why = "a count of 0 is refused by Megatron-Core" if not (first and last) else "middle stages have to be alike"
    return f"--pipeline-model-parallel-layout '{layout_of(counts)}'", why


def _tell(counts: Sequence[int]) -> str:
    """Write "3/15x2/14" for 3, 15, 15 and 14 layers."""
    runs = [(count, len(list(run))) for count, run in itertools.groupby(counts)]
    return "/".join(
        f"{count}x{length}" if length > 1 and len(counts) > 2 else "/".join([str(count)] * length)
        for count, length in runs
    )


def _print_splits(splits: dict[str, UnevenSplit], memory: dict[str, tuple[StageMemory, ...]]) -> None:
    from trimtab.report.table import Column, Table, numeric, print_table

    rows = []
    for name, split in splits.items():
        first, *middle, last = (f"{stage.total_bytes / GB:.3f}" for stage in memory[name])
        figures = (first, max(middle, key=float, default="-"), last, f"{memory[name][0].vision_bytes / GB:.3f}")
        rows.append((name, _tell(split.counts), f"{1 + split.imbalance:.4f}", *figures))
    columns = numeric("Layers", "Slowest\n/ mean", "M_first,\nGB", "M_middle,\nGB", "M_last,\nGB", "M_vit,\nGB")
    print_table(Table(title="Splits", columns=(Column("Split"), *columns), rows=rows), console())


def _advice(chosen: UnevenSplit, best: UnevenSplit) -> str:
    lost = (1 + chosen.imbalance) / (1 + best.imbalance) - 1
    if lost < 1e-9:
        return f"It is the optimum of its own FLOPs.\n{_flags(chosen)}"
    better = f"Not the optimum of its own FLOPs: {_tell(best.counts)} ends {lost:.1%} earlier."
    return f"{better}\n{_flags(best)}\n{_tell(chosen.counts)}: {_flags(chosen)}"


def _flags(split: UnevenSplit) -> str:
    flags, why = megatron_flags(split.counts)
    return f"Flags: {flags or 'none, the stages are even.'}" + (f" ({why})" if why else "")
