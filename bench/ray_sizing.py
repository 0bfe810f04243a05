"""Samples sized per second on Ray Data beside the local engine, and whether the results are the same bytes.

    pip install 'ray[data]==2.60.0'
    python bench/ray_sizing.py [--samples 20000] [--workers 2]

Draws the demo's data set and repeats its records under new ids. A local Ray is started once, before anything is timed;
each engine sizes twice and the second pass counts, so neither pays for a cold file cache. Seconds are of the wall: they
hold for a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray

    from trimtab.adapters.ray_data import map_on_ray

from trimtab.demo.draw import draw_dataset
from trimtab.models.describe import describe
from trimtab.samples.records import list_chunks
from trimtab.samples.size import MapChunks, size_samples
from trimtab.samples.table import table_bytes
from trimtab.samples.workers import map_in_order

NUM_DRAWN = 500


def draw(folder: Path, num_samples: int) -> Path:
    """`num_samples` records over the images of a drawn data set."""
    data = draw_dataset(folder, num_samples=NUM_DRAWN).folder / "data.jsonl"
    records = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    with data.open("w", encoding="utf-8") as file:
        for i in range(num_samples):
            file.write(json.dumps(records[i % NUM_DRAWN] | {"id": f"s{i}"}) + "\n")
    return data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    rule = describe("Qwen2.5-VL-7B").image_rule
    with tempfile.TemporaryDirectory() as name:
        data = draw(Path(name) / "drawn", arguments.samples)
        print(f"{arguments.samples} samples in {len(list(list_chunks(data)))} chunks, {arguments.workers} workers")
        started = time.perf_counter()
        ray.init(address="local", num_cpus=arguments.workers, include_dashboard=False, log_to_driver=False)
        print(f"ray {ray.__version__} started in {time.perf_counter() - started:.1f} s")
        contents = []
        engines: dict[str, MapChunks] = {"local": map_in_order, "ray": map_on_ray}
        for engine, map_chunks in engines.items():
            for _ in range(2):
                started = time.perf_counter()
                result = size_samples(
                    data,
                    image_rule=rule,
                    tokenizer=data.parent / "tokenizer.json",
                    workers=arguments.workers,
                    map_chunks=map_chunks,
                )
                seconds = time.perf_counter() - started
            contents.append(table_bytes(result.table))
            print(f"{engine:6} {seconds:6.1f} s  {arguments.samples / seconds:8.0f} samples/s")
        ray.shutdown()
        print("same bytes" if contents[0] == contents[1] else "NOT the same bytes")
        raise SystemExit(contents[0] != contents[1])


if __name__ == "__main__":
    main()
