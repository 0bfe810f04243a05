"""`trimtab plan`: from a model, a data set and a cluster to one reviewable plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trimtab.cli.check import Framework
from trimtab.cli.data import (
    AllowOutsideOption,
    DataArgument,
    EngineOption,
    ExifOption,
    MaxLengthOption,
    MediaRootOption,
    NumberIdsOption,
    OnBadOption,
    ResumeOption,
    SourceKeyOption,
    SpecialTokensOption,
    TemplateOption,
    TokenizerOption,
    WorkersOption,
)
from trimtab.cli.describe import ConfigArgument, MaxPixelsOption, MaxTilesOption, PreprocessorOption
from trimtab.cli.output import JsonOption, console, given_command, print_json
from trimtab.cli.pack import OrderOption, OversizeOption
from trimtab.cli.weights import NumDrawnOption, WeightsOption, parse_weights

if TYPE_CHECKING:
    from trimtab.plan.file.details import PlanDetails

_NOT_IN_THE_PLAN = {"out", "workers", "engine", "resume", "as_json"}


def plan(
    context: typer.Context,
    config: ConfigArgument,
    data: DataArgument,
    cluster: Annotated[str, typer.Option(help="Devices, as in 32xA100-80GB.")],
    out: Annotated[Path, typer.Option(help="Folder for plan.yaml, tables, report.html and trace.json.")] = Path("plan"),
    devices_per_node: Annotated[int, typer.Option(min=1, help="Devices of one node.")] = 8,
    preprocessor: PreprocessorOption = None,
    max_pixels: MaxPixelsOption = None,
    max_tiles: MaxTilesOption = None,
    tokenizer: TokenizerOption = None,
    chat_template: TemplateOption = None,
    special_tokens: SpecialTokensOption = "template",
    media_root: MediaRootOption = None,
    allow_outside: AllowOutsideOption = False,
    exif: ExifOption = "ignore",
    on_bad: OnBadOption = "error",
    max_length: MaxLengthOption = None,
    source_key: SourceKeyOption = None,
    number_ids: NumberIdsOption = False,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel degree; default: chosen.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline degree; default: chosen.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel degree; default: chosen.")] = None,
    num_microbatches: Annotated[
        int | None, typer.Option(min=1, help="Packs per rank and step, instead of --global-batch.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples per step on average; default: 256, or 8 a device.")
    ] = None,
    max_patches: Annotated[int | None, typer.Option(min=1, help="Most ViT patches of a pack; default: chosen.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most LLM tokens of a pack; default: chosen.")] = None,
    schedule: Annotated[
        Literal["1F1B", "GPipe", "Interleaved1F1B", "ZBH1", "ZBVZeroBubble", "auto"],
        typer.Option(help="Pipeline schedule; auto: the fastest of them in simulation."),
    ] = "1F1B",
    num_chunks: Annotated[
        int, typer.Option(min=1, help="Virtual stages per device (Interleaved1F1B; ZBVZeroBubble: 2).")
    ] = 1,
    method: Annotated[Literal["balanced", "isf"], typer.Option(help="How packs are made.")] = "balanced",
    order: OrderOption = "random",
    oversize: OversizeOption = "error",
    weights: WeightsOption = None,
    num_drawn: NumDrawnOption = None,
    recompute: Annotated[
        Literal["auto", "none", "full"], typer.Option(help="Which layers recompute: as memory demands, none, all.")
    ] = "auto",
    offload: Annotated[
        bool, typer.Option("--offload", help="Layers may also keep activations in host memory, where its link pays.")
    ] = False,
    host_link: Annotated[
        str | None, typer.Option(help="Bytes/s between a device and its host, one direction, as in 50GB.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory for what one device offloads, as in 128GiB.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of one device to plan with, as in 80GiB.")] = None,
    reserve: Annotated[str, typer.Option(help="Share of the memory kept free, as in 6%.")] = "6%",
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO sharding over data-parallel ranks.")] = 1,
    optimizer: Annotated[
        Literal["adamw", "adamw_8bit", "sgd_momentum", "sgd"], typer.Option(help="Decides bytes of state.")
    ] = "adamw",
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Of weights and activations.")] = "bf16",
    attention: Annotated[Literal["flash", "sdpa", "eager"], typer.Option(help="Attention as it will run.")] = "flash",
    fused_kernels: Annotated[
        bool, typer.Option("--fused-kernels", help="Norms, rotary and gates as single kernels (TE, Liger).")
    ] = False,
    freeze: Annotated[
        list[str] | None, typer.Option(help="Towers that are not trained, as in vision,projector.")
    ] = None,
    vision_dp: Annotated[
        Literal["none", "auto", "tp", "cp", "sp", "dp"],
        typer.Option(help="Ranks that share images, each encoding a part; auto: those that gain most, if any do."),
    ] = "none",
    vision_exchange: Annotated[
        Literal["gather", "routed", "dispatch"] | None,
        typer.Option(help="How their features come together; default: gather, for dp dispatch."),
    ] = None,
    vision_pooling: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches whose images are encoded in one call; default: chosen.")
    ] = None,
    vision_rule: Annotated[
        Literal["balanced", "contiguous"], typer.Option(help="Any image to any rank, or runs of images in order.")
    ] = "balanced",
    vision_objective: Annotated[
        Literal["time", "memory"], typer.Option(help="What the shares of images are balanced by.")
    ] = "time",
    vision_reduction: Annotated[
        Literal["sum", "mean"] | None,
        typer.Option(help="How the trainer adds gradients up over these ranks; default: mean."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Plan with the seconds (traced, probed: bytes) of this profile, which `trimtab profile --out` wrote."
        ),
    ] = None,
    target: Annotated[
        Framework | None, typer.Option("--for", help="Only cuts that this framework can express.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same plan.")] = 0,
    refine: Annotated[
        int | None, typer.Option(min=2, help="Run so many of the best splits on this machine, keep the fastest.")
    ] = None,
    refine_steps: Annotated[int, typer.Option(min=1, help="Timed steps of each split that --refine runs.")] = 5,
    model_dir: Annotated[
        Path | None, typer.Option(help="Folder of the model that --refine runs; else CONFIG. As for `trimtab train`.")
    ] = None,
    refine_on: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where --refine runs; default: cuda where there is one.")
    ] = None,
    workers: WorkersOption = None,
    engine: EngineOption = "local",
    resume: ResumeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan the training of CONFIG on DATA: packs, stages and recompute, beside the unbalanced baseline."""
    from trimtab.adapters.targets import TARGETS
    from trimtab.cli.data import Reading, size_data
    from trimtab.cli.show import data_files, parse_share, parse_towers, plan_json, plan_with_progress, write_all
    from trimtab.costs.devices import parse_cluster
    from trimtab.costs.profile import load_profile
    from trimtab.errors import PlanError
    from trimtab.models.describe import describe
    from trimtab.plan.measured.check import refuse_broken
    from trimtab.plan.options import PlanOptions, PlanOrigin
    from trimtab.plan.sharing.choice import VisionChoice
    from trimtab.units import parse_bytes

    model = describe(config, preprocessor=preprocessor, max_pixels=max_pixels, max_tiles=max_tiles)
    if target is not None and schedule == "auto":
        raise PlanError(
            f"--schedule auto was asked for with --for {target}, which runs some schedules alone (Megatron's: 1F1B and "
            "Interleaved1F1B): give --schedule one that it has"
        )
    if target is not None:
        model = replace(model, forbidden_cuts=model.forbidden_cuts | TARGETS[target].can(model, pp or 1).forbidden_cuts)
    saved = None if profile is None else load_profile(profile)
    devices = parse_cluster(cluster, devices_per_node=devices_per_node, beside=None if saved is None else saved.device)
    options = PlanOptions(
        dp=dp,
        pp=pp,
        tp=tp,
        num_microbatches=num_microbatches,
        global_batch=global_batch,
        max_patches=max_patches,
        max_tokens=max_tokens,
        schedule=schedule,
        num_chunks=num_chunks,
        method=method,
        order=order,
        oversize=oversize,
        weights=parse_weights(weights or []),
        num_drawn=num_drawn,
        seed=seed,
        recompute=recompute,
        memory_bytes=None if memory is None else parse_bytes(memory),
        reserve=parse_share(reserve),
        zero_stage=zero_stage,
        optimizer=optimizer,
        dtype=dtype,
        attention=attention,
        fused_kernels=fused_kernels,
        frozen_towers=parse_towers(freeze or []),
        offload=offload,
        host_bytes_per_s=None if host_link is None else parse_bytes(host_link),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        profile=saved,
        vision=VisionChoice(
            group=vision_dp,
            exchange=vision_exchange,
            pooling=vision_pooling,
            rule=vision_rule,
            objective=vision_objective,
            reduction=vision_reduction,
        ),
    )
    sized = size_data(
        model,
        data,
        Reading(
            tokenizer=tokenizer,
            chat_template=chat_template,
            special_tokens=special_tokens,
            media_root=media_root,
            allow_outside=allow_outside,
            exif=exif,
            on_bad=on_bad,
            max_length=max_length,
            source_key=source_key,
            number_ids=number_ids,
            workers=workers,
            engine=engine,
            resume=resume,
        ),
    )
    origin = PlanOrigin(
        command=given_command(context, without=_NOT_IN_THE_PLAN),
        data_files=data_files(data),
        num_skipped=len(sized.bad),
        assumptions=sized.assumptions,
    )
    details = plan_with_progress(model, sized.table, devices, options, origin)
    paths = write_all(details, out)
    if refine is not None:
        reading: dict[str, Any] = {
            "tokenizer": tokenizer,
            "chat_template": chat_template,
            "special_tokens": special_tokens,
            "media_root": media_root,
            "allow_outside": allow_outside,
            "exif": exif,
        }
        details = _refined(out, model_dir or Path(config), refine, refine_steps, refine_on, reading)
        paths = write_all(details, out)
        refuse_broken(out)
    if as_json:
        print_json(plan_json(details, paths))
        return
    from trimtab.plan.decide.mixture import describe_draw
    from trimtab.report.text import print_plan

    for sentence in describe_draw(details.plan.inputs.data.mixture):
        print(sentence)
    print_plan(details, console())
    print("\n".join(f"{name}: {path}" for name, path in paths.items()))


def _refined(
    folder: Path,
    model: Path,
    num_candidates: int,
    num_steps: int,
    device: Literal["cpu", "cuda"] | None,
    reading: dict[str, Any],
) -> PlanDetails:
    """The plan in `folder` with the split that ran fastest; what was measured goes to stderr."""
    from trimtab.cli.output import log, progress
    from trimtab.runtime.data.conversations import ReadingOptions
    from trimtab.runtime.training.refine import RefineSettings, refine
    from trimtab.units import format_bytes, format_seconds

    settings = RefineSettings(
        model=model,
        num_candidates=num_candidates,
        num_steps=num_steps,
        reading=ReadingOptions(**reading),
        device=device,
    )
    with progress("timing splits") as advance:
        found = refine(folder, settings, progress=advance)
    for trial in found.trials:
        simulated = f"simulated {format_seconds(trial.candidate.step_s)}"
        measured = trial.problem
        if trial.median_step_s is not None and trial.peak_memory_bytes is not None:
            peak = format_bytes(trial.peak_memory_bytes)
            measured = f"measured {format_seconds(trial.median_step_s)}, at most {peak}"
        log(f"split of {trial.layers} layers: {simulated}, {measured}")
    log(f"timing {len(found.trials)} splits took {format_seconds(found.wall_s)}")
    return found.details
