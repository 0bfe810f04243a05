"""`trimtab pack`: samples into packs under two limits, packs to ranks and steps, and how even they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trimtab.cli.output import JsonOption, console, log, print_json
from trimtab.cli.weights import NumDrawnOption, WeightsOption, parse_weights
from trimtab.errors import PlanError

MethodOption = Annotated[
    Literal["balanced", "isf", "random", "length_group", "device_group"], typer.Option(help="How packs are made.")
]
OrderOption = Annotated[
    Literal["random", "tolerance", "sorted"], typer.Option(help="How packs meet in steps; random keeps the shuffle.")
]
OversizeOption = Annotated[
    Literal["error", "alone", "skip"], typer.Option(help="What becomes of a sample that exceeds a limit alone.")
]


def pack(
    sizes: Annotated[list[Path], typer.Argument(help="Files of ready-made lengths, or tables that `size` saved.")],
    max_patches: Annotated[
        int, typer.Option(min=1, max=2**40, help="Most patches of a pack (tiles, where files give vit_num).")
    ],
    max_tokens: Annotated[int, typer.Option(min=1, max=2**40, help="Most tokens of a pack.")],
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 8,
    num_microbatches: Annotated[int, typer.Option(min=1, help="Packs per rank and step.")] = 1,
    method: MethodOption = "balanced",
    order: OrderOption = "random",
    oversize: OversizeOption = "error",
    weights: WeightsOption = None,
    num_drawn: NumDrawnOption = None,
    seed: Annotated[int, typer.Option(help="Same seed, same packs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for offsets.npy, indices.npy and schedule.npy.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Pack the samples of SIZES and print pad ratio, dist ratios, fill and shuffle quality."""
    import time
    from dataclasses import asdict

    from trimtab.balance.packing import pack_samples, report_packing, warm_up
    from trimtab.files import write_atomically
    from trimtab.plan.decide.mixture import describe_draw, draw_sources, packed_rows
    from trimtab.plan.decide.packs import pack_contents
    from trimtab.plan.decide.work import select_rows
    from trimtab.samples.read import read_lengths

    samples = read_lengths(sizes)
    draw = None
    if weights:
        draw = draw_sources(samples, parse_weights(weights), num_drawn=num_drawn, seed=seed)
    elif num_drawn is not None:
        raise PlanError(f"num_drawn {num_drawn} was asked for without weights: give every source a weight")
    warm_up(method)  # compiled once per machine: not part of the seconds below
    started = time.perf_counter()
    packed = pack_samples(
        samples if draw is None else select_rows(samples, draw.rows),
        limits=(max_patches, max_tokens),
        dp=dp,
        num_microbatches=num_microbatches,
        method=method,
        order=order,
        oversize=oversize,
        seed=seed,
    )
    if draw is not None:
        packed = packed_rows(packed, draw.rows)
    seconds = time.perf_counter() - started
    balance = report_packing(samples, packed)
    if out is not None:
        for name, content in pack_contents(packed.packing, packed.schedule).items():
            write_atomically(out / name, content)
        log(f"packs: {out}")
    if as_json:
        print_json(
            {
                "num_samples": len(samples),
                "num_packed": len(packed.packing.indices),
                "num_oversize": len(packed.packing.oversize),
                "num_packs": packed.packing.num_packs,
                "lower_bound_packs": balance.lower_bound_packs,
                "pad_ratio": balance.pad_ratio,
                "dist_ratio_vit": balance.dist_ratio_vit,
                "dist_ratio_llm": balance.dist_ratio_llm,
                "dist_ratio_cost": balance.dist_ratio_cost,
                "utilisation": balance.utilisation,
                "fill_patches": balance.fill_patches,
                "fill_tokens": balance.fill_tokens,
                "shuffle_chi2": balance.shuffle_chi2,
                "seconds": seconds,
                "unit": samples.patch_unit,
                **({} if draw is None else {"mixture": [asdict(source) for source in draw.sources]}),
            }
        )
        return
    from trimtab.report.tables import print_balance

    for sentence in () if draw is None else describe_draw(draw.sources):
        print(sentence)
    print_balance(samples, balance, seconds, console())
