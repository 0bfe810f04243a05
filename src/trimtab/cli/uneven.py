"""`trimtab uneven`: a published rule of thumb for uneven pipeline stages, by its own formulas, beside the optimum."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.describe import ConfigArgument
from trimtab.cli.image_size import read_size
from trimtab.cli.output import JsonOption, console, print_json
from trimtab.errors import PartitionError

if TYPE_CHECKING:
    from trimtab.partition.flops_rule import StageMemory, UnevenModel, UnevenSplit
    from trimtab.partition.timeline import Timeline
    from trimtab.specs import DeviceSpec

GB = 1e9  # the notebook's
MAX_TP = 8


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
    num_microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 32,
    device: Annotated[str, typer.Option(help="Device to compare memory and speed with.")] = "H20",
    fp8: Annotated[bool, typer.Option("--fp8", help="Activations by the notebook's FP8 formula.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Draw even and uneven stages as timelines into this HTML file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Layers for uneven pipeline stages by Pai-Megatron-Patch's notebook: FLOPs, split, memory, flags.

    Beside its answer: the optimum in the same FLOPs, and the memory of all micro-batches that 1F1B holds at once.
    `trimtab plan` decides by seconds and bytes of every layer instead.
    """
    from trimtab.costs.devices import find_device
    from trimtab.files import write_atomically
    from trimtab.models.describe import describe
    from trimtab.partition import flops_rule
    from trimtab.partition.flops_rule import stage_memory
    from trimtab.partition.simulate import simulate
    from trimtab.report.uneven import timelines_page

    model, found = describe(config), find_device(device)
    counted = flops_rule.uneven_model(model, image=read_size(image), decoder_tokens=seq)
    splits, no_answer = _splits(counted, pp, first)
    steps = {
        name: simulate(
            flops_rule.rule_times(counted, split, num_microbatches=num_microbatches, flops_per_s=found.peak_flops)
        )
        for name, split in splits.items()
    }
    settings: dict[str, Any] = {"tp": tp, "batch": micro_batch, "fp8": fp8}
    memory = {name: _memory(counted, split, num_microbatches, settings) for name, split in splits.items()}
    chosen = splits.get("the rule", splits["optimum"]) if first is None else splits["yours"]
    fitting = _smallest_tp(counted, chosen, num_microbatches, found, settings)
    if out is not None:
        write_atomically(out, timelines_page(model.name, steps))
    if as_json:
        rest = {"model": model.name, "no_answer": no_answer, "smallest_tp_that_fits": fitting}
        print_json(rest | _figures(counted, splits, steps, memory))
        return
    _print(model.name, counted, splits, steps, memory)
    _print_parts(stage_memory(counted, chosen.counts, **settings), tp)
    if no_answer:
        print(f"The rule has no answer here: {no_answer}.")
    print(_advice(chosen, splits["optimum"], fitting, found))
    if out is not None:
        print(f"timelines: {out}")


def _splits(counted: UnevenModel, pp: int, first: int | None) -> tuple[dict[str, UnevenSplit], str | None]:
    """Those to compare by name, and why the rule's is not among them."""
    from trimtab.partition.flops_rule import best_split, flops_split, priced_split, split_with

    splits = {"even": priced_split(counted, [(counted.llm_layers + i) // pp for i in range(pp)][::-1])}
    no_answer = None
    try:
        splits["the rule"] = flops_split(counted, pp=pp)
    except PartitionError as error:
        no_answer = str(error)
    splits["optimum"] = best_split(counted, pp=pp)
    if first is not None:
        splits["yours"] = split_with(counted, first, pp=pp)
    return splits, no_answer


def _figures(
    counted: UnevenModel,
    splits: Mapping[str, UnevenSplit],
    steps: Mapping[str, Timeline],
    memory: Mapping[str, Mapping[str, Sequence[float]]],
) -> dict[str, Any]:
    """For --json."""
    return {
        **asdict(counted),
        "vision_flops": counted.vision_flops,
        "projector_flops": counted.projector_flops,
        "llm_layer_flops": counted.llm_layer_flops,
        "splits": {
            name: {
                **asdict(split),
                "flags": megatron_flags(split.counts)[0],
                "bubble_ratio": steps[name].bubble_ratio,
                "memory": memory[name],
            }
            for name, split in splits.items()
        },
    }


def megatron_flags(counts: Sequence[int]) -> tuple[str, str]:
    """Megatron-LM's flags for these layers, and why the notebook's two do not say them ("" where they do)."""
    from trimtab.adapters.megatron import layout_of

    first, *middle, last = counts
    if len(set(counts)) == 1:
        return "", ""
    plain = (
        f"--decoder-first-pipeline-num-layers {first}",
        f"--decoder-last-pipeline-num-layers {last}",
    )
    if first and last and len(set(middle)) <= 1:
        return " ".join(plain), ""
    why = "a count of 0 is refused by Megatron-Core" if not (first and last) else "middle stages have to be alike"
    return f"--pipeline-model-parallel-layout '{layout_of(counts)}'", why


def _tell(counts: Sequence[int]) -> str:
    """ "3/15x2/14" for 3, 15, 15 and 14 layers."""
    runs = [(count, len(list(run))) for count, run in itertools.groupby(counts)]
    return "/".join(
        f"{count}x{length}" if length > 1 and len(counts) > 2 else "/".join([str(count)] * length)
        for count, length in runs
    )


def _memory(
    counted: UnevenModel, split: UnevenSplit, num_microbatches: int, settings: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Bytes of every stage: of one micro-batch, as the notebook counts, and of all that 1F1B holds."""
    from trimtab.partition.flops_rule import stage_memory

    pp = len(split.counts)
    held = [min(pp - stage, num_microbatches) for stage in range(pp)]
    return {
        "one_microbatch_bytes": [x.total_bytes for x in stage_memory(counted, split.counts, **settings)],
        "in_flight_bytes": [x.total_bytes for x in stage_memory(counted, split.counts, in_flight=held, **settings)],
    }


def _smallest_tp(
    counted: UnevenModel, split: UnevenSplit, num_microbatches: int, device: DeviceSpec, settings: Mapping[str, Any]
) -> int | None:
    """The notebook's second step: the split stays, tp is doubled until the fullest stage fits."""
    tp = 1
    while tp <= MAX_TP:
        memory = _memory(counted, split, num_microbatches, {**settings, "tp": tp})
        if max(memory["in_flight_bytes"]) <= device.memory_bytes:
            return tp
        tp *= 2
    return None


def _print(
    name: str,
    counted: UnevenModel,
    splits: Mapping[str, UnevenSplit],
    steps: Mapping[str, Timeline],
    memory: Mapping[str, Mapping[str, Sequence[float]]],
) -> None:
    from trimtab.report.table import Column, Table, numeric, print_table

    print(
        f"{name}: {counted.vision_tokens:,} patches and {counted.decoder_tokens:,} tokens a sample. "
        f"TFLOP, forward and backward:\n"
        f"vision tower {counted.vision_flops / 1e12:.4f}, projector {counted.projector_flops / 1e12:.4f}, "
        f"a language layer {counted.llm_layer_flops / 1e12:.5f} (x {counted.llm_layers})"
    )
    rows = []
    for label, split in splits.items():
        one, held = memory[label]["one_microbatch_bytes"], memory[label]["in_flight_bytes"]
        middle = f"{max(one[1:-1]) / GB:.3f}" if len(one) > 2 else "-"
        rows.append(
            (
                label,
                _tell(split.counts),
                f"{1 + split.imbalance:.4f}",
                f"{steps[label].bubble_ratio:.1%}",
                *(f"{one[0] / GB:.3f}", middle, f"{one[-1] / GB:.3f}", f"{max(held) / GB:.3f}"),
            )
        )
    columns = numeric(
        *("Layers", "Slowest\n/ mean", "Idle", "M_first,\nGB", "M_middle,\nGB", "M_last,\nGB", "Held,\nGB")
    )
    print_table(Table(title="Splits", columns=(Column("Split"), *columns), rows=rows), console())


def _print_parts(stages: Sequence[StageMemory], tp: int) -> None:
    first, last = stages[0], stages[-1]
    vision, projector, layers, head = (
        f"{part / GB:.3f}" for part in (first.vision_bytes, first.projector_bytes, first.llm_bytes, last.head_bytes)
    )
    print(
        f"GB = 10^9 bytes, tp {tp}. Of M_first: vision tower {vision}, language layers {layers}, M_projector\n"
        f"{projector} (the notebook prints its sum without it). Of M_last: head {head}.\n"
        "Held: the fullest stage with all micro-batches that 1F1B holds; M counts one, as the notebook does."
    )


def _advice(chosen: UnevenSplit, best: UnevenSplit, fitting: int | None, device: DeviceSpec) -> str:
    flags, why = megatron_flags(chosen.counts)
    lost = (1 + chosen.imbalance) / (1 + best.imbalance) - 1
    lines = [
        "It is the optimum of its own FLOPs."
        if lost < 1e-9
        else f"Not the optimum of its own FLOPs: {_tell(best.counts)} ends {lost:.1%} earlier.",
        f"Flags: {flags}" + (f" ({why})" if why else "") if flags else "Flags: none, the stages are even.",
    ]
    if fitting is None:
        lines.append(f"No tp up to {MAX_TP} fits {device.name}: recompute layers, or use more stages.")
    else:
        lines.append(
            f"Memory: tp {fitting} fits {device.name} ({device.memory_bytes / GB:.1f} GB), all in flight counted."
        )
    return "\n".join(lines)
