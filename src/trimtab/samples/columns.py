"""Files of columns by pyarrow: Parquet, Arrow's two IPC forms, and Lance by its own package.

Every batch is validated in full before a value of it is read: offsets and lengths in a file are a stranger's numbers,
and pyarrow follows them anywhere in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trimtab.address import Address
from trimtab.errors import SampleError
from trimtab.samples.chunks import Groups
from trimtab.samples.problems import shorten

_BATCH_ROWS = 512  # made into records at once
_BATCH_BYTES = 32 << 20  # of rows that are larger
_BATCH_ROWS_LANCE = 128
_ARROW_FILE = b"ARROW1"


def open_parquet(path: Path) -> Any:
    """pyarrow's ParquetFile."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path.open("rb") if isinstance(path, Address) else path)
        _ = file.schema_arrow.names  # not every one is text
    except (OSError, ValueError, SystemError, pyarrow.ArrowException) as error:
        raise unreadable(path, "Parquet", error) from None
    return file


def parquet_groups(path: Path) -> Groups:
    """Row groups."""
    import pyarrow

    file = open_parquet(path)

    def records(groups: range, columns: Sequence[str]) -> Iterator[Any]:
        sizes = [file.metadata.row_group(group) for group in groups]
        rows, num_bytes = sum(x.num_rows for x in sizes), sum(x.total_byte_size for x in sizes)
        batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(1, num_bytes)))
        how = {"row_groups": groups, "columns": columns, "batch_size": batch_rows, "use_threads": False}
        yield from _records_of(file.iter_batches(**how))

    def open_group(group: int) -> Callable[[int], Any]:
        try:
            return _rows_of(file.read_row_group(group, use_threads=False))
        except (OSError, ValueError, SystemError, pyarrow.ArrowException) as error:
            raise unreadable(path, "Parquet", error) from None

    return Groups(
        names=file.schema_arrow.names,
        counts=[file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)],
        records=records,
        open_group=open_group,
    )


def arrow_groups(path: Path) -> Groups:
    """Record batches of an IPC stream (as `datasets` saves them) or an IPC file; a local file is mapped."""
    import pyarrow

    try:
        source = path.open("rb") if isinstance(path, Address) else pyarrow.memory_map(str(path))
        is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)] if is_file else list(reader)
        names = reader.schema.names
    except (OSError, ValueError, SystemError, pyarrow.ArrowException) as error:
        raise unreadable(path, "an Arrow stream or file", error) from None

    def records(groups: range, columns: Sequence[str]) -> Iterator[Any]:
        for group in groups:
            batch = batches[group].select(columns)
            yield from _records_of(batch.slice(at, _BATCH_ROWS) for at in range(0, batch.num_rows, _BATCH_ROWS))

    def open_group(group: int) -> Callable[[int], Any]:
        try:
            return _rows_of(batches[group])
        except (ValueError, SystemError, pyarrow.ArrowException) as error:
            raise unreadable(path, "an Arrow stream or file", error) from None

    return Groups(
        names=names,
        counts=[batch.num_rows for batch in batches],
        records=records,
        open_group=open_group,
    )


def lance_groups(path: Path) -> Groups:
    """Fragments of one version of a Lance data set, which its manifest names."""
    try:
        import lance
    except ModuleNotFoundError:
        raise SampleError(
            f"{path.parent.parent} is a Lance data set, and Lance is not installed: pip install pylance"
        ) from None
    try:
        number = int(path.stem)
        version = 2**64 - 1 - number if len(path.stem) == 20 else number  # newer manifests count down
        data = lance.dataset(str(path.parent.parent), version=version)
        fragments = data.get_fragments()
        counts = [fragment.count_rows() for fragment in fragments]
    except (OSError, ValueError) as error:
        raise unreadable(path.parent.parent, "a Lance data set", error) from None

    def records(groups: range, columns: Sequence[str]) -> Iterator[Any]:
        for group in groups:
            how = {"columns": list(columns), "batch_size": _BATCH_ROWS_LANCE}
            yield from _records_of(fragments[group].to_batches(**how))

    def open_group(group: int) -> Callable[[int], Any]:
        return lambda row: fragments[group].take([row]).to_pylist()[0]

    return Groups(names=data.schema.names, counts=counts, records=records, open_group=open_group)


def _records_of(batches: Iterable[Any]) -> Iterator[Any]:
    """Rows as dicts; what pyarrow raises is a `ValueError` or an `OSError`."""
    import pyarrow

    try:
        for batch in batches:
            batch.validate(full=True)
            yield from batch.to_pylist()
    except (SystemError, pyarrow.ArrowException) as error:
        raise ValueError(str(error)) from None


def _rows_of(table: Any) -> Callable[[int], Any]:
    table.validate(full=True)
    return lambda row: table.slice(row, 1).to_pylist()[0]


def unreadable(path: Path, what: str, error: Exception) -> SampleError:
    return SampleError(f"{path} is not readable as {what}: {shorten(str(error), 200)}; write it again")
