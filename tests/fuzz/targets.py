"""What is attacked: by name a function that prepares a folder and returns what tries one seed there."""

from __future__ import annotations

import io
import json
import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from trimtab.balance.packing import pack_samples
from trimtab.costs.devices import parse_cluster, read_device
from trimtab.errors import ImageError, TrimtabError
from trimtab.models.describe import describe
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.measured.check import check_plan
from trimtab.plan.options import PlanOptions
from trimtab.samples.headers import MAX_PIXELS, image_size
from trimtab.samples.read import read_lengths
from trimtab.samples.size import size_samples
from trimtab.serve.device_map import read_device_map
from trimtab.specs import SampleTable

Try = Callable[[int], None]
_WORDS = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"99999999999999999999", b'""', b"[]", b"{}", b'"\\ud800"', b"NaN"),
    *(b"\xff\xfe", b"\0", b"\xef\xbb\xbf", b"\r", b"&a *a", b"!!python/object:os.system x", b"<image>", b"<video>"),
)


def damaged(content: bytes, draw: random.Random, *, head: int = 2**20) -> bytes:
    """The content with a few bytes flipped, cut, doubled, or replaced by words that readers stumble over."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at, kind = draw.randrange(min(len(changed), head) + 1), draw.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at : at + draw.choice((1, 2, 40, 10**6))]
        elif kind == 2:
            changed[at:at] = changed[at : at + draw.choice((1, 8, 200))]
        elif kind == 3:
            end = at + draw.randrange(12)
            changed[at:end] = draw.choice(_WORDS)
        elif kind == 4:
            changed[at : at + 4] = draw.randbytes(4)
        else:  # another part of the same content
            start = draw.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + draw.randrange(60)]
    return bytes(changed)


def headers(_folder: Path) -> Try:
    """Images: the size is Pillow's, plain and turned, or an `ImageError`."""
    images = []
    noise = Image.effect_noise((64, 48), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "JPEG2000", "PPM", "AVIF"):
        for options in ({}, {"exif": exif.tobytes()}):
            file = io.BytesIO()
            with suppress(OSError, KeyError):  # a kind that this Pillow cannot write
                noise.save(file, kind, **options)
                images.append(file.getvalue())

    def pillows(content: bytes, turned: bool) -> tuple[int, int] | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with Image.open(io.BytesIO(content)) as image:
                    return ImageOps.exif_transpose(image).size if turned else image.size
            except Exception:
                return None

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        content = damaged(draw.choice(images), draw, head=400)
        for exif_mode in ("ignore", "apply"):
            try:
                size = image_size(content, exif=exif_mode)
            except ImageError:
                continue
            assert size[0] * size[1] <= MAX_PIXELS
            theirs = pillows(content, exif_mode == "apply")
            assert theirs in (None, size), f"{exif_mode}: {size}, and Pillow says {theirs}"

    return try_seed


def records(folder: Path) -> Try:
    """Data files of every shape that is text: a table, or a `TrimtabError`."""
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
        file.write_bytes(damaged(file.read_bytes(), draw))
        with suppress(TrimtabError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_plan(folder / "plan")

    return try_seed


def small_files(folder: Path) -> Try:
    """Device maps, devices, profiles, descriptions, configs: read, or a `TrimtabError`."""
    from trimtab.costs.profile import load_profile, profile_bytes, profile_model
    from trimtab.models.description import description_bytes

    model = describe("Qwen2.5-VL-7B")
    device = parse_cluster("8xH200").device
    figures = {name: getattr(device, name) for name in device.__dataclass_fields__}
    readers: dict[str, tuple[bytes, Callable[[Path], object]]] = {
        "map.json": (
            b'{"device_map": {"model.visual": 0, "lm_head": "cpu"}, "run_on_cpu": ["lm_head"]}',
            read_device_map,
        ),
        "device.yaml": (json.dumps(figures, default=str).encode(), read_device),
        "profile.json": (profile_bytes(profile_model(model, device)), load_profile),
        "model.json": (description_bytes(model), describe),
    }

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        name = draw.choice(sorted(readers))
        content, read = readers[name]
        (folder / name).write_bytes(damaged(content, draw))
        with suppress(TrimtabError):
            read(folder / name)

    return try_seed


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


TARGETS: dict[str, Callable[[Path], Try]] = {
    "headers": headers,
    "records": records,
    "plans": plans,
    "small_files": small_files,
    "packings": packings,
}
