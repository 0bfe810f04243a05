"""`trimtab pack`: samples into packs under two limits, packs to ranks and steps, and how even they are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from trimtab.address import place_of
from trimtab.cli.output import JsonOption, console, log, print_json, told_of_compiling
from trimtab.cli.settings import verb
from trimtab.errors import PlanError
from trimtab.options import Option, Order, Oversize, PackMethod
from trimtab.plan.options import NUM_DRAWN, ORDER, OVERSIZE, WEIGHTS

_FIGURES = (
    *("lower_bound_packs", "pad_ratio", "dist_ratio_vit", "dist_ratio_llm", "dist_ratio_cost", "utilisation"),
    *("fill_patches", "fill_tokens", "shuffle_chi2"),
)
_SHARED = ("dp", "num_microbatches", "order", "oversize", "seed", "filters")  # of every method


def parse_filters(text: str) -> tuple[int, int]:
    """Patches and tokens of `9,3968`."""
    patches, _, tokens = text.partition(",")
    try:
        return int(patches), int(tokens)
    except ValueError:
        raise PlanError(f"filters {text!r} are not two whole numbers: give patches and tokens, as in 9,3968") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How `trimtab pack` packs."""

    max_patches: Annotated[
        int | None,
        Option("Most patches of a pack (tiles, where files give vit_num).", least=1, most=2**40, common=True),
    ] = None
    max_tokens: Annotated[int | None, Option("Most tokens of a pack.", least=1, most=2**40, common=True)] = None
    dp: Annotated[int, Option("Data-parallel ranks.", least=1, common=True)] = 8
    num_microbatches: Annotated[int, Option("Packs per rank and step.", least=1, common=True)] = 1
    method: Annotated[PackMethod, Option("How packs are made.", common=True)] = "balanced"
    order: Annotated[Order, ORDER] = "random"
    oversize: Annotated[Oversize, OVERSIZE] = "error"
    weights: Annotated[tuple[tuple[str, float], ...], WEIGHTS] = ()
    num_drawn: Annotated[int | None, NUM_DRAWN] = None
    seed: Annotated[int, Option("Same seed, same packs.")] = 0
    filters: Annotated[
        tuple[int, int] | None,
        Option(
            "With --method isf: packs of at least so many patches or tokens are kept, as in 9,3968; default: all "
            "patches that a pack may have, or 128 tokens fewer.",
            read=parse_filters,
        ),
    ] = None
    iterations: Annotated[
        int | None, Option("With --method isf: times it packs what is left; default: 10.", least=1, most=1000)
    ] = None

    def __post_init__(self) -> None:
        if self.num_drawn is not None and not self.weights:
            raise PlanError(f"num_drawn {self.num_drawn} was asked for without weights: give every source a weight")
        if self.method != "isf" and (self.filters is not None or self.iterations is not None):
            raise PlanError(f"filters or iterations were given with method {self.method}: they belong to isf")


@verb
def pack(
    sizes: Annotated[
        list[Path],
        typer.Argument(
            parser=place_of, metavar="SIZES", help="Files of ready-made lengths, or tables that `size` saved."
        ),
    ],
    options: PackOptions,
    out: Annotated[Path | None, typer.Option(help="Folder for offsets.npy, indices.npy and schedule.npy.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Pack the samples of SIZES and print pad ratio, dist ratios, fill and shuffle quality."""
    import time

    from trimtab.balance.packing import pack_samples, refuse_empty, report_packing, warm_up
    from trimtab.files import write_atomically, written_together
    from trimtab.samples.lengths import read_lengths

    samples = read_lengths(sizes)
    epoch = None
    if options.weights:  # the planner's modules are loaded where they are needed
        from trimtab.plan.decide.epoch import draw_epoch

        epoch = draw_epoch(samples, options.weights, num_drawn=options.num_drawn, seed=options.seed)
    with told_of_compiling():
        warm_up(options.method)  # not part of the seconds below
    limits = _given_limits(options)
    how = {name: getattr(options, name) for name in _SHARED}
    if options.iterations is not None:
        how["iterations"] = options.iterations
    started = time.process_time()
    packed = pack_samples(epoch.drawn if epoch else samples, method=options.method, limits=limits, **how)
    packed = epoch.of_table(packed) if epoch else packed
    seconds = time.process_time() - started
    refuse_empty(packed.packing)
    balance = report_packing(samples, packed)
    if out is not None:
        from trimtab.plan.file.yaml import pack_contents

        with written_together():
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
                **{name: getattr(balance, name) for name in _FIGURES},
                "seconds": seconds,
                "unit": samples.patch_unit,
                **({"mixture": epoch.sources} if epoch else {}),
            }
        )
        return
    from trimtab.report.tables import print_balance

    print_balance(samples, balance, seconds, console())


def _given_limits(options: PackOptions) -> tuple[int, int]:
    if options.max_patches is None or options.max_tokens is None:
        limits = (("--max-patches", options.max_patches), ("--max-tokens", options.max_tokens))
        missing = [name for name, limit in limits if limit is None]
        raise PlanError(f"give {' and '.join(missing)} too, or use trimtab plan, which chooses the limits")
    return options.max_patches, options.max_tokens
