"""`trimtab size` and `pack`, and what `plan` shares with it: the options that say how a data set is read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trimtab.address import place_of
from trimtab.cli.output import JsonOption, console, log, print_json, told_of_compiling
from trimtab.cli.settings import verb
from trimtab.errors import PlanError, SampleError
from trimtab.options import Option, Order, Oversize, PackMethod, ReadingOptions, same_fields
from trimtab.plan.options import NUM_DRAWN, ORDER, OVERSIZE, WEIGHTS

if TYPE_CHECKING:
    from trimtab.balance.packing import PackResult
    from trimtab.plan.decide.omnibal import IsfIteration
    from trimtab.samples.table import SizingResult
    from trimtab.specs import ClusterSpec, DeviceSpec, ModelSpec, SampleTable

DataArgument = Annotated[
    list[Path],
    typer.Argument(
        parser=place_of,
        metavar="DATA",
        help="Files, folders or addresses of samples, or saved tables.",
    ),
]
ConfigArgument = Annotated[str, typer.Argument(help="config.json, its folder, or a name (Qwen2.5-VL-7B).")]
WORKERS = Option("Processes; default: one per core. The result is the same.", least=1, most=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The devices, and how they are linked."""

    cluster: Annotated[str, Option("Devices, as in 32xA100-80GB.", common=True)]
    devices_per_node: Annotated[int, Option("Devices of one node.", least=1)] = 8
    node_link: Annotated[
        str | None, Option("Ports of a node and their rate, as in 8x400Gb; default: as its vendor builds nodes.")
    ] = None

    def parsed(self, *, also: "DeviceSpec | None" = None, text: str | None = None) -> "ClusterSpec":
        """The cluster, or one of several; `also`: one more device to find, of a profile."""
        from trimtab.costs.devices import parse_cluster

        how = {"devices_per_node": self.devices_per_node, "node_link": self.node_link}
        return parse_cluster(text or self.cluster, also=also, **how)  # type: ignore[arg-type]  # by name


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """How a model's images are counted, where its own files do not say it, or not what the user wants."""

    preprocessor: Annotated[Path | None, Option("preprocessor_config.json, where it does not lie next to CONFIG.")] = (
        None
    )
    max_pixels: Annotated[int | None, Option("Most pixels of an image.", least=1, common=True)] = None
    max_tiles: Annotated[
        int | None, Option("Your own limit of an image's tiles, thumbnail aside (tiling models).", least=1)
    ] = None

    def describe(self, config: str, *, run_its_code: bool = False) -> "ModelSpec":
        """The model of CONFIG with these images."""
        from trimtab.models.describe import describe

        own: dict[str, Any] = {"preprocessor": self.preprocessor, "run_its_code": run_its_code}
        return describe(config, max_pixels=self.max_pixels, max_tiles=self.max_tiles, **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingOptions:
    """How a data set is sized, as the user chose."""

    reading: ReadingOptions = field(default_factory=ReadingOptions)
    on_bad: Annotated[Literal["error", "skip"], Option("At bad samples.", common=True)] = "error"
    max_length: Annotated[int | None, Option("Treat a sample with more tokens as bad.", least=1)] = None
    source_key: Annotated[str | None, Option("Field of a record that names its data set; else its file.")] = None
    workers: Annotated[int | None, WORKERS] = None
    resume: Annotated[
        Path | None,
        Option(
            "Folder, or address, for finished chunks: give it again to continue after an interruption.", read=place_of
        ),
    ] = None


def size_data(model: "ModelSpec", data: Sequence[Path], sizing: SizingOptions) -> "SizingResult":
    """Size DATA for a model with a progress bar, naming every skipped sample on stderr; or load saved tables."""
    import os

    from trimtab.cli.output import log, progress
    from trimtab.models.families import family_of
    from trimtab.models.images.asked import clip_rule_of
    from trimtab.samples.size import size_samples
    from trimtab.samples.table import is_saved_table

    saved = [path.is_file() and is_saved_table(path) for path in data]
    if all(saved):
        return load_saved(model, data, sizing)
    if any(saved):
        raise SampleError(f"{data[saved.index(False)]} is no saved table, as others are: size it first")
    reading = sizing.reading
    if reading.tokenizer is None and model.origin is not None and model.origin.config is not None:
        given = Path(model.origin.config)
        own = (given if given.is_dir() else given.parent) / "tokenizer.json"
        reading = replace(reading, tokenizer=own if own.is_file() else None)
    with progress("sizing, bytes") as advance:
        result = size_samples(
            data,
            image_rule=model.image_rule,
            clip_rule=clip_rule_of(model, reading.video),
            **{name: value for name, value in same_fields(reading, ReadingOptions).items() if name != "video"},
            image_markup=family_of(model.family).markup or model.image_markup,
            max_tokens=sizing.max_length,
            source_key=sizing.source_key,
            on_bad=sizing.on_bad,
            workers=sizing.workers or os.cpu_count() or 1,
            resume_dir=sizing.resume,
            progress=advance,
        )
    for bad in result.bad:
        log(f"skipped {bad}")
    return result


def load_saved(model: "ModelSpec", tables: Sequence[Path], sizing: SizingOptions) -> "SizingResult":
    """Load saved tables as one, with what was skipped and assumed for them; refused if for other image sizes."""
    from trimtab.cli.output import log
    from trimtab.models.images.rules import tell_apart, write_rule
    from trimtab.samples.lengths import saved_part
    from trimtab.samples.table import SizingResult, join_parts, load_sizing

    plain, given = ({**asdict(options), **asdict(options.reading)} for options in (SizingOptions(), sizing))
    ignored = [name for name, value in given.items() if name != "reading" and value != plain[name]]
    if ignored:
        log(f"warning: {', '.join(ignored)} change nothing: {tables[0]} is sized already")
    results, own_rule = [load_sizing(path) for path in tables], write_rule(model.image_rule)
    for path, result in zip(tables, results, strict=True):
        if result.image_rule not in (None, own_rule):
            sized, counts = tell_apart(result.image_rule, own_rule)
            raise SampleError(f"{path} was sized with {sized}, not {counts} of {model.name}: size it again")
    return SizingResult(
        table=results[0].table if len(results) == 1 else join_parts(tables, [[saved_part(r.table)] for r in results]),
        bad=tuple(bad for result in results for bad in result.bad),
        assumptions=tuple(dict.fromkeys(sentence for result in results for sentence in result.assumptions)),
        image_rule=results[0].image_rule,
        files=tuple(file for result in results for file in result.files) if all(r.files for r in results) else (),
    )


@verb
def size(
    data: DataArgument,
    model: Annotated[str, typer.Option(help="config.json, its folder, or a shipped description.")],
    images: ImageOptions,
    sizing: SizingOptions,
    out: Annotated[Path | None, typer.Option(help="Save the table here: a file.npz.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Count images, ViT patches and LLM tokens of every sample of DATA, from image headers and the tokenizer."""
    from trimtab.samples.table import save_sizing

    result = size_data(images.describe(model), data, sizing)
    if out is not None:
        save_sizing(result, out)
        log(f"table: {out}")
    table = result.table
    if as_json:
        print_json(
            {
                "num_samples": len(table),
                "num_read": result.num_read,
                "num_bad": len(result.bad),
                "bad": result.bad,
                "num_images": int(table.num_images.sum()),
                "num_patches": int(table.num_patches.sum()),
                "num_tokens": int(table.num_tokens.sum()),
                "max_patches": int(table.num_patches.max(initial=0)),
                "max_tokens": int(table.num_tokens.max(initial=0)),
                "patch_unit": table.patch_unit,
                "tokens_exact": table.tokens_exact,
                "assumptions": result.assumptions,
                "table": out,
            }
        )
        return
    from trimtab.report.tables import print_sizes

    print_sizes(result, console())


# -- trimtab pack: samples into packs under two limits, packs to ranks and steps, and how even they are ----------------


_FIGURES = (
    *("lower_bound_packs", "pad_ratio", "dist_ratio_vit", "dist_ratio_llm", "dist_ratio_cost", "utilisation"),
    *("fill_patches", "fill_tokens", "shuffle_chi2"),
)
_SHARED = ("dp", "num_microbatches", "order", "oversize", "seed", "filters")  # of every method


def parse_filters(text: str) -> tuple[int, int]:
    """Return the patches and tokens of `9,3968`."""
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
    limits_by: Annotated[
        Literal["paper", "search"] | None,
        Option("OmniBal's limits: of the longest sample, or by its search for mean_batch samples a pack."),
    ] = None
    mean_batch: Annotated[int, Option("With limits_by=search: samples of a pack.", least=1)] = 4
    apart: Annotated[bool, Option("Pack each data set for itself: ranks run packs of one set at a time.")] = False

    def __post_init__(self) -> None:
        if self.limits_by is not None and (self.max_patches or self.max_tokens):
            raise PlanError(f"limits_by {self.limits_by} was asked for, and limits were given: leave one out")
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

    from trimtab.balance.packing import refuse_empty, report_packing, warm_up
    from trimtab.samples.lengths import read_lengths

    samples = read_lengths(sizes)
    epoch = None
    if options.weights:  # the planner's modules are loaded where they are needed
        from trimtab.plan.decide.epoch import draw_epoch

        epoch = draw_epoch(samples, options.weights, num_drawn=options.num_drawn, seed=options.seed)
    with told_of_compiling():
        warm_up(options.method)  # not part of the seconds below
    drawn = epoch.drawn if epoch else samples
    limits = _limits(drawn, options)
    how = {name: getattr(options, name) for name in _SHARED}
    if options.iterations is not None:
        how["iterations"] = options.iterations
    started = time.process_time()
    packed = _pack(drawn, options, limits, how)
    packed = epoch.of_table(packed) if epoch else packed
    seconds = time.process_time() - started
    refuse_empty(packed.packing)
    balance = report_packing(samples, packed)
    iterations = _iterations(drawn, options, limits, how)
    if out is not None:
        _write_packs(packed, out)
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
                **({"limits": limits} if options.limits_by else {}),
                **({"iterations": iterations} if iterations else {}),
            }
        )
        return
    from trimtab.report.tables import print_balance, print_iterations

    if options.limits_by:
        pairs = "; ".join(f"{patches:,} {samples.patch_unit} and {tokens:,} tokens" for patches, tokens in limits)
        log(f"limits of a pack: {pairs}")
    print_balance(samples, balance, seconds, console())
    if iterations:
        print_iterations(iterations, console())


def _write_packs(packed: "PackResult", out: Path) -> None:
    from trimtab.files import write_atomically, written_together
    from trimtab.plan.file.yaml import pack_contents

    with written_together():
        for name, content in pack_contents(packed.packing, packed.schedule).items():
            write_atomically(out / name, content)
    log(f"packs: {out}")


def _pack(
    samples: "SampleTable", options: PackOptions, limits: list[tuple[int, int]], how: dict[str, Any]
) -> "PackResult":
    from trimtab.balance.packing import pack_samples

    if not options.apart:
        return pack_samples(samples, method=options.method, limits=limits[0], **how)
    from trimtab.plan.decide.omnibal import pack_apart

    steps = {name: how[name] for name in ("dp", "num_microbatches", "seed")}
    rest = {name: value for name, value in how.items() if name not in steps}
    return pack_apart(samples, limits=limits, how=rest | {"method": options.method}, **steps)


def _iterations(
    samples: "SampleTable", options: PackOptions, limits: list[tuple[int, int]], how: dict[str, Any]
) -> "list[IsfIteration]":
    if options.method != "isf" or options.apart:
        return []
    from trimtab.plan.decide.omnibal import isf_iterations

    return list(isf_iterations(samples, limits=limits[0], **how))


def _limits(samples: "SampleTable", options: PackOptions) -> list[tuple[int, int]]:
    """Return one pair, or one for each data set where they are packed apart and limits are chosen."""
    if options.limits_by is None:
        return [_given_limits(options)]
    import numpy as np

    from trimtab.plan.decide.omnibal import paper_limits, search_limits
    from trimtab.plan.decide.work import select_rows

    parts = [samples]
    if options.apart:
        parts = [select_rows(samples, np.flatnonzero(samples.source == x)) for x in np.unique(samples.source)]
    if options.limits_by == "paper":
        return [paper_limits(part) for part in parts]
    given = {"mean_batch": options.mean_batch, "dp": options.dp, "seed": options.seed}
    return [search_limits(part, **given)[0].limits for part in parts]


def _given_limits(options: PackOptions) -> tuple[int, int]:
    if options.max_patches is None or options.max_tokens is None:
        limits = (("--max-patches", options.max_patches), ("--max-tokens", options.max_tokens))
        missing = [name for name, limit in limits if limit is None]
        raise PlanError(f"give {' and '.join(missing)} too, or use trimtab plan, which chooses the limits")
    return options.max_patches, options.max_tokens
