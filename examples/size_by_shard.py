"""Size a data set by the shard, and join the shards: `python examples/size_by_shard.py [DATA KEPT]`.

DATA is what `trimtab size` takes, KEPT a folder that all machines see; both may be addresses such as s3://bucket/data.
Started again after a kill it goes on where it was. Processes of this machine take the shards here; any scheduler can
call `size_shard` on the machines of a cluster. Without DATA a small set is drawn.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import trimtab
import trimtab.testing

NUM_SHARDS = 4  # a few for each CPU of the cluster, so that a slow machine does not hold up the rest


def size(data: str, kept: str, shard: tuple[int, int] | None = None) -> trimtab.SizingResult:
    return trimtab.size_samples(
        data,
        image_rule=trimtab.describe("Qwen2.5-VL-7B").image_rule,
        tokenizer=None,  # your model's folder, for exact counts
        shard=shard,
        resume_dir=kept,
        on_bad="skip",
    )


def size_shard(row: dict[str, Any]) -> dict[str, str]:
    return {"told": size(row["data"], row["kept"], (int(row["shard"]), NUM_SHARDS)).assumptions[0]}


def run_here(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(size_shard, rows))


def main() -> None:
    words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        if not words:
            words = [str(trimtab.testing.draw_dataset(Path(folder), num_samples=200) / "data.jsonl"), f"{folder}/kept"]
        data, kept = words
        rows = [{"data": data, "kept": kept, "shard": number} for number in range(1, NUM_SHARDS + 1)]
        for done in run_here(rows):
            print(done["told"])
        table = size(data, kept).table  # nothing is read again
        print(f"{len(table)} samples, {int(table.num_patches.sum())} patches, {int(table.num_tokens.sum())} tokens")


if __name__ == "__main__":
    main()
