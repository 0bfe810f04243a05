"""Where a run begins: what all ranks have in common, and the newest checkpoint that is whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from trimtab.errors import PlanError
from trimtab.files import blake2b, lock
from trimtab.options import ReadingOptions
from trimtab.plan.plan import Plan
from trimtab.plan.runs import digest_of
from trimtab.runtime.training.checkpoint import Progress, check_checkpoint, list_checkpoints
from trimtab.runtime.training.ranks import on_first_rank, tell
from trimtab.runtime.training.settings import TrainSettings


def words_of(settings: TrainSettings, plan: Plan) -> dict[str, str]:
    """What has to be the same on every rank; folders may have other names on other machines, and are read instead."""
    config = settings.model / "config.json"
    found = {"plan": digest_of(plan), "config.json": blake2b(config.read_bytes() if config.is_file() else b"")}
    for own in fields(settings):
        value = getattr(settings, own.name)
        if not isinstance(value, (Path, tuple, ReadingOptions)) and own.name != "workers":
            found[own.name] = str(value)
    return found


def find_checkpoint(settings: TrainSettings, device: torch.device) -> tuple[Path, Progress] | None:
    """The newest whole checkpoint to go on from, the same on every rank, None: from the start; collective.

    Refuses an export that would fail or cover something, and a run over one that is there.
    """
    found = on_first_rank(lambda: check_folders(settings), device)
    damage = ""
    for path in reversed(found):
        refuse_unshared(path, device)
        progress = check_checkpoint(path, device)
        if isinstance(progress, Progress):
            if damage:
                tell(
                    f"{damage}: the run goes on from {path.name}, {path.parent / 'run.jsonl'} has its later steps twice"
                )
            return path, progress
        damage += f"{' and ' if damage else ''}{path} is damaged ({progress})"
    if found:
        raise PlanError(f"{damage}, and no whole checkpoint is left: bring back a copy of one, or start again (--out)")
    return None


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
    """Checkpoints to go on from, oldest first; refuses an export that would fail or cover something."""
    export = settings.export
    if export is not None:
        if export.exists() and not (export.is_dir() and not any(export.iterdir())):
            raise PlanError(
                f"the trained model was to be exported to {export}, which is there already: name a new or an empty "
                "folder (--export)"
            )
        export.parent.mkdir(parents=True, exist_ok=True)
    found = list_checkpoints(settings.out)
    if found and not settings.resume:
        raise PlanError(
            f"a run was to begin in {settings.out}, which holds checkpoints of an earlier one, {found[-1].name} the "
            "last: go on from it (--resume), or name another folder (--out)"
        )
    return found


def refuse_unshared(checkpoint: Path, device: torch.device) -> None:
    """Every rank sees the checkpoint that rank 0 found; collective."""
    blind = torch.tensor(int(not checkpoint.is_dir()), device=device)
    dist.all_reduce(blind)
    if blind:
        raise PlanError(
            f"rank 0 goes on from {checkpoint}, which {int(blind)} of {dist.get_world_size()} ranks do not see: give a "
            "folder that all nodes share (--out)"
        )
