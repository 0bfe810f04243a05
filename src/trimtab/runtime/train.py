"""The loop behind `trimtab train`: a plan's packs through a plan's stages, on torch's own parts; read `train`."""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import trimtab
from trimtab.errors import PlanError, TrimtabError, join_problems
from trimtab.models.describe import describe
from trimtab.plan.file import load_plan
from trimtab.plan.plan import Plan
from trimtab.plan.run_log import RunHeader, StepRecord, line_of
from trimtab.runtime.checkpoint import (
    Progress,
    export_model,
    list_checkpoints,
    load_checkpoint,
    read_progress,
    save_checkpoint,
)
from trimtab.runtime.collate import Attention, LossWeighting, PackedCollator
from trimtab.runtime.conversations import ReadingOptions, open_conversations
from trimtab.runtime.data import PlanBatchSampler, PlanDataLoader, PlanDataset
from trimtab.runtime.pipeline import Pipeline, PipelineLayout, build_pipeline, read_layout

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What a plan does not say about a run."""

    plan: Path
    model: Path  # folder with config.json, preprocessor, tokenizer, and weights as safetensors
    out: Path  # log and checkpoints
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    steps: int | None = None  # optimizer steps in all; None: `epochs` of the plan
    epochs: int = 1
    optimizer: str = "AdamW"  # a class of torch.optim
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    decay: Decay = "constant"
    max_grad_norm: float | None = 1.0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # bfloat16: autocast over float32 weights
    attention: Attention | None = None  # None: the plan's, or sdpa where flash attention is not at hand
    loss_weighting: LossWeighting = "token"
    random_weights: bool = False
    device: Literal["cpu", "cuda"] | None = None  # None: cuda where there is one
    save_every: int | None = None  # steps; None: only at the end
    keep: int | None = 2  # checkpoints
    resume: bool = False  # from the newest checkpoint in `out`, if there is one
    export: Path | None = None  # folder for the trained model, as Transformers loads it
    on_bad_sample: Literal["raise", "filler"] = "raise"
    workers: int = 0  # processes that make samples, of each rank
    seed: int = 0

    def __post_init__(self) -> None:
        problems = _problems_of(self)
        if problems:
            raise TrimtabError(join_problems(problems))


def train(settings: TrainSettings) -> list[StepRecord]:
    """Train as `settings.plan` says, on the ranks torchrun started; one process runs alone. The steps of this call.

    Rank r is pipeline device r div dp and data-parallel rank r mod dp, with dp = ranks / pipeline devices. That may be
    another dp than the plan's: a step keeps its packs, each rank runs more or fewer of them. The loss of a step, its
    gradients and its clipping are those of one process that computes every sample alone (see `runtime.loss`).
    Resuming gives the same losses as going on.
    """
    plan = load_plan(settings.plan)
    with _process_group(settings) as device:
        mesh = _mesh(len(plan.decisions.stages) // plan.decisions.schedule.num_chunks, device)
        layout = fit_layout(plan, dp=mesh["dp"].size())
        torch.manual_seed(settings.seed)  # the same weights on every rank, where they are drawn
        model = load_model(settings, plan, device)
        pipeline = build_pipeline(
            model, layout, device=device, pp_group=mesh.get_group("pp"), dp_group=mesh.get_group("dp")
        )
        del model
        parameters = dict(pipeline.named_parameters())
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        optimizer = make_optimizer(settings, list(trained.values()))
        loader = make_loader(settings, pipeline, mesh)
        torch.manual_seed(settings.seed + 1 + dist.get_rank())  # dropout

        start = 0
        checkpoints = list_checkpoints(settings.out)
        if settings.resume and checkpoints:
            loader.load_state_dict(read_progress(checkpoints[-1]).loader)
            progress = load_checkpoint(checkpoints[-1], parameters, buffers_of(pipeline), optimizer)
            start, num_tokens = progress.step, progress.num_tokens
        else:
            num_tokens = 0
        log = _Log(settings, plan, pipeline, mesh, device, resumed=start)
        num_steps = settings.steps if settings.steps is not None else settings.epochs * _steps_per_epoch(loader, layout)
        batches = _endless(loader)
        records = []
        for step in range(start + 1, num_steps + 1):
            started, epoch = time.perf_counter(), loader.epoch
            microbatches = [next(batches) for _ in range(layout.num_microbatches)]
            loaded = time.perf_counter()
            rate = settings.learning_rate * rate_factor(step, num_steps, settings.warmup_steps, settings.decay)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with _autocast(settings, device):
                result = pipeline.step(microbatches)
            norm = None if settings.max_grad_norm is None else pipeline.clip_gradients(settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record = log.step(
                step=step,
                epoch=epoch,
                loss=result.loss,
                learning_rate=rate,
                norm=norm,
                num_tokens=sum(batch["input_ids"].numel() for batch in microbatches),
                times=(started, loaded),
            )
            records.append(record)
            num_tokens += record.num_tokens
            if step == num_steps or (settings.save_every and step % settings.save_every == 0):
                progress = Progress(
                    step=step,
                    loader=loader.state_dict(),
                    num_tokens=num_tokens,
                    optimizer=settings.optimizer,
                    world_size=dist.get_world_size(),
                )
                save_checkpoint(settings.out, parameters, buffers_of(pipeline), optimizer, progress, keep=settings.keep)
        if settings.export is not None:
            export_model(settings.export, parameters | buffers_of(pipeline), pipeline.stages[0].model.config)
        return records


# -- the parts ------------------------------------------------------------------------------------------------------


def load_model(settings: TrainSettings, plan: Plan, device: torch.device) -> Any:
    """The Hugging Face model on the CPU in float32, towers frozen as the plan says; no code of its folder runs."""
    attention = settings.attention or _attention_of(plan, device)
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
    """The named optimizer of torch.optim over one group."""
    cls: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, settings.optimizer)
    try:
        return cls(parameters, lr=settings.learning_rate, **settings.optimizer_options)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value}" for key, value in settings.optimizer_options.items()) or "no options"
        raise TrimtabError(
            f"optimizer {settings.optimizer} was asked for with {given}, which it refuses ({error}): give options that "
            "its class in torch.optim takes"
        ) from None


def make_loader(settings: TrainSettings, pipeline: Pipeline, mesh: DeviceMesh) -> PlanDataLoader:
    """The packs of this rank's data-parallel rank; every device of a pipeline reads the same ones."""
    conversations = open_conversations(settings.plan, settings.model, settings.reading)
    data = PlanDataset(conversations, conversations.records.samples, on_error=settings.on_bad_sample)
    sampler = PlanBatchSampler(
        settings.plan if settings.plan.is_dir() else settings.plan.parent,
        dp=mesh["dp"].size(),
        rank=mesh.get_local_rank("dp"),
        num_microbatches=pipeline.layout.num_microbatches,
    )
    model = pipeline.stages[0].model
    collator = PackedCollator(
        model.config,
        attention=model.config._attn_implementation,
        loss_weighting=settings.loss_weighting,
        vision_in_every_pack=False,  # the pipeline sums gradients itself, so a tower may stay idle on a rank
    )
    return PlanDataLoader(data, sampler, collate_fn=collator, num_workers=settings.workers)


def buffers_of(pipeline: Pipeline) -> dict[str, Tensor]:
    """This rank's persistent buffers, under the model's names."""
    names = {name for name, _ in pipeline.named_parameters()}
    return {name: value for name, value in pipeline.state_dict().items() if name not in names}


def rate_factor(step: int, num_steps: int, warmup_steps: int, decay: Decay) -> float:
    """Learning rate of `step` (from 1) over the peak: linear up to step `warmup_steps`, then as `decay` says, to 0."""
    if step <= warmup_steps:
        return step / warmup_steps
    share = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    if decay == "linear":
        return 1 - share + 1 / max(num_steps - warmup_steps, 1)
    if decay == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (share - 1 / max(num_steps - warmup_steps, 1))))
    return 1.0


# -- ranks and devices ----------------------------------------------------------------------------------------------


class _process_group(AbstractContextManager[torch.device]):  # noqa: N801 (used as a function)
    """torchrun's process group, or one of this process alone; taken down at the end."""

    def __init__(self, settings: TrainSettings) -> None:
        self.kind = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def __enter__(self) -> torch.device:
        if self.kind == "cuda" and not torch.cuda.is_available():
            raise TrimtabError("device cuda was asked for, but torch sees none here: ask for cpu")
        self.ours = not dist.is_initialized()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device(self.kind, local) if self.kind == "cuda" else torch.device("cpu")
        if self.kind == "cuda":
            torch.cuda.set_device(device)
        if self.ours:
            backend = "nccl" if self.kind == "cuda" else "gloo"
            if "RANK" in os.environ:
                dist.init_process_group(backend)
            else:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return device

    def __exit__(self, *_: object) -> None:
        if self.ours:
            dist.destroy_process_group()


def _mesh(num_devices: int, device: torch.device) -> DeviceMesh:
    ranks = dist.get_world_size()
    if ranks % num_devices:
        raise PlanError(
            f"the plan cuts the model into stages for {num_devices} devices, and {ranks} processes were started: start "
            f"{num_devices}, or a multiple of it (torchrun --nproc-per-node {num_devices})"
        )
    return init_device_mesh(device.type, (num_devices, ranks // num_devices), mesh_dim_names=("pp", "dp"))


def _attention_of(plan: Plan, device: torch.device) -> Attention:
    """The plan's, in Transformers' words."""
    planned = plan.inputs.training.attention
    if planned == "flash":
        flash = device.type == "cuda" and transformers.utils.is_flash_attn_2_available()
        return "flash_attention_2" if flash else "sdpa"
    return planned


def _autocast(settings: TrainSettings, device: torch.device) -> AbstractContextManager[Any]:
    if settings.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _endless(loader: PlanDataLoader) -> Iterator[dict[str, Any]]:
    while True:
        yield from loader


def _steps_per_epoch(loader: PlanDataLoader, layout: PipelineLayout) -> int:
    return len(loader.batch_sampler) // layout.num_microbatches  # type: ignore[arg-type]


# -- the log --------------------------------------------------------------------------------------------------------


class _Log:
    """`run.jsonl` and a line a step on stderr, both by rank 0."""

    def __init__(
        self,
        settings: TrainSettings,
        plan: Plan,
        pipeline: Pipeline,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        resumed: int,
    ) -> None:
        self._mesh, self._device = mesh, device
        self._planned_s = plan.estimates.step_ms / 1e3
        self._path = settings.out / "run.jsonl" if dist.get_rank() == 0 else None
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not resumed:
            self._path.unlink(missing_ok=True)
        per_stage = {stage.stage: stage.memory_gib for stage in plan.estimates.stages}
        on_device = [
            sum(per_stage.get(s, 0.0) for s in pipeline.layout.stages_of(d)) for d in range(pipeline.layout.num_devices)
        ]
        header = RunHeader(
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
            planned_device=plan.inputs.cluster.device,
            dp=mesh["dp"].size(),
            pp=mesh["pp"].size(),
            schedule=pipeline.layout.schedule,
            num_microbatches=pipeline.layout.num_microbatches,
            dtype=settings.dtype,
            attention=pipeline.stages[0].model.config._attn_implementation,
            optimizer=settings.optimizer,
            planned_step_s=self._planned_s,
            planned_memory_bytes=tuple(int(gib * 2**30) for gib in on_device),
            versions=", ".join(f"{module.__name__} {module.__version__}" for module in (trimtab, torch, transformers)),
        )
        self._write(line_of(header))

    def step(
        self,
        *,
        step: int,
        epoch: int,
        loss: Tensor,
        learning_rate: float,
        norm: Tensor | None,
        num_tokens: int,
        times: tuple[float, float],
    ) -> StepRecord:
        """Measured on all ranks: a collective call."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        started, loaded = times
        mine = torch.zeros(self._mesh["pp"].size() + 2, dtype=torch.float64, device=self._device)
        mine[self._mesh.get_local_rank("pp")] = _peak_memory_bytes(self._device)
        mine[-2:] = torch.tensor([time.perf_counter() - started, loaded - started])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        tokens = torch.tensor(num_tokens, device=self._device)
        dist.all_reduce(tokens, group=self._mesh.get_group("dp"))
        record = StepRecord(
            step=step,
            epoch=epoch,
            loss=float(loss),
            learning_rate=learning_rate,
            grad_norm=None if norm is None else float(norm),
            num_tokens=int(tokens),
            step_s=float(mine[-2]),
            data_s=float(mine[-1]),
            peak_memory_bytes=tuple(int(x) for x in mine[:-2].tolist()),
        )
        if self._path is not None:
            self._write(line_of(record))
            planned = f"(planned {self._planned_s:.3g})"
            peak = max(record.peak_memory_bytes) / 2**30
            print(
                f"step {step}  loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tokens/s  "
                f"{record.step_s:.3g} s a step {planned}  {peak:.2f} GiB",
                file=sys.stderr,
                flush=True,
            )
        return record

    def _write(self, line: str) -> None:
        assert self._path is not None, "rank 0 alone writes"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)


def _peak_memory_bytes(device: torch.device) -> int:
    """Most bytes torch's allocator held on the device; on a CPU the process's own peak, all it loaded included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _problems_of(settings: TrainSettings) -> list[str]:
    problems = []
    cls = getattr(torch.optim, settings.optimizer, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
        problems.append(f"optimizer {settings.optimizer!r} is no class of torch.optim: name one, as in AdamW")
    for name in ("steps", "epochs", "save_every", "keep"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            problems.append(f"{name} {value} was asked for: give 1 or more")
    if not settings.learning_rate > 0 or not math.isfinite(settings.learning_rate):
        problems.append(f"learning_rate {settings.learning_rate} was asked for: give a number above 0")
    if settings.warmup_steps < 0:
        problems.append(f"warmup_steps {settings.warmup_steps} was asked for: give 0 or more")
    if settings.max_grad_norm is not None and not settings.max_grad_norm > 0:
        problems.append(f"max_grad_norm {settings.max_grad_norm} was asked for: give a number above 0, or none")
    if settings.optimizer in ("LBFGS", "SparseAdam"):
        problems.append(
            f"optimizer {settings.optimizer} was asked for, which needs closures or sparse gradients: choose another"
        )
    return problems
