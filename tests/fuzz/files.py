"""Data files, plans, placements, profiles, descriptions and logs; and what is packed."""

import json
import random
import shutil
import tarfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.fuzz.damage import damaged, reshaped

from trimtab import PlanOptions, SampleTable, TrimtabError, check_plan, describe, pack_samples, size_samples
from trimtab.costs.devices import parse_cluster, read_device
from trimtab.costs.measured.fitted import FORMAT, read_runs
from trimtab.costs.profile import load_profile, profile_bytes, profile_model
from trimtab.models.description import description_bytes
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.file.placement import load_placement
from trimtab.samples.lengths import read_lengths
from trimtab.samples.records import read_records
from trimtab.typed_json import parse_yaml

Try = Callable[[int], None]
ROOT = Path(__file__).parents[2]


def records(folder: Path) -> Try:
    """Data files of every shape that is text, and a shard: a table, or a `TrimtabError`."""
    talk = [{"from": "human", "value": "What is this? <image>"}, {"from": "gpt", "value": "A cat, é 漢."}]
    Image.new("RGB", (40, 30)).save(folder / "a.png")
    rows = [{"id": f"n{n}", "image": "a.png", "conversations": talk} for n in range(6)]
    lengths = [{"vit_num": 2, "token_num": 600 + n, "id": f"n{n}"} for n in range(6)]
    contents = {
        "data.jsonl": "\n".join(map(json.dumps, rows)).encode(),
        "list.json": json.dumps(rows).encode(),
        "lengths.json": json.dumps(lengths).encode(),
        "lengths.jsonl": "\n".join(map(json.dumps, lengths)).encode(),
        "meta.json": json.dumps({"a": {"annotation": "good.jsonl", "root": ".", "repeat_time": 2}}).encode(),
    }
    (folder / "good.jsonl").write_bytes(contents["data.jsonl"])
    with tarfile.open(folder / "whole.tar", "w") as archive:
        archive.add(folder / "good.jsonl", "n0.json")
        archive.add(folder / "a.png", "n0.png")
    contents["shard.tar"] = (folder / "whole.tar").read_bytes()
    rule = describe("Qwen2.5-VL-7B").image_rule

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        name = draw.choice(sorted(contents))
        (folder / name).write_bytes(damaged(contents[name], draw))
        with suppress(TrimtabError):
            found = size_samples(folder / name, image_rule=rule, tokenizer=None, on_bad=draw.choice(("skip", "error")))
            assert found.num_read == len(found.table) + len(found.bad)
        with suppress(TrimtabError):
            read_lengths([folder / name])

    return try_seed


def plans(folder: Path) -> Try:
    """plan.yaml and the tables beside it: a list of problems, or a `PlanError`."""
    tiles = np.arange(60) % 5
    samples = SampleTable.of(1024 * tiles, 256 * tiles + 90, patches_sq=1024**2 * tiles)
    details = make_plan(
        describe("InternVL-Chat-V1-5"), samples, parse_cluster("4xH200"), PlanOptions(pp=2, tp=2, num_microbatches=8)
    )
    write_plan(details, folder / "whole")
    names = sorted(file.name for file in (folder / "whole").iterdir())

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        shutil.rmtree(folder / "plan", ignore_errors=True)
        shutil.copytree(folder / "whole", folder / "plan")
        file = folder / "plan" / draw.choice((*names, *["plan.yaml"] * 9))
        if file.suffix == ".yaml" and draw.random() < 0.5:
            file.write_text(json.dumps(reshaped(parse_yaml(file.read_text()), draw)))  # JSON is YAML
        else:
            file.write_bytes(damaged(file.read_bytes(), draw))
        with suppress(TrimtabError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_plan(folder / "plan")

    return try_seed


def small_files(folder: Path) -> Try:
    """Placements, devices, profiles, descriptions, configs, logs: read, or a `TrimtabError`."""
    model = describe("Qwen2.5-VL-7B")
    device = parse_cluster("8xH200").device
    figures = {name: getattr(device, name) for name in device.__dataclass_fields__}
    config = json.loads((ROOT / "src" / "trimtab" / "demo" / "tiny_model" / "config.json").read_text())
    run = {
        "name": "a",
        "stages": [{"vision": 32, "language": 4}, {"language": 24}],
        "num_microbatches": 4,
        "tp": 2,
        "work": {"patches": 9000, "tokens": 4000, "patches_per_image": 1000, "tokens_per_sample": 1000},
        "iteration_s": 2.5,
        "stage_s": [0.3, 0.4],
        "peak_bytes": [1e9, 2e9],
        "recompute": [1, 0],
    }
    readers: dict[str, tuple[Any, Callable[[Path], object]]] = {
        "placement.yaml": (parse_yaml((ROOT / "tests" / "golden" / "placement_v1_0.yaml").read_text()), _placed),
        "device.yaml": (json.loads(json.dumps(figures, default=str)), read_device),
        "profile.json": (json.loads(profile_bytes(profile_model(model, device))), load_profile),
        "model.json": (json.loads(description_bytes(model)), describe),
        "config.json": (config, describe),
        "runs.json": ({"format": FORMAT, "runs": [run]}, lambda path: read_runs(path, model, device)),
    }

    # Transformers is asked for an odd configuration, in a process of its own
    names = [name for name in sorted(readers) for _ in range(1 if name == "config.json" else 20)]

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        name = draw.choice(names)
        content, read = readers[name]
        if draw.random() < 0.6:
            content = reshaped(content, draw)
        written = json.dumps(content).encode()
        (folder / name).write_bytes(written if draw.random() < 0.5 else damaged(written, draw))
        with suppress(TrimtabError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(folder / name)

    return try_seed


def _placed(path: Path) -> None:
    record = load_placement(path)
    assert isinstance(record.device_map, dict)
    assert isinstance(record.runs_on, dict)


def packings(_folder: Path) -> Try:
    """Extreme samples and limits: every sample in one pack or named as oversize, or a `TrimtabError`."""

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        count = draw.randint(1, 60)
        largest = draw.choice((1, 10, 10**4, 2**31, 2**40))
        patches, tokens = ([draw.randint(0, largest) for _ in range(count)] for _ in range(2))
        samples = SampleTable.of(np.array(patches), np.array(tokens) + 1)
        limits = (draw.randint(1, largest + 1), draw.randint(1, largest + 1))
        try:
            found = pack_samples(
                samples,
                limits=limits,
                dp=draw.randint(1, 5),
                oversize=draw.choice(("skip", "alone")),
                seed=seed % 2**31,
            )
        except TrimtabError:
            return
        packed = sorted([*found.packing.indices.tolist(), *found.packing.oversize.tolist()])
        assert packed == list(range(count))
        runs = found.schedule.table
        assert sorted(runs[runs >= 0].tolist()) == list(range(found.packing.num_packs))

    return try_seed


def columns(folder: Path) -> Try:
    """Arrow streams and files, and Parquet: records, or a `TrimtabError`; never the end of the process."""
    import pyarrow
    import pyarrow.parquet

    talk = [{"from": "human", "value": "What is this? <image>"}, {"from": "gpt", "value": "A cat, é 漢."}]
    rows = [{"id": f"n{n}", "image": {"bytes": b"ab" * n, "path": None}, "conversations": talk} for n in range(40)]
    table = pyarrow.Table.from_pylist(rows)
    for name, make in (("s.arrow", pyarrow.ipc.new_stream), ("f.arrow", pyarrow.ipc.new_file)):
        with pyarrow.OSFile(str(folder / name), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=15)
    pyarrow.parquet.write_table(table, folder / "p.parquet", row_group_size=15)
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        name = draw.choice(sorted(contents))
        path = folder / f"x-{name}"
        path.write_bytes(damaged(contents[name], draw, head=len(contents[name])))
        with suppress(TrimtabError):
            assert len(list(read_records(path))) <= len(rows) + 3  # one more where each group ends

    return try_seed


TARGETS: dict[str, Callable[[Path], Try]] = {
    "columns": columns,
    "records": records,
    "plans": plans,
    "small_files": small_files,
    "packings": packings,
}
