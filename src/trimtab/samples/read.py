"""Ready-made lengths as one table: what `trimtab pack` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimtab.errors import SampleError
from trimtab.samples.lengths import read_length_parts
from trimtab.samples.problems import refuse_bad
from trimtab.samples.sources import find_sources, source_labels
from trimtab.samples.table import is_saved_table, join_parts, load_table
from trimtab.samples.whole_files import repeat_samples
from trimtab.specs import ImageRule, SampleTable


def read_lengths(paths: Path | Sequence[Path], *, image_rule: ImageRule | None = None) -> SampleTable:
    """One table of files that give token counts themselves: `token_num`, `num_tokens` or `length`.

    With `vit_num` the table counts tiles (`patch_unit="tiles"`, `patches_sq` = tiles; `num_images` is 1 where a sample
    has real tiles, because the file does not tell images apart; a text-only sample keeps the dummy tile it is given).
    With `image_wh` ([[width, height], ...]) patches come from `image_rule`. A `source` column names data sets; else
    each file is one. Tables of `save_sizing` are read as they are. Raises one `SampleError` that lists every bad row.
    """
    sources = find_sources(paths)
    files = [source.file for source in sources]
    if len(files) == 1 and is_saved_table(files[0]):
        return load_table(files[0])
    parts = read_length_parts(files, image_rule)
    refuse_bad([bad for part in parts for bad in part.bad], sum(part.num_read for part in parts), can_skip=False)
    if not any(len(part.lines) for part in parts):
        raise SampleError(f"no sample in {', '.join(map(str, files))}: name files that hold some")
    repeated = [repeat_samples([part], source.repeat) for source, part in zip(sources, parts, strict=True)]
    return join_parts([source.label for source in sources], repeated, source_labels(sources))
