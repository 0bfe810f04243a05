"""Sample sizes the packing benches run on: real lengths, a mixture at full size, and generated native resolutions.

The files of real lengths are not shipped. Where they are missing, lengths are drawn from distributions that were fitted
to them (`draw_lengths`, bench/data/fitted_lengths.json; `python bench/lengths.py [--data ../shared/data]` fits them).
"""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from trimtab.balance.cost import LinearCost
from trimtab.specs import SampleTable

DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
FITTED = Path(__file__).parent / "data" / "fitted_lengths.json"
TOKENS_PER_TILE = 256
LEVELS = (*(i / 50 for i in range(49)), 0.97, 0.98, 0.985, 0.99, 0.993, 0.996, 0.998, 0.999, 0.9995, 1.0)
"""Of the quantiles that are kept of a set's text tokens."""
NATIVE_COST = LinearCost(patches=1.2e9, patches_sq=0.0, tokens=14e9, tokens_sq=0.2e6)
"""Of a 0.6B + 7B model, attention causal: 4 x 28 layers x 3584 / 2."""
REAL_FILES = ("ai2d_train_12k_lengths.json", "chartqa_train_18k_lengths.json", "docvqa_train_10k_lengths.json")
MIXTURE_FILE = "mixture_1m24_lengths.parquet"


def read_real(folder: Path) -> SampleTable | None:
    """The three real sets as one table of tiles and tokens, or None if the files are not there."""
    files = [folder / name for name in REAL_FILES]
    if not all(file.exists() for file in files):
        return None
    rows = [
        (row["vit_num"], row["token_num"], i) for i, file in enumerate(files) for row in json.loads(file.read_text())
    ]
    columns = np.array(rows, np.int64)
    names = tuple(name.partition("_train")[0] for name in REAL_FILES)
    return make_table(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.int32), names, "tiles")


def read_mixture(folder: Path) -> SampleTable | None:
    """The mixture of 1.24 million samples, or None if the file, or PyArrow, is not there."""
    if not (folder / MIXTURE_FILE).exists() or find_spec("pyarrow") is None:
        return None
    from pyarrow import parquet

    table = parquet.read_table(folder / MIXTURE_FILE)
    names, source = np.unique(table["source"].to_numpy(zero_copy_only=False).astype(str), return_inverse=True)
    v, t = (table[name].to_numpy().astype(np.int64) for name in ("vit_num", "token_num"))
    return make_table(v, t, source.astype(np.int32), tuple(names.tolist()), "tiles")


def draw_lengths(name: str, num_samples: int | None = None, seed: int = 0) -> SampleTable:
    """The data sets of "real" or of "mixture" by their fitted distributions; None: as many samples as they have.

    Every set keeps its share of the samples, and every number of tiles its share of the set.
    """
    sets = json.loads(FITTED.read_text())[name]
    rows = [
        (source, int(tiles), own[0], own[1:])
        for source, by_tiles in enumerate(sets.values())
        for tiles, own in by_tiles.items()
    ]
    r = np.random.default_rng(seed)
    counts = np.array([num for _, _, num, _ in rows])
    if num_samples is not None:
        counts = r.multinomial(num_samples, counts / counts.sum())
    tiles = np.repeat([tiles for _, tiles, _, _ in rows], counts)
    source = np.repeat([source for source, *_ in rows], counts).astype(np.int32)
    text = [np.interp(r.random(count), LEVELS, quantiles) for count, (*_, quantiles) in zip(counts, rows, strict=True)]
    tokens = np.rint(np.concatenate(text)).astype(np.int64) + TOKENS_PER_TILE * tiles
    mixed = r.permutation(len(tokens))
    return make_table(tiles[mixed], tokens[mixed], source[mixed], tuple(sets), "tiles")


def generate_native(num_samples: int, seed: int = 0) -> SampleTable:
    """Native-resolution sizes with heavy tails: 15 % text only, single images, several, small ones, 5 % video.

    Shape only, no claim of realism: log-normal patches in steps of 4, four patches to a token, log-normal text.
    """
    r = np.random.default_rng(seed)
    kind = r.choice(5, num_samples, p=[0.15, 0.5, 0.15, 0.15, 0.05])
    median = np.array([0, 2500, 9000, 700, 15000])[kind]
    patches = (median * np.exp(r.normal(0, 0.8, num_samples))).astype(np.int64) // 4 * 4
    tokens = patches // 4 + np.exp(r.normal(np.log(250), 1.1, num_samples)).astype(np.int64) + 20
    names = ("text", "image", "several images", "small image", "video")
    return make_table(patches, tokens, kind.astype(np.int32), names, "patches")


def make_table(v, t, source, names, unit) -> SampleTable:
    return SampleTable(
        num_images=np.minimum(v, 1),
        num_patches=v,
        num_tokens=t,
        patches_sq=v,
        patches_windowed=v,
        source=source,
        source_names=names,
        patch_unit=unit,
    )


SHAPES = ("uniform", "correlated", "log-normal", "opposed", "bimodal", "few sizes", "text only")
"""Kinds of sizes that `draw_shape` draws."""


def draw_shape(kind: str, num_samples: int, largest: tuple[int, int], seed: int = 0) -> SampleTable:
    """Patches and tokens of one kind, from a tenth of `largest` up, or from nothing where the kind says so."""
    r = np.random.default_rng(seed)
    x, y = r.uniform(0.1, 1.0, (2, num_samples))
    if kind == "correlated":
        x, y = x * r.uniform(0.85, 1.0, num_samples), x * r.uniform(0.85, 1.0, num_samples)
    elif kind == "log-normal":
        x, y = (np.minimum(1.0, 0.2 * np.exp(r.normal(0, 0.7, num_samples))) for _ in range(2))
    elif kind == "opposed":
        y = 1.1 - x
    elif kind == "bimodal":
        is_large = r.random(num_samples) < 0.3
        x, y = np.where(is_large, x, 0.1 * x), np.where(is_large, y, 0.2 * y)
    elif kind == "few sizes":
        x, y = r.choice(r.uniform(0.05, 1.0, 6), num_samples), r.choice(r.uniform(0.05, 1.0, 3), num_samples)
    elif kind == "text only":
        x = np.zeros(num_samples)
    sizes = [np.maximum(q > 0, np.rint(q * most)).astype(np.int64) for q, most in zip((x, y), largest, strict=True)]
    return SampleTable.of(*sizes)


def fit(table: SampleTable) -> dict[str, dict[str, list[int]]]:
    """Data set -> tiles -> number of samples, then the quantiles of their text tokens (all tokens less 256 a tile).

    What that loses: the order of the samples, and any tie between lengths but the one with the number of tiles.
    """
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
    parser = argparse.ArgumentParser(description=__doc__)
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
