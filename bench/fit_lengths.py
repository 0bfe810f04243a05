"""Fit the distributions that bench/data/fitted_lengths.json holds, from the length files of ../shared/data.

Of each data set: how many samples show how many tiles, and for each such number the quantiles of the text tokens (all
tokens less 256 a tile) at `lengths.LEVELS`, which are densest where samples are long: those fill packs.
`lengths.draw_lengths` draws from them. What that loses: the order of the samples, and any tie between lengths but the
one with the number of tiles.
Run: python bench/fit_lengths.py [--data ../shared/data]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from lengths import DEFAULT_DATA, FITTED, LEVELS, TOKENS_PER_TILE, read_mixture, read_real
from trimtab.specs import SampleTable


def fit(table: SampleTable) -> dict[str, dict[str, list[int]]]:
    """Data set -> tiles -> number of samples, then the quantiles of their text tokens."""
    found: dict[str, dict[str, list[int]]] = {}
    text = table.num_tokens - TOKENS_PER_TILE * table.num_patches
    for number, name in enumerate(table.source_names):
        own = table.source == number
        found[name] = {
            str(tiles): [
                int((own & (table.num_patches == tiles)).sum()),
                *np.quantile(text[own & (table.num_patches == tiles)], LEVELS, method="nearest").astype(int).tolist(),
            ]
            for tiles in np.unique(table.num_patches[own]).tolist()
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    arguments = parser.parse_args()
    tables = {"real": read_real(arguments.data), "mixture": read_mixture(arguments.data)}
    if None in tables.values():
        raise SystemExit(f"{arguments.data} lacks the length files: name their folder with --data")
    sets = [
        f' "{name}": {{\n'
        + ",\n".join(f'  "{source}": {json.dumps(tiles)}' for source, tiles in fit(table).items())
        + "\n }"
        for name, table in tables.items()
        if table is not None
    ]
    FITTED.write_text("{\n" + ",\n".join(sets) + "\n}\n")
    print(f"{FITTED}: {FITTED.stat().st_size:,} bytes")
