"""`trimtab pack`: samples into packs under two limits, packs to ranks and steps, and how even they are."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trimtab.address import place_of
from trimtab.cli.options import verb
from trimtab.cli.output import JsonOption, console, log, print_json, told_of_compiling
from trimtab.errors import PlanError
from trimtab.options import Option, Order, Oversize, PackMethod
from trimtab.plan.options import NUM_DRAWN, ORDER, OVERSIZE, WEIGHTS

if TYPE_CHECKING:
    from trimtab.balance.packing import PackResult
    from trimtab.specs import SampleTable

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
    limits_by: Annotated[
        Literal["paper", "search"] | None,
        Option(
            "In place of both limits, as OmniBal chooses them: by its paper (the longest sample, and patches in "
            "proportion), or by its code's search for --mean-batch samples a pack."
        ),
    ] = None
    mean_batch: Annotated[int, Option("With --limits-by search: samples a pack.", least=1)] = 4
    apart: Annotated[bool, Option("Pack every data set for itself: rows of ranks hold one set each.")] = False
    dp: Annotated[int, Option("Data-parallel ranks.", least=1, common=True)] = 8
    num_microbatches: Annotated[int, Option("Packs per rank and step.", least=1)] = 1
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

    from trimtab.balance.convergence import isf_iterations
    from trimtab.balance.packing import report_packing, warm_up
    from trimtab.files import write_atomically, written_together
    from trimtab.plan.decide.mixture import describe_draw, draw_epoch
    from trimtab.plan.decide.packs import pack_contents
    from trimtab.samples.read import read_lengths

    samples = read_lengths(sizes)
    epoch = draw_epoch(samples, options.weights, num_drawn=options.num_drawn, seed=options.seed)
    with told_of_compiling():
        warm_up(options.method)  # not part of the seconds below
    limits = _choose_limits(epoch.drawn, options)
    how = {name: getattr(options, name) for name in _SHARED}
    if options.iterations is not None:
        how["iterations"] = options.iterations
    started = time.perf_counter()
    packed = epoch.of_table(_pack(epoch.drawn, options, limits, how))
    seconds = time.perf_counter() - started
    steps = (
        isf_iterations(epoch.drawn, limits=limits[0], **how) if options.method == "isf" and not options.apart else []
    )
    balance = report_packing(samples, packed)
    if out is not None:
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
                "limits": limits,
                "seconds": seconds,
                "unit": samples.patch_unit,
                **({"iterations": steps} if steps else {}),
                **({"mixture": epoch.sources} if epoch.sources else {}),
            }
        )
        return
    from trimtab.report.tables import print_balance, print_iterations

    for sentence in (*describe_draw(epoch.sources), *_tell_limits(options, limits, samples.patch_unit)):
        print(sentence)
    print_balance(samples, balance, seconds, console())
    if steps:
        print_iterations(steps, console())


def _tell_limits(options: PackOptions, limits: list[tuple[int, int]], unit: str) -> list[str]:
    """A sentence, where they were not given but chosen."""
    if options.limits_by is None:
        return []
    told = "; ".join(f"{patches:,} {unit} and {tokens:,} tokens" for patches, tokens in limits)
    return [f"Limits of a pack, by OmniBal's {options.limits_by}: {told}."]


def _pack(
    samples: "SampleTable", options: PackOptions, limits: list[tuple[int, int]], how: dict[str, Any]
) -> "PackResult":
    from trimtab.balance.packing import pack_samples
    from trimtab.plan.decide.apart import pack_apart

    if not options.apart:
        return pack_samples(samples, method=options.method, limits=limits[0], **how)
    steps = {name: how[name] for name in ("dp", "num_microbatches", "seed")}
    rest = {name: value for name, value in how.items() if name not in steps} | {"method": options.method}
    return pack_apart(samples, limits=limits, how=rest, **steps)


def _choose_limits(samples: "SampleTable", options: PackOptions) -> list[tuple[int, int]]:
    """One pair, or with --apart and --limits-by one for each data set."""
    given = (options.max_patches, options.max_tokens)
    if options.limits_by is None:
        if options.max_patches is None or options.max_tokens is None:
            raise PlanError(
                f"max_patches {given[0]} and max_tokens {given[1]} were given, and packs need both limits: give both, "
                "or --limits-by paper or search"
            )
        return [(options.max_patches, options.max_tokens)]
    if given != (None, None):
        raise PlanError(f"limits were given, and are to be chosen by {options.limits_by}: leave one of both out")
    limits = _limits_of_parts(samples, options)
    if not options.apart:
        _refuse_above(samples, limits[0], options)
    return limits


def _limits_of_parts(samples: "SampleTable", options: PackOptions) -> list[tuple[int, int]]:
    import numpy as np

    from trimtab.balance.isf_limits import paper_limits, search_limits
    from trimtab.plan.decide.work import select_rows

    rows = [np.flatnonzero(samples.source == source) for source in np.unique(samples.source)]
    parts = [select_rows(samples, own) for own in rows] if options.apart else [samples]
    if options.limits_by == "paper":
        return [paper_limits(part) for part in parts]
    return [search_limits(part, mean_batch=options.mean_batch, seed=options.seed)[0].limits for part in parts]


def _refuse_above(samples: "SampleTable", limits: tuple[int, int], options: PackOptions) -> None:
    """Limits that were chosen cannot be raised: what to do with samples above them is the user's choice."""
    above = int(((samples.num_patches > limits[0]) | (samples.num_tokens > limits[1])).sum())
    if above and options.oversize == "error":
        raise PlanError(
            f"{above} of {len(samples)} samples exceed the limits that --limits-by {options.limits_by} found "
            f"({limits[0]:,} {samples.patch_unit}, {limits[1]:,} tokens): give --oversize skip or --oversize alone"
        )
