"""Checkpoints of a training run: safetensors through torch.distributed.checkpoint, and a small JSON file of progress.

A folder `step-00000100` holds one safetensors file a rank and `progress.json`; nothing in it is pickled. Names are
those of the Hugging Face model, of a tied weight the first one, so another split of the model, or another number of
data-parallel ranks, finds its own part. A folder is written next to its name and renamed when it is whole: a killed run
leaves no half checkpoint.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh

import trimtab
from trimtab.errors import PlanError, shorten
from trimtab.files import blake2b, lock, write_atomically
from trimtab.options import ReadingOptions
from trimtab.plan.plan import Plan
from trimtab.plan.runs import RunHeader, StepRecord, digest_of, line_of
from trimtab.runtime.data.collate import loaded_attention
from trimtab.runtime.pipeline.pipeline import Pipeline, StepResult
from trimtab.runtime.ranks import on_first_rank
from trimtab.runtime.training.settings import TrainSettings
from trimtab.typed_json import parse_json

_FOLDER = re.compile(r"step-(\d{8})")
_PROGRESS = "progress.json"
_TEXT_FILES = {".json", ".jinja", ".txt", ".model"}  # of tokenizer, processor and chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands, apart from its tensors."""

    step: int  # optimizer steps done
    loader: dict[str, str | int]  # `PlanDataLoader.state_dict`
    optimizer: str
    num_states: int | None = None  # tensors of the optimizer, of all ranks; None: an older checkpoint


def save_checkpoint(
    folder: Path,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    keep: int | None = None,
) -> Path:
    """Write `folder`/step-N; collective. `keep`: so many checkpoints stay, the oldest go (None: all stay)."""
    path = folder / f"step-{progress.step:08d}"
    content = {f"model/{name}": value.detach() for name, value in (*parameters.items(), *buffers.items())}
    states = _optimizer_tensors(parameters, optimizer)
    progress = replace(progress, num_states=_num_names(states))
    content |= states
    content[f"random/{dist.get_rank()}"] = torch.get_rng_state()
    if torch.cuda.is_available():
        content[f"random_cuda/{dist.get_rank()}"] = torch.cuda.get_rng_state()
    with _written_aside(path) as writing:
        _save(content, HuggingFaceStorageWriter(str(writing), save_distributed=True))
        dist.barrier()
        if dist.get_rank() == 0:
            write_atomically(writing / _PROGRESS, json.dumps(asdict(progress), indent=1).encode())
            shutil.rmtree(path, ignore_errors=True)
    if dist.get_rank() == 0 and keep is not None:
        for old in list_checkpoints(folder)[: -keep if keep else None]:
            shutil.rmtree(old)
    dist.barrier()
    return path


def _num_names(tensors: Mapping[str, Tensor]) -> int:
    """Return the names that any rank holds; collective."""
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, list(tensors))
    return len({name for names in found for name in names})


def _save(content: dict[str, Tensor], writer: HuggingFaceStorageWriter) -> None:
    """Save; collective. What a disk refused any rank is raised on all, without what torch has wrapped it in."""
    try:
        save(content, storage_writer=writer)
    except CheckpointException as error:
        for problem, _ in error.failures.values():
            if isinstance(problem, OSError):
                raise problem from None
        raise


@contextmanager
def _written_aside(path: Path) -> Iterator[Path]:
    """Give a folder next to `path` to write into, which becomes it when all ranks are through; collective."""
    writing = path.with_name(f".{path.name}.writing")
    if dist.get_rank() == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    dist.barrier()
    try:
        yield writing
    except BaseException as error:
        if dist.get_rank() == 0:  # a full disk gets its room back
            shutil.rmtree(writing, ignore_errors=True)
        if isinstance(error, OSError) and error.errno and str(error.filename or writing).startswith(str(writing)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    if dist.get_rank() == 0:
        os.replace(writing, path)  # noqa: PTH105 (a folder over nothing or an empty one: atomic)
    dist.barrier()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir())


def _read_progress(path: Path) -> Progress:
    try:
        found = Progress(**parse_json((path / _PROGRESS).read_bytes()))
        kinds = ((found.step, int), (found.loader, dict), (found.optimizer, str))
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise TypeError("step, loader or optimizer is of another type")
        return found
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(
            f"{path / _PROGRESS} cannot be read ({shorten(str(error), 100)}): remove the checkpoint"
        ) from error


def load_checkpoint(
    path: Path,
    progress: Progress,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Take this rank's tensors out of a checkpoint, whatever split wrote it; collective.

    Random states are those of the same rank, and are left alone where the run had fewer ranks.
    """
    if progress.optimizer != type(optimizer).__name__:
        raise PlanError(f"{path} has optimizer {progress.optimizer}, not {type(optimizer).__name__}: take the same")
    metadata: dict[str, Any] = dict(HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata)
    target: dict[str, Tensor] = {
        f"model/{name}": value.detach() for name, value in (*parameters.items(), *buffers.items())
    }
    lacking = sorted(name for name in target if name not in metadata)
    if lacking:
        raise PlanError(f"{path} lacks {len(lacking)} tensors, {lacking[0]} first: give the run's model")
    wrong = [name for name, value in target.items() if tuple(metadata[name].size) != tuple(value.shape)]
    if wrong:
        raise PlanError(f"{path} holds {wrong[0]} of another shape: resume with the model of the run")
    num_states = sum(name.startswith("optimizer/") for name in metadata)
    if progress.num_states not in (None, num_states):
        raise PlanError(f"{path} has {num_states} of {progress.num_states} optimizer states: remove the checkpoint")
    prefixes = tuple(f"optimizer/{name}/" for name in parameters)
    mine = [name for name in metadata if name.startswith(prefixes)]
    own = (f"random/{dist.get_rank()}", f"random_cuda/{dist.get_rank()}")
    for name in (*mine, *(name for name in own if name in metadata)):
        target[name] = torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
    load(target, storage_reader=HuggingFaceStorageReader(str(path)))
    _restore_optimizer(parameters, optimizer, {name: target[name] for name in mine})
    if own[0] in target:
        torch.set_rng_state(target[own[0]])
    if own[1] in target and torch.cuda.is_available():
        torch.cuda.set_rng_state(target[own[1]])


def export_model(folder: Path, tensors: Mapping[str, Tensor], config: Any, *, like: Path | None = None) -> None:
    """The whole model as Transformers loads it: config.json and one model.safetensors; collective.

    Written next to its name and renamed when it is whole; `folder` is new or empty. Tokenizer, preprocessor and chat
    template of the folder `like` are copied into it, so that it can be served.
    """
    with _written_aside(folder) as writing:
        writer = HuggingFaceStorageWriter(str(writing), save_distributed=True, enable_consolidation=True)
        _save({name: value.detach() for name, value in tensors.items()}, writer)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(writing / "sharded", ignore_errors=True)
            for file in () if like is None else sorted(like.iterdir()):
                if file.suffix in _TEXT_FILES and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, writing / file.name)
            config.save_pretrained(writing)


def _optimizer_tensors(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state by parameter name and key."""
    found = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer/{name}/{key}"] = value
            elif value is not None:
                raise PlanError(f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}: use one of tensors")
    return found


def _restore_optimizer(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for full, value in tensors.items():
        _, name, key = full.split("/")
        state.setdefault(numbers[id(parameters[name])], {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


# Where a run begins: what all ranks have in common, and the newest checkpoint.


def words_of(settings: TrainSettings, plan: Plan) -> dict[str, str]:
    """Return what has to be the same on every rank; folders may be named otherwise elsewhere, and are read instead."""
    config = settings.model / "config.json"
    found = {"plan": digest_of(plan), "config.json": blake2b(config.read_bytes() if config.is_file() else b"")}
    for own in fields(settings):
        value = getattr(settings, own.name)
        if not isinstance(value, (Path, tuple, ReadingOptions)) and own.name != "workers":
            found[own.name] = str(value)
    return found


def find_checkpoint(settings: TrainSettings, device: torch.device) -> tuple[Path, Progress] | None:
    """Return the newest checkpoint to go on from, the same on every rank, None: from the start; collective.

    Refuses an export that would fail or cover something, and a run over one that is there.
    """
    found = on_first_rank(lambda: check_folders(settings), device)
    if not found:
        return None
    refuse_unshared(found[-1], device)
    return found[-1], on_first_rank(lambda: _read_progress(found[-1]), device)


@contextmanager
def held_folder(folder: Path, device: torch.device) -> Iterator[None]:
    """Keep other runs out of `folder`: rank 0 holds a lock, which ends with its process; collective."""
    path, held = folder / ".lock", list[BinaryIO]()

    def hold() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
        if not lock(file) and sys.platform != "win32":
            file.close()
            raise PlanError(f"another run is in {folder}: wait for its end, or name another folder (--out)")
        held.append(file)

    try:
        on_first_rank(hold, device)
        yield
    finally:
        for file in held:
            path.unlink(missing_ok=True)
            file.close()


def check_folders(settings: TrainSettings) -> list[Path]:
    """Return the checkpoints to go on from, oldest first; refuses an export that would fail or cover something."""
    export = settings.export
    if export is not None:
        if export.exists() and not (export.is_dir() and not any(export.iterdir())):
            raise PlanError(f"{export} is there already: name a new or an empty folder (--export)")
        export.parent.mkdir(parents=True, exist_ok=True)
    found = list_checkpoints(settings.out)
    if found and not settings.resume:
        raise PlanError(f"{settings.out} holds {found[-1].name}: give --resume, or another --out")
    return found


def refuse_unshared(checkpoint: Path, device: torch.device) -> None:
    """Refuse where a rank does not see the checkpoint that rank 0 found; collective."""
    blind = torch.tensor(int(not checkpoint.is_dir()), device=device)
    dist.all_reduce(blind)
    if blind:
        raise PlanError(
            f"{int(blind)} of {dist.get_world_size()} ranks do not see {checkpoint}: share the folder (--out)"
        )


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
        """Begin a step at this place of the loader, with its data loading."""
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
    """Write the patches of the fullest rank that shares images, as they were and as they would be alone."""
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
    device, layout, images = pipeline.device, pipeline.layout, pipeline.layout.images
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
        attention=loaded_attention(config),
        optimizer=settings.optimizer,
        vision_dp="off" if images is None else images.group if layout.has_tower_everywhere else images.exchange,
        planned_step_s=plan.estimates.step_ms / 1e3,
        planned_memory_bytes=tuple(int(gib.get(stage, 0.0) * 2**30) for stage in first),
        versions=", ".join(f"{module.__name__} {module.__version__}" for module in (trimtab, torch, transformers)),
    )


def _peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes of torch's allocator; on a CPU the process's own peak, all it loaded included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
