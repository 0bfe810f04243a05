"""Memory-mapped columns to packs: CPU seconds, memory, balance; up to 100 M samples and more.

    python bench/packing_scale.py [--samples 10000000] [--threads 1] [--order random] [--folder /tmp/packing_scale]

The mixture's samples are drawn with replacement into two .npy columns of int32 first (not timed).
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import time
from pathlib import Path

import numpy as np

from lengths import DEFAULT_DATA, read_mixture
from trimtab.balance.columns import PackedColumns, pack_columns
from trimtab.balance.cost import TILE_COST
from trimtab.balance.metrics import dist_ratio

LIMITS = (9, 4096)
COST = TILE_COST.of
CHUNK = 1 << 22


def write_columns(folder: Path, data: Path, num_samples: int) -> list[Path] | None:
    """Paths of the two columns, made if they are not there; None without the mixture."""
    paths = [folder / f"{name}_{num_samples}.npy" for name in ("patches", "tokens")]
    if all(path.exists() for path in paths):
        return paths
    mixture = read_mixture(data)
    if mixture is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    maps = [np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(num_samples,)) for path in paths]
    random = np.random.default_rng(0)
    for first in range(0, num_samples, CHUNK):
        rows = random.integers(0, len(mixture), min(CHUNK, num_samples - first))
        maps[0][first : first + CHUNK] = mixture.num_patches[rows]
        maps[1][first : first + CHUNK] = mixture.num_tokens[rows]
    return paths


def cost_ratio(packed: PackedColumns, columns: list[np.ndarray], num_rows: int = 20_000) -> float:
    """Dist ratio of the cost over the first rows."""
    num_packs = min(packed.num_packs // packed.dp, num_rows) * packed.dp
    members = packed.indices[: packed.offsets[num_packs]]
    cost = COST(*(column[members] for column in columns))
    return dist_ratio(np.add.reduceat(cost, packed.offsets[:num_packs]).reshape(-1, packed.dp))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/packing_scale"))
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--order", choices=("random", "tolerance", "sorted"), default="random")
    arguments = parser.parse_args()
    paths = write_columns(arguments.folder, arguments.data, arguments.samples)
    if paths is None:
        print(f"the mixture is not in {arguments.data}; name another folder with --data")
        return
    small = [np.arange(99, dtype=np.int32) % 5] * 2
    pack_columns(small, limits=LIMITS, dp=8, cost=COST, shard_samples=20, order=arguments.order)  # compile or load
    columns = [np.load(path, mmap_mode="r") for path in paths]
    cpu, wall = time.process_time(), time.perf_counter()
    packed = pack_columns(
        columns,
        limits=LIMITS,
        dp=8,
        cost=COST,
        order=arguments.order,
        num_threads=arguments.threads,
    )
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    bound = max(-(-int(c.sum(dtype=np.int64)) // q) for c, q in zip(columns, LIMITS, strict=True))
    print(
        f"{arguments.samples:,} samples, {arguments.threads} threads: {cpu:.1f} s CPU, {wall:.1f} s, "
        f"{resident:.2f} GiB resident, packs / bound {packed.num_packs / bound:.4f}, "
        f"dist ratio cost {cost_ratio(packed, columns):.4f}, hash {hashlib.blake2b(packed.indices).hexdigest()[:12]}"
    )


if __name__ == "__main__":
    main()
