"""Where the records of a plan are: in the data files it was made from, or in those behind its saved sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimtab.address import Address, Allowed, place_of
from trimtab.errors import PlanError, SampleError
from trimtab.files import fingerprint_file, is_there
from trimtab.plan.plan import DataFile, Plan
from trimtab.samples.lengths import holds_lengths
from trimtab.samples.sources import MediaRoot, SourceFile, find_sources, state_roots
from trimtab.samples.table import SizedFile, is_saved_table, sized_files


def find_data_files(
    plan: Plan,
    folder: Path,
    given: Sequence[Path] | None = None,
    media_root: MediaRoot = None,
    *,
    allowed: Allowed | None = None,
) -> list[SourceFile]:
    """The files that were sized, in their order: `given`, or those that the plan in `folder` leads to.

    Each says which media folder is stated for it: by `media_root` as FILE=FOLDER, by what was given, or by the plan.

    A plan made from tables that `trimtab size` saved leads through them to the files that were sized. An address that
    the plan names is opened only if that is `allowed`. Raises `SampleError` where a file is missing or holds no
    records, and `PlanError` where it is not the one that was sized.
    """
    allowed = allowed or Allowed()
    # 1. path and fingerprint of every file that was sized; unknown behind a table that is gone or does not say it
    sized: list[SizedFile] | None = []
    for file in plan.inputs.data.files:
        found = _behind(file, folder, allowed) if is_saved_table(place_of(file.path)) else [_sized(file)]
        sized = None if found is None or sized is None else [*sized, *found]
    # 2. where they are
    if given is None:
        known = sized if sized is not None else list(map(_sized, plan.inputs.data.files))
        sources = [_source(file, folder, allowed) for file in known]
        sources = state_roots(sources, media_root)
    else:
        sources = find_sources(given, media_root, allowed)
    files = [source.file for source in sources]
    refuse_absent(files)
    if given is not None:
        refuse_no_records(files)
    # 3. whether they are what was sized
    if sized is not None:
        if len(sized) != len(files):
            named = ", ".join(file.path for file in sized)
            raise PlanError(
                f"{len(files)} data files were named, and the plan was sized from {len(sized)} ({named}): name those, "
                "in the same order (--data)"
            )
        for place, told in zip(files, sized, strict=True):
            if fingerprint_file(place) != told.blake2b:
                raise PlanError(
                    f"{place} is not what {told.path} was when it was sized: name that file (--data), or size and plan "
                    "again"
                )
    refuse_no_records(files)  # only now: what a plan leads to is not parsed before it is known to be what was sized
    return sources


def refuse_absent(files: Sequence[Path]) -> None:
    """Raises `SampleError` where a file is missing."""
    gone = [str(file) for file in files if not is_there(file)]
    if gone or not files:
        raise SampleError(
            f"the records of the plan were looked for in {', '.join(gone) or 'no file'}, which is not there: name the "
            "data files that were sized, in the same order (--data)"
        )


def refuse_no_records(files: Sequence[Path]) -> None:
    """Raises `SampleError` where a file is missing, or holds sizes and no records."""
    refuse_absent(files)
    bare = [str(file) for file in files if holds_lengths(file)]
    if bare:
        raise SampleError(
            f"{', '.join(bare)} holds sizes and no records: name the data files that were sized, in the same order "
            "(--data)"
        )


def _place(path: str, folder: Path, allowed: Allowed) -> Path:
    """A file as the plan names it: from the working folder, or else from the plan's; or an address, if allowed."""
    place = place_of(path)
    if isinstance(place, Address):
        if not allowed.remote:
            raise SampleError(
                f"the plan in {folder} names the address {path}, and no file may make us connect: name the data "
                "yourself (--data), or give --allow-remote if you trust the plan"
            )
        return place
    return place if is_there(place) else folder / path


def _source(file: SizedFile, folder: Path, allowed: Allowed) -> SourceFile:
    place = _place(file.path, folder, allowed)
    root = None if file.media_root is None else place_of(file.media_root)
    if isinstance(root, Address):
        _place(str(root), folder, allowed)
    return SourceFile(file=place, named=place, media_root=root)


def _sized(file: DataFile) -> SizedFile:
    return SizedFile(path=file.path, blake2b=file.blake2b, media_root=file.media_root)


def _behind(file: DataFile, folder: Path, allowed: Allowed) -> list[SizedFile] | None:
    """The files behind a saved table of the plan; None where that cannot be told."""
    place = _place(file.path, folder, allowed)
    return (list(sized_files(place)) or None) if place.is_file() else None
