"""The loop behind `trimtab train`: a plan's packs through a plan's stages, on torch's own parts; read `train`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trimtab.errors import PlanError, TrimtabError
from trimtab.models.describe import describe
from trimtab.plan.file import load_plan
from trimtab.plan.plan import Plan
from trimtab.plan.run_log import StepRecord
from trimtab.runtime.checkpoint import (
    Progress,
    export_model,
    list_checkpoints,
    load_checkpoint,
    read_progress,
    save_checkpoint,
)
from trimtab.runtime.collate import Attention, PackedCollator
from trimtab.runtime.conversations import open_conversations
from trimtab.runtime.data import PlanBatchSampler, PlanDataLoader, PlanDataset
from trimtab.runtime.pipeline import Pipeline, PipelineLayout, build_pipeline, read_layout
from trimtab.runtime.ranks import device_mesh, process_group
from trimtab.runtime.run_recorder import RunRecorder
from trimtab.runtime.train_settings import TrainSettings


def train(settings: TrainSettings) -> list[StepRecord]:
    """Train as `settings.plan` says, on the ranks torchrun started; one process runs alone. The steps of this call.

    Rank r is pipeline device r div dp and data-parallel rank r mod dp, with dp = ranks / pipeline devices. That may be
    another dp than the plan's: a step keeps its packs, each rank runs more or fewer of them. The loss of a step, its
    gradients and its clipping are those of one process that computes every sample alone (see `runtime.loss`).
    Resuming gives the same losses as going on.
    """
    plan, checkpoint = load_plan(settings.plan), newest_checkpoint(settings)
    with process_group(settings.device) as device:
        mesh = device_mesh(len(plan.decisions.stages) // plan.decisions.schedule.num_chunks, device)
        layout = fit_layout(plan, dp=mesh["dp"].size())
        torch.manual_seed(settings.seed)  # the same weights on every rank, where they are drawn
        pipeline = build_pipeline(
            load_model(settings, plan, device),
            layout,
            device=device,
            pp_group=mesh.get_group("pp"),
            dp_group=mesh.get_group("dp"),
        )
        parameters, buffers = dict(pipeline.named_parameters()), buffers_of(pipeline)
        optimizer = make_optimizer(settings, list(parameters.values()))
        sampler = make_sampler(settings, layout, mesh)
        loader = make_loader(settings, pipeline, sampler)
        torch.manual_seed(settings.seed + 1 + dist.get_rank())  # dropout

        start = num_tokens = 0
        if checkpoint is not None:
            loader.load_state_dict(read_progress(checkpoint).loader)
            progress = load_checkpoint(checkpoint, parameters, buffers, optimizer)
            start, num_tokens = progress.step, progress.num_tokens
        num_steps = settings.steps or settings.epochs * len(sampler) // layout.num_microbatches

        recorder = RunRecorder(settings, plan, pipeline, sampler.deal, mesh, start=start)
        batches = chain.from_iterable(repeat(loader))  # epoch after epoch
        records = []
        for step in range(start + 1, num_steps + 1):
            recorder.begin(loader.state_dict())
            microbatches = [next(batches) for _ in range(layout.num_microbatches)]
            recorder.loaded()
            with autocast(settings, device):
                result = pipeline.step(microbatches)
            norm = None if settings.max_grad_norm is None else pipeline.clip_gradients(settings.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(step, num_steps)
            optimizer.step()
            record = recorder.end(
                step,
                result,
                learning_rate=settings.rate(step, num_steps),
                norm=norm,
                num_tokens=sum(batch["input_ids"].numel() for batch in microbatches),
            )
            records.append(record)
            num_tokens += record.num_tokens
            if settings.saves_at(step, num_steps):
                progress = Progress(
                    step=step,
                    loader=loader.state_dict(),
                    num_tokens=num_tokens,
                    optimizer=settings.optimizer,
                    world_size=dist.get_world_size(),
                )
                save_checkpoint(settings.out, parameters, buffers, optimizer, progress, keep=settings.keep)
        if settings.export is not None:
            export_model(settings.export, parameters | buffers, pipeline.stages[0].model.config)
        return records


# -- the parts ------------------------------------------------------------------------------------------------------


def newest_checkpoint(settings: TrainSettings) -> Path | None:
    """The one to go on from; None: from the start."""
    found = list_checkpoints(settings.out)
    if found and not settings.resume:
        raise PlanError(
            f"a run was to begin in {settings.out}, which holds checkpoints of an earlier one, {found[-1].name} the "
            "last: go on from it (--resume), or name another folder (--out)"
        )
    return found[-1] if found else None


def load_model(settings: TrainSettings, plan: Plan, device: torch.device) -> Any:
    """The Hugging Face model on the CPU in float32, towers frozen as the plan says; no code of its folder runs."""
    attention = settings.attention or attention_of(plan, device)
    config = transformers.AutoConfig.from_pretrained(settings.model, local_files_only=True, trust_remote_code=False)
    cls = transformers.AutoModelForImageTextToText
    if settings.random_weights:
        model = cls.from_config(config, attn_implementation=attention, dtype=torch.float32)
    elif not any(settings.model.glob("*.safetensors")):
        raise PlanError(
            f"{settings.model} holds no weights (*.safetensors): name a folder that has them, or train from random "
            "ones (--random-weights)"
        )
    else:
        model = cls.from_pretrained(
            settings.model,
            attn_implementation=attention,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    frozen = plan.inputs.training.frozen_towers
    if frozen:
        for layer in describe(settings.model).layers:
            if layer.tower in frozen:
                model.get_submodule(layer.name).requires_grad_(False)
    return model.train()


def fit_layout(plan: Plan, *, dp: int) -> PipelineLayout:
    """The plan's layout with as many micro-batches as keep its packs per step on `dp` ranks."""
    schedule, planned = plan.decisions.schedule, plan.decisions.parallel.dp
    packs = planned * schedule.num_microbatches
    if packs % dp:
        raise PlanError(
            f"a step of the plan holds {packs} packs, which {dp} data-parallel ranks cannot share evenly: start as "
            f"many processes as give {planned} of them, or another divisor of {packs}"
        )
    own = replace(plan.decisions, schedule=replace(schedule, num_microbatches=packs // dp))
    return read_layout(replace(plan, decisions=own))


def make_optimizer(settings: TrainSettings, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The named optimizer of torch.optim over one group; frozen parameters get no gradient, so it skips them."""
    cls: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, settings.optimizer)
    try:
        return cls(parameters, lr=settings.learning_rate, **settings.optimizer_options)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value}" for key, value in settings.optimizer_options.items()) or "no options"
        raise TrimtabError(
            f"optimizer {settings.optimizer} was asked for with {given}, which it refuses ({error}): give options that "
            "its class in torch.optim takes"
        ) from None


def make_sampler(settings: TrainSettings, layout: PipelineLayout, mesh: DeviceMesh) -> PlanBatchSampler:
    """The packs of this rank's data-parallel rank; every device of a pipeline reads the same ones."""
    return PlanBatchSampler(
        settings.plan if settings.plan.is_dir() else settings.plan.parent,
        dp=mesh["dp"].size(),
        rank=mesh.get_local_rank("dp"),
        num_microbatches=layout.num_microbatches,
    )


def make_loader(settings: TrainSettings, pipeline: Pipeline, sampler: PlanBatchSampler) -> PlanDataLoader:
    """Packs as the keyword arguments of the model's forward."""
    conversations = open_conversations(settings.plan, settings.model, settings.reading)
    data = PlanDataset(conversations, conversations.records.samples, on_error=settings.on_bad_sample)
    config: Any = pipeline.stages[0].model.config
    collator = PackedCollator(
        config,
        attention=config._attn_implementation,
        loss_weighting=settings.loss_weighting,
        vision_in_every_pack=False,  # the pipeline sums gradients itself, so a tower may stay idle on a rank
    )
    return PlanDataLoader(data, sampler, collate_fn=collator, num_workers=settings.workers)


def buffers_of(pipeline: Pipeline) -> dict[str, Tensor]:
    """This rank's persistent buffers, under the model's names."""
    names = {name for name, _ in pipeline.named_parameters()}
    return {name: value for name, value in pipeline.state_dict().items() if name not in names}


def attention_of(plan: Plan, device: torch.device) -> Attention:
    """The plan's, in Transformers' words; sdpa for flash attention that is not installed."""
    planned = plan.inputs.training.attention
    if planned == "flash":
        flash = device.type == "cuda" and transformers.utils.is_flash_attn_2_available()
        return "flash_attention_2" if flash else "sdpa"
    return planned


def autocast(settings: TrainSettings, device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 products over the float32 weights, or nothing."""
    if settings.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
