"""What a run measures: `run.jsonl` and a line a step on stderr, both by rank 0."""

from __future__ import annotations

import platform
import resource
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh

import trimtab
from trimtab.plan.plan import Plan
from trimtab.plan.runs import RunHeader, StepRecord, digest_of, line_of
from trimtab.runtime.pipeline.pipeline import Pipeline, StepResult
from trimtab.runtime.training.settings import TrainSettings


class RunRecorder:
    """Clock, counters and log of one process's part of a run; `end` is a collective call."""

    def __init__(
        self, settings: TrainSettings, plan: Plan, pipeline: Pipeline, mesh: DeviceMesh, *, start: int
    ) -> None:
        self._mesh, self._pipeline, self._planned_s = mesh, pipeline, plan.estimates.step_ms / 1e3
        self._log = settings.out / "run.jsonl" if dist.get_rank() == 0 else None
        self._fillers = 0  # up to the last step
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            if not start:
                _put_aside(self._log)
            elif self._log.exists() and not self._log.read_bytes().endswith(b"\n"):
                self._write("\n")  # ends a line that a kill has cut
            self._write(line_of(_header(settings, plan, pipeline, mesh)))

    def begin(self, place: dict[str, str | int]) -> None:
        """A step begins at this place of the loader, with its data loading."""
        self._place = place
        self._began = time.perf_counter()

    def loaded(self) -> None:
        self._loaded = time.perf_counter()

    def end(
        self,
        step: int,
        result: StepResult,
        *,
        learning_rate: float,
        norm: torch.Tensor,
        num_tokens: int,
        num_fillers: int,
    ) -> StepRecord:
        """Return the record of the step, the same on every rank but for the patches, which rank 0 knows.

        `num_fillers`: all that this rank has made so far. Loader workers make samples ahead of their step.
        """
        device, images = self._pipeline.device, self._pipeline.image_load
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        own = torch.zeros(self._mesh["pp"].size() + 2, dtype=torch.float64, device=device)
        own[self._mesh.get_local_rank("pp")] = _peak_memory_bytes(device)
        own[-2:] = torch.tensor([time.perf_counter() - self._began, self._loaded - self._began])
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        *peaks, step_s, data_s = own.tolist()
        counts = torch.tensor([num_tokens, num_fillers - self._fillers], device=device)
        dist.all_reduce(counts, group=self._mesh.get_group("dp"))
        self._fillers = num_fillers
        record = StepRecord(
            step=step,
            epoch=int(self._place["epoch"]),
            loss=float(result.loss),
            learning_rate=learning_rate,
            grad_norm=float(norm),
            num_tokens=int(counts[0]),
            step_s=step_s,
            data_s=data_s,
            peak_memory_bytes=tuple(int(x) for x in peaks),
            num_fillers=int(counts[1]),
            patches_held=() if images is None else images.held,
            patches_encoded=() if images is None else images.encoded,
        )
        if self._log is not None:
            self._write(line_of(record))
            fillers = f"  {record.num_fillers} fillers" if record.num_fillers else ""
            print(
                f"step {step}  loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tokens/s  "
                f"{step_s:.3g} s (planned {self._planned_s:.3g})  {max(peaks) / 2**30:.2f} GiB"
                f"{_patches(record)}{fillers}",
                file=sys.stderr,
                flush=True,
            )
        return record

    def _write(self, line: str) -> None:
        assert self._log is not None, "only rank 0 writes"
        with self._log.open("a", encoding="utf-8") as file:
            file.write(line)


def _patches(record: StepRecord) -> str:
    """Of the fullest data-parallel rank, as it was and as it would be alone."""
    if not record.patches_encoded:
        return ""
    return f"  {max(record.patches_encoded):,} patches on the fullest rank (alone {max(record.patches_held):,})"


def _put_aside(log: Path) -> None:
    """The log of an earlier run that left no checkpoint keeps its lines under another name."""
    if log.is_file() and log.stat().st_size:
        names = (log.with_name(f"{log.stem}.{number}{log.suffix}") for number in count(1))
        kept = next(name for name in names if not name.exists())
        log.rename(kept)
        print(f"trimtab: the log of an earlier run in {log.parent} is now {kept.name}", file=sys.stderr)


def _header(settings: TrainSettings, plan: Plan, pipeline: Pipeline, mesh: DeviceMesh) -> RunHeader:
    device, layout = pipeline.device, pipeline.layout
    config: Any = pipeline.stages[0].model.config
    # of a stage's whole device, by counted bytes: what torch's allocator says is allocated
    gib = {stage.stage: stage.memory_gib - stage.reserve_gib for stage in plan.estimates.stages}
    first = [layout.stages_of(d)[0] for d in range(layout.num_devices)]
    return RunHeader(
        plan=digest_of(plan),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        planned_device=plan.inputs.cluster.device,
        dp=mesh["dp"].size(),
        pp=mesh["pp"].size(),
        schedule=layout.schedule,
        num_microbatches=layout.num_microbatches,
        dtype=settings.dtype_on(device.type),
        attention=config._attn_implementation,
        optimizer=settings.optimizer,
        vision_dp="off" if layout.images is None else layout.images.exchange,
        planned_step_s=plan.estimates.step_ms / 1e3,
        planned_memory_bytes=tuple(int(gib.get(stage, 0.0) * 2**30) for stage in first),
        versions=", ".join(f"{module.__name__} {module.__version__}" for module in (trimtab, torch, transformers)),
    )


def _peak_memory_bytes(device: torch.device) -> int:
    """Most bytes torch's allocator held on the device; on a CPU the process's own peak, all it loaded included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
