"""`trimtab pack`: samples into packs under two limits, packs to ranks and steps, and how even they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trimtab.cli.output import JsonOption, console, log, print_json

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
    seed: Annotated[int, typer.Option(help="Same seed, same packs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for offsets.npy, indices.npy and schedule.npy.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Pack the samples of SIZES and print pad ratio, dist ratios, fill and shuffle quality."""
    import time

    from trimtab.balance.packing import pack_samples, report_packing, warm_up
    from trimtab.files import write_atomically
    from trimtab.plan.packs import pack_contents
    from trimtab.samples.read import read_lengths

    samples = read_lengths(sizes)
    warm_up()  # compiled once per machine: not part of the seconds below
    started = time.perf_counter()
    packed = pack_samples(
        samples,
        limits=(max_patches, max_tokens),
        dp=dp,
        num_microbatches=num_microbatches,
        method=method,
        order=order,
        oversize=oversize,
        seed=seed,
    )
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
                "fill_patches": balance.fill_vit,
                "fill_tokens": balance.fill_llm,
                "shuffle_chi2": balance.shuffle_chi2,
                "seconds": seconds,
                "unit": samples.patch_unit,
            }
        )
        return
    from trimtab.report.tables import print_balance

    print_balance(samples, balance, seconds, console())
