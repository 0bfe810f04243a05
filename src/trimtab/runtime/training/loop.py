"""The loop behind `trimtab train`: a plan's packs through a plan's stages, on torch's own parts; read `train`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import tower_bytes, tower_seconds
from trimtab.costs.formula.adapters import adapt_layer
from trimtab.errors import PlanError, TrimtabError, UnsupportedPlanError
from trimtab.lora import Lora
from trimtab.models.asking.layers import read_linears
from trimtab.models.asking.model import library_reads
from trimtab.models.describe import describe
from trimtab.options import AttentionImplementation
from trimtab.plan.file.check import verify_plan
from trimtab.plan.file.reload import reload_plan
from trimtab.plan.file.yaml import load_plan
from trimtab.plan.layout import PipelineLayout, read_layout, refuse_quantised
from trimtab.plan.plan import Plan
from trimtab.plan.runs import StepRecord
from trimtab.runtime.data.collate import PackedCollator, attend_by_sample, loaded_attention
from trimtab.runtime.data.conversations import UnreadableSampleError, open_conversations
from trimtab.runtime.data.dataset import PlanBatchSampler, PlanDataLoader, PlanDataset
from trimtab.runtime.data.packing import verify_packing
from trimtab.runtime.pipeline.build import build_pipeline
from trimtab.runtime.pipeline.pipeline import Pipeline, StepResult
from trimtab.runtime.placing.folder import check_folder
from trimtab.runtime.ranks import Ranks, device_mesh, on_first_rank, process_group, tell
from trimtab.runtime.training.checkpoint import (
    Progress,
    RunRecorder,
    export_model,
    find_checkpoint,
    held_folder,
    load_checkpoint,
    save_checkpoint,
    words_of,
)
from trimtab.runtime.training.in_force import Ran, attention_in, differences, recomputed_layers
from trimtab.runtime.training.settings import TrainSettings

# Adapters in `trimtab train`: PEFT puts them next to the layers that a plan names, an export merges them.


_BASE, _A, _B = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"  # PEFT's names


def add_adapters(model: Any, folder: Path, lora: Lora) -> None:
    """Put an adapter next to each linear layer that `lora` names, and freeze everything else.

    `folder` holds the model's config.json. A is drawn by torch's generator, B is 0, as PEFT does it: the first step's
    loss is only that of the model.
    """
    refuse_quantised(lora)
    try:
        import peft
    except ImportError:
        raise UnsupportedPlanError(f"PEFT, for LoRA ({lora}), is not installed: pip install 'trimtab[lora]'") from None
    built = dict(model.named_modules())
    layers = [replace(x, linears=read_linears(built.get(x.name))) for x in describe(folder).layers]
    names = [f"{x.name}.{adapter.name}".rstrip(".") for x in layers for adapter in adapt_layer(x, lora, 1)]
    config = peft.LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=names)
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def merged(tensors: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """Return the tensors of a model with adapters as those of the model itself: W + alpha / r B A, under W's own name.

    `tensors` may be a part of the model, as a pipeline's rank holds it: an adapter lies where its layer does.
    """
    scale, found = lora.alpha / lora.r, dict[str, Tensor]()
    for name, value in tensors.items():
        if name.endswith((_A, _B)):
            continue
        stem, mark, rest = name.rpartition(_BASE)
        if not mark:
            found[name] = value
            continue
        if rest == ".weight":
            value = value.detach() + scale * (tensors[stem + _B].detach() @ tensors[stem + _A].detach())
        found[stem + rest] = value
    return found


def train(settings: TrainSettings) -> list[StepRecord]:
    """Train as `settings.plan` says, on the ranks torchrun started; one process runs alone. The steps of this call.

    Rank r is pipeline device r div dp and data-parallel rank r mod dp, with dp = ranks / pipeline devices. That may be
    another dp than the plan's: a step keeps its packs, each rank runs more or fewer of them. The loss of a step, its
    gradients and its clipping are those of one process that computes every sample alone (see `runtime.loss`).
    Resuming gives the same losses as going on.
    """
    plan = load_plan(settings.plan)
    with (
        process_group(settings.device, timeout_s=settings.timeout_s, words=words_of(settings, plan)) as ranks,
        held_folder(settings.out, ranks.device),
    ):
        device = ranks.device
        ranks.arrive()
        checkpoint = find_checkpoint(settings, device)
        run = open_run(settings, plan, ranks)
        torch.manual_seed(settings.seed + 1 + dist.get_rank())  # dropout
        start = 0
        if checkpoint is not None:
            path, progress = checkpoint
            start = progress.step
            run.loader.load_state_dict(progress.loader)
            load_checkpoint(path, progress, run.parameters, run.buffers, run.optimizer)
        num_steps = settings.steps or settings.epochs * len(run.sampler) // run.pipeline.layout.num_microbatches
        if start >= num_steps:
            tell(f"nothing is left to train: the run in {settings.out} is at step {start} of {num_steps}")

        recorder = RunRecorder(settings, plan, run.pipeline, run.mesh, start=start)
        batches = chain.from_iterable(repeat(run.loader))  # epoch after epoch
        records = []
        for step in range(start + 1, num_steps + 1):
            recorder.begin(run.loader.state_dict())
            microbatches = [next(batches) for _ in range(run.pipeline.layout.num_microbatches)]
            recorder.loaded()
            if step == start + 1:
                for sentence in differences(plan, _ran(run, settings, device, microbatches), own_layers=True):
                    tell(f"not as planned: {sentence}")
            ranks.arrive()
            with autocast(settings, device):
                result = run.pipeline.step(microbatches)
            norm = update(run, settings, step, num_steps, result)
            record = recorder.end(
                step,
                result,
                learning_rate=settings.rate(step, num_steps),
                norm=norm,
                num_tokens=sum(batch["input_ids"].numel() for batch in microbatches),
                num_fillers=run.data.num_fillers,
            )
            records.append(record)
            if settings.saves_at(step, num_steps):
                ranks.arrive()
                progress = Progress(step=step, loader=run.loader.state_dict(), optimizer=settings.optimizer)
                save_checkpoint(settings.out, run.parameters, run.buffers, run.optimizer, progress, keep=settings.keep)
        if num_fillers := sum(record.num_fillers for record in records):
            tell(f"{num_fillers} samples could not be read, and fillers without weight took their places")
        if settings.export is not None:
            ranks.arrive()
            tensors: dict[str, Tensor] = {**run.parameters, **run.buffers}
            lora = plan.inputs.training.lora
            export_model(
                settings.export,
                tensors if lora is None else merged(tensors, lora),
                run.pipeline.stages[0].model.config,
                like=settings.model,
            )
        return records


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """This rank's part of a run, before its first step."""

    mesh: DeviceMesh
    pipeline: Pipeline
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    data: PlanDataset
    sampler: PlanBatchSampler
    loader: PlanDataLoader


def open_run(settings: TrainSettings, plan: Plan, ranks: Ranks, *, layout: PipelineLayout | None = None) -> Run:
    """Open data, model on its stages, optimizer and loader; collective. `layout` None: the plan's, for these ranks."""
    device = ranks.device
    conversations = open_conversations(
        settings.plan, settings.model, settings.reading, data=list(settings.data) or None
    )
    on_first_rank(lambda: verify_plan(settings.plan, conversations.model), device)
    mesh = device_mesh(len(plan.decisions.stages) // plan.decisions.schedule.num_chunks, ranks)
    asked = share_images(plan, dp=mesh["dp"].size())
    layout = layout or fit_layout(asked, dp=mesh["dp"].size())
    torch.manual_seed(settings.seed)  # the same weights on every rank, where they are drawn
    model = load_model(settings, plan, device)
    if settings.verify_packing:
        on_first_rank(lambda: verify_packing(model), device)
    tied = tied_names(model)
    pipeline = build_pipeline(
        model,
        layout,
        device=device,
        pp_group=mesh.get_group("pp"),
        dp_group=mesh.get_group("dp"),
        image_cost=on_first_rank(lambda: image_cost(settings, asked), device),
        timeout_s=ranks.timeout_s,
    )
    parameters = {tied.get(name, name): parameter for name, parameter in pipeline.named_parameters()}
    sampler = PlanBatchSampler(  # every device of a pipeline reads the packs of its data-parallel rank
        settings.plan,
        dp=mesh["dp"].size(),
        rank=mesh.get_local_rank("dp"),
        num_microbatches=layout.num_microbatches,
    )
    on_error: Literal["raise", "filler"] = "filler" if settings.on_bad_sample == "filler" else "raise"
    data = PlanDataset(conversations, conversations.records.samples, on_error=on_error, fill_for=UnreadableSampleError)
    return Run(
        mesh=mesh,
        pipeline=pipeline,
        parameters=parameters,
        buffers=buffers_of(pipeline),
        optimizer=make_optimizer(settings, list(parameters.values())),
        data=data,
        sampler=sampler,
        loader=make_loader(settings, pipeline, data, sampler),
    )


def update(run: Run, settings: TrainSettings, step: int, num_steps: int, result: StepResult) -> Tensor:
    """Clip and take the optimizer's step; the norm of all gradients."""
    clip = settings.max_grad_norm
    norm = run.pipeline.gradient_norm() if clip is None else run.pipeline.clip_gradients(clip)
    refuse_useless(step, result, norm)
    for group in run.optimizer.param_groups:
        group["lr"] = settings.rate(step, num_steps)
    run.optimizer.step()
    return norm


# -- the parts ------------------------------------------------------------------------------------------------------


def refuse_useless(step: int, result: StepResult, norm: Tensor) -> None:
    """Refuse it before the optimizer makes weights of it; the same on every rank."""
    if not result.denominator > 0:
        raise TrimtabError(f"no token of step {step} has a label: see which samples are read (fillers have none)")
    for what, value in (("loss", float(result.loss)), ("gradient norm", float(norm))):
        if not math.isfinite(value):
            raise TrimtabError(f"the {what} of step {step} is {value}: resume with a lower learning rate, or float32")


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return further name of a parameter -> its first one, for weights that several modules share (tied embeddings).

    Checkpoints and exports know only the first, so that they do not depend on which stage holds which half.
    """
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            found[name] = owner
    return found


def load_model(settings: TrainSettings, plan: Plan, device: torch.device) -> Any:
    """The Hugging Face model on the CPU in float32, towers frozen as the plan says or adapters added; no code of its
    folder runs."""
    attention = settings.attention or attention_of(plan, device)
    if not settings.random_weights and not any(settings.model.glob("*.safetensors")):
        raise PlanError(f"{settings.model} holds no *.safetensors: name a folder with them, or give --random-weights")
    check_folder(settings.model)
    what_not = f"does not load {settings.model} with attention {attention}"
    with library_reads(what_not, "correct its files, or choose another attention"):
        model = _read_model(settings, attention)
    frozen = plan.inputs.training.frozen_towers
    if frozen:
        for layer in describe(settings.model).layers:
            if layer.tower in frozen:
                model.get_submodule(layer.name).requires_grad_(False)
    if plan.inputs.training.lora is not None:
        add_adapters(model, settings.model, plan.inputs.training.lora)
    attend_by_sample(model)
    return model.train()


def _read_model(settings: TrainSettings, attention: AttentionImplementation) -> Any:
    cls = transformers.AutoModelForImageTextToText
    if settings.random_weights:
        config = transformers.AutoConfig.from_pretrained(settings.model, local_files_only=True, trust_remote_code=False)
        return cls.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return cls.from_pretrained(
        settings.model,
        attn_implementation=attention,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )


def fit_layout(plan: Plan, *, dp: int) -> PipelineLayout:
    """The plan's layout with as many micro-batches as keep its packs per step on `dp` ranks."""
    schedule, planned = plan.decisions.schedule, plan.decisions.parallel.dp
    packs = planned * schedule.num_microbatches
    if packs % dp:
        raise PlanError(f"{dp} data-parallel ranks do not divide {packs} packs: start {planned}, as planned")
    own = replace(plan.decisions, schedule=replace(schedule, num_microbatches=packs // dp))
    try:
        return read_layout(replace(plan, decisions=own))
    except UnsupportedPlanError as problem:
        if dp <= planned:
            raise
        raise UnsupportedPlanError(
            f"{dp} data-parallel ranks leave each {packs // dp} packs ({problem}): start {plan.decisions.num_devices} "
            "processes"
        ) from None


def share_images(plan: Plan, *, dp: int) -> Plan:
    """Return the plan, without shared images where one data-parallel rank has no other."""
    decision = plan.decisions.vision_data_parallel
    if decision is None or decision.group != "dp" or dp > 1:
        return plan
    tell("one data-parallel rank has no other to share images with: it encodes its own")
    return replace(plan, decisions=replace(plan.decisions, vision_data_parallel=None))


def image_cost(settings: TrainSettings, plan: Plan) -> LinearCost | None:
    """Return the cost of images in the plan's profile; None: images are not shared, or balanced by multiply-adds."""
    decision, given = plan.decisions.vision_data_parallel, plan.inputs.model
    if decision is None:
        return None
    try:
        model = describe(settings.model, max_pixels=given.max_pixels, max_tiles=given.max_tiles)
        profile = reload_plan(settings.plan, model=model).case.without_vision().setting.profile
    except TrimtabError as problem:
        tell(f"images are shared by counts of work, not by the plan's profile: {problem}")
        return None if decision.objective == "time" else LinearCost(patches=1.0)  # what a patch holds, they all do
    return tower_seconds(profile) if decision.objective == "time" else tower_bytes(profile)


def make_optimizer(settings: TrainSettings, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The named optimizer of torch.optim over one group; frozen parameters get no gradient, so it skips them."""
    cls: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, settings.optimizer)
    try:
        return cls(parameters, lr=settings.learning_rate, **settings.optimizer_options)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value}" for key, value in settings.optimizer_options.items()) or "no options"
        raise TrimtabError(f"optimizer {settings.optimizer} refuses {given} ({error}): see torch.optim") from None


def make_loader(
    settings: TrainSettings, pipeline: Pipeline, data: PlanDataset, sampler: PlanBatchSampler
) -> PlanDataLoader:
    """Return the packs as the keyword arguments of the model's forward.

    Its workers are seeded apart: iterations that drew their seeds from torch's own generator would change what dropout
    draws, and a resumed run begins one more of them.
    """
    config: Any = pipeline.stages[0].model.config
    collator = PackedCollator(
        config,
        attention=loaded_attention(config),
        loss_weighting=settings.loss_weighting,
        vision_in_every_pack=False,  # the pipeline sums gradients itself, so a tower may stay idle on a rank
    )
    return PlanDataLoader(data, sampler, collate_fn=collator, num_workers=settings.workers, generator=torch.Generator())


def _ran(run: Run, settings: TrainSettings, device: torch.device, microbatches: Sequence[Any]) -> Ran:
    """Return what this rank's first step runs."""
    models = [stage.model for stage in run.pipeline.stages]
    recomputed = {name: how for model in models for name, how in recomputed_layers(model).items()}
    if run.pipeline.layout.has_tower_everywhere:  # the tower's own recompute is no stage's
        towers = set(run.pipeline.stages[0].module.cuts.images)
        recomputed = {name: how for name, how in recomputed.items() if name not in towers}
    return Ran(
        ranks=dist.get_world_size(),
        num_packs=len(microbatches) * run.mesh["dp"].size(),
        most_tokens=max(batch["input_ids"].numel() for batch in microbatches),
        dtype=getattr(torch, settings.dtype_on(device.type)),
        attention=attention_in(models[0]),
        recomputed=recomputed,
    )


def buffers_of(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return this rank's persistent buffers, under the model's names."""
    models = [stage.model for stage in pipeline.stages]
    names = {name for model in models for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in pipeline.state_dict().items() if name not in names}


def attention_of(plan: Plan, device: torch.device) -> AttentionImplementation:
    """The plan's, in Transformers' words; sdpa for flash attention that is not installed."""
    planned = plan.inputs.training.attention
    if planned == "flash":
        flash = device.type == "cuda" and transformers.utils.is_flash_attn_2_available()
        return "flash_attention_2" if flash else "sdpa"
    return planned


def autocast(settings: TrainSettings, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context of bfloat16 products over the float32 weights, or of nothing."""
    if settings.dtype_on(device.type) == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
