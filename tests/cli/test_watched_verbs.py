"""Every verb over hostile input, watched: no socket, no process but ours, no file outside. Needs [data]."""

import json
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from border_cases import playlists, served, watched_environment, write_video_set
from refusals import refused
from trimtab.address import Allowed
from trimtab.errors import SampleError
from trimtab.plan.file.records import open_records

Run = Any
ROOT = Path(__file__).parents[2]
COMMANDS = {  # of each verb one that reads what came from outside; {word} as in refusals.yaml
    "demo": "demo --num-samples 50 --out {out}/demo",
    "plan": "plan Qwen2.5-VL-7B {data} --tokenizer {tokenizer} --cluster 8xA100-80GB --out {out}/plan",
    "predict": "predict Qwen2.5-VL-7B {table} --cluster 8xA100-80GB --tp 1 --pp 1 --batch 1",
    "check": "check {plan}",
    "compare": "compare {plan} {plan}",
    "probe": "probe {plan} {model}",
    "train": "train {plan} {model}",
    "replan": "replan {plan} --run {run} --out {out}/again",
    "report": "report {plan} --out {out}/report",
    "serve": "serve {model} --port 0",  # which has no weights
    "map": "map Qwen2.5-VL-7B --gpus 2x24GiB",
    "describe": "describe {model}",
    "image-size": "image-size Qwen2.5-VL-7B 640x480",
    "profile": "profile Qwen2.5-VL-7B --device A100-80GB",
    "size": "size {hostile} --model {model} --media-root {media} --on-bad skip",
    "pack": "pack {table} --max-patches 60000 --max-tokens 60000 --dp 2",
    "options": "options plan",
    "uneven": "uneven Qwen2.5-VL-7B",
    "export": "export jsonl {plan} --out {out}/x.jsonl",
}


SERVES = r"socket\.(bind|getaddrinfo '127\.0\.0\.1')"  # whether its port is free


def verbs() -> list[str]:
    from trimtab.cli.verbs import help_text

    commands = help_text(120).partition("Commands:")[2]
    return sorted(re.findall(r"^  ([a-z-]+)  ", commands, re.MULTILINE))


@pytest.mark.integration
def test_every_verb_is_watched() -> None:
    assert sorted(COMMANDS) == verbs()


@pytest.fixture
def hostile(tmp_path: Path, drawn: Path) -> dict[str, Path]:
    """Videos that are lists of places, images that lead outside, a plan that names addresses."""
    media, out = tmp_path / "media", tmp_path / "out"
    for folder in (media, out):
        folder.mkdir()
    (tmp_path / "run.jsonl").write_text('{"run": "http://127.0.0.1:9/run", "log": "/etc/hostname"}\n')
    (media / "secret.mp4").write_bytes(b"x")
    for name, content in playlists(9).items():
        (media / name).write_bytes(content)
    path = write_video_set(tmp_path, [*playlists(9)])
    turns = [{"from": "human", "value": "<image> what?"}, {"from": "gpt", "value": "a cat"}]
    with path.open("a") as file:
        for image in ("/etc/hostname", "../secret.png", "http://127.0.0.1:9/a.png", "file:///etc/hostname"):
            file.write(json.dumps({"image": image, "conversations": turns}) + "\n")
        file.write(json.dumps({"conversations": [{"from": "human", "value": "hi"}, turns[1]]}) + "\n")
    return {"hostile": path, "media": media, "out": out, "run": tmp_path / "run.jsonl"}


def command_of(verb: str, hostile: dict[str, Path], drawn: Path, planned: Path, tiny: Path, folder: Path) -> list[str]:
    """The verb over what is hostile: a plan names an address where its data lie."""
    plan = folder / "given"
    shutil.copytree(planned, plan)
    text = (plan / "plan.yaml").read_text(encoding="utf-8")
    if verb in ("check", "train", "probe", "export", "replan"):
        text = text.replace(str(drawn / "data.jsonl"), "http://127.0.0.1:9/data.jsonl")
        (plan / "plan.yaml").write_text(text, encoding="utf-8")
    places = {**hostile, "plan": plan, "model": tiny, "data": drawn / "data.jsonl", "table": planned / "samples.npz"}
    places["tokenizer"] = drawn / "tokenizer.json"
    words = [re.sub(r"\{(\w+)\}", lambda m: str(places[m[1]]), word) for word in COMMANDS[verb].split()]
    return [sys.executable, "-m", "trimtab", *words]


@pytest.mark.integration
@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_no_verb_connects_or_reads_outside(verb, hostile, drawn, planned, tiny, tmp_path):
    command = command_of(verb, hostile, drawn, planned, tiny, tmp_path)
    opened = opened_by(command, tmp_path, hostile["out"])
    roots = [*map(Path, sys.path), Path(sys.prefix), Path(sys.base_prefix), Path(sysconfig.get_path("stdlib"))]
    roots += [ROOT, tmp_path, drawn, planned, tiny, Path.home() / ".cache", Path("/proc"), Path("/dev"), Path("/sys")]
    roots += [Path("/etc/localtime"), Path("/usr/share"), Path("/etc/mime.types"), Path("/tmp")]
    assert [path for path in opened if not _is_in(path, roots)] == []
    assert not any(re.search(r"secret\.(mp4|png)|/etc/(hostname|passwd)", str(path)) for path in opened)


# -- what files of plans, models and data name, in every verb that reads them ------------------------------------------

SECRET = "secret-elsewhere"
PLAN_TRAPS = {  # what is put in place of what in plan.yaml
    "data": (r"path: \S+data\.jsonl", "path: {secret}/data.jsonl"),
    "table": (r"table: samples\.npz", "table: {secret}/samples.npz"),
    "table above": (r"table: samples\.npz", "table: ../" + SECRET + "/samples.npz"),
    "table behind an address": (r"table: samples\.npz", "table: http://127.0.0.1:9/samples.npz"),
    "packs": (r"file: offsets\.npy", "file: ../" + SECRET + "/offsets.npy"),
    "packs behind an address": (r"file: indices\.npy", "file: http://127.0.0.1:9/indices.npy"),
    "configuration": (r"config: Qwen2.5-VL-7B", "config: {secret}"),
    "configuration behind an address": (r"config: Qwen2.5-VL-7B", "config: http://127.0.0.1:9/config.json"),
    "processor": (r"preprocessor: null", "preprocessor: {secret}/preprocessor_config.json"),
    "device": (r"device: A100-80GB", "device: {secret}/device.yaml"),
    "costs": (r"costs: analytic", "costs: {secret}/profile.json"),
}
LIKE_DATA = {
    "data.jsonl",
    "config.json",
    "preprocessor_config.json",
    "device.yaml",
    "profile.json",
    "tokenizer_config.json",
}
"""Files that a plan was made from lie where it names them: read as JSON, and never fetched."""
# `train` reads plans and models as `probe` does
READS_A_PLAN = {
    "check": "check {plan}",
    "compare": "compare {plan} {planned}",
    "probe": "probe {plan} {model} --device cpu --out {out}/probed",
    "replan": "replan {plan} --run {run} --out {out}/again",
    "report": "report {plan} --out {out}/report",
    "export": "export jsonl {plan} --out {out}/x.jsonl",
}
MODEL_TRAPS: dict[str, dict[str, Any]] = {  # files of a model folder, and what is put into them
    "code": {
        "config.json": {"auto_map": {"AutoConfig": "trap.Trap", "AutoModel": "trap.Trap", "AutoProcessor": "trap.Trap"}}
    },
    "code elsewhere": {"config.json": {"auto_map": {"AutoConfig": "{secret}--trap.Trap"}}},
    "code by name": {"config.json": {"model_type": "{secret}"}},
    "processor": {
        "preprocessor_config.json": {"image_processor_type": "Trap", "auto_map": {"AutoImageProcessor": "trap.Trap"}}
    },
    "weights": {
        "model.safetensors.index.json": {
            "metadata": {},
            "weight_map": {"lm_head.weight": "../" + SECRET + "/model.safetensors"},
        }
    },
    "a base elsewhere": {"adapter_config.json": {"base_model_name_or_path": "{secret}", "peft_type": "LORA"}},
    "a name elsewhere": {
        "config.json": {"_name_or_path": "{secret}"},
        "tokenizer_config.json": {"name_or_path": "{secret}"},
    },
    "template": {
        "tokenizer_config.json": {
            "chat_template": "{% include '{secret}/data.jsonl' %}{{ cycler.__init__.__globals__.os.abort() }}"
        }
    },
    "vocabulary": {
        "tokenizer_config.json": {"tokenizer_file": "{secret}/tokenizer.json", "vocab_file": "{secret}/vocab.json"}
    },
}
READS_A_MODEL = {
    "describe": "describe {model}",
    "plan": "plan {model} {data} --cluster 8xA100-80GB --out {out}/plan",
    "size": "size {data} --model {model} --out {out}/s.npz",
    "map": "map {model} --gpus 2x24GiB",
    "predict": "predict {model} {table} --cluster 8xA100-80GB --tp 1 --pp 1 --batch 1",
    "probe": "probe {plan} {model} --device cpu --out {out}/probed",
    "serve": "serve {model} --port 0",
}


def elsewhere(folder: Path, planned: Path, tiny: Path) -> Path:
    """A folder that nobody names, in which whatever a trap names lies."""
    secret = shutil.copytree(tiny, folder / SECRET)
    for file in planned.iterdir():
        shutil.copy(file, secret / file.name)
    for name in ("data.jsonl", "device.yaml", "profile.json", "model.safetensors", "vocab.json"):
        (secret / name).write_text("{}")
    (secret / "trap.py").write_text("raise SystemExit('the trap ran')\n")
    return secret


def opened_by(command: list[str], folder: Path, cwd: Path) -> list[Path]:
    """The files that a command opened; it ends in a sentence at most, and connects to and starts nothing else."""
    environment, log = watched_environment(folder)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=600)
    assert "Traceback" not in done.stderr, done.stderr
    assert "Usage:" not in done.stderr, done.stderr  # it has read what it should
    assert done.returncode in (0, 1, 2)
    lines = log.read_text().splitlines()
    own = SERVES if command[3] == "serve" else "$"
    others = [line for line in lines if not line.startswith("open ") and not re.match(own, line)]
    assert [line for line in others if sys.executable not in line] == [], done.stderr
    return [Path(line[5:]) for line in lines if line.startswith("open ")]


def check_watched(command: list[str], folder: Path, cwd: Path, may_read: Collection[str] = ()) -> None:
    opened = opened_by(command, folder, cwd)
    strange = {path.name for path in opened if SECRET in path.parts or path.name == "trap.py"}
    assert strange <= set(may_read)


@pytest.mark.integration
@pytest.mark.parametrize("trap", PLAN_TRAPS)
@pytest.mark.parametrize("verb", READS_A_PLAN)
def test_no_file_elsewhere_that_a_plan_names_is_opened(
    verb: str, trap: str, hostile: dict[str, Path], drawn: Path, planned: Path, tiny: Path, tmp_path: Path
) -> None:
    secret = elsewhere(tmp_path, planned, tiny)
    plan = shutil.copytree(planned, tmp_path / "given")
    old, new = PLAN_TRAPS[trap]
    text, count = re.subn(old, new.format(secret=secret), (plan / "plan.yaml").read_text(encoding="utf-8"))
    assert count >= 1, "the trap is in the plan"
    (plan / "plan.yaml").write_text(text, encoding="utf-8")
    places = {**hostile, "plan": plan, "planned": planned, "model": tiny}
    words = [word.format(**places) for word in READS_A_PLAN[verb].split()]
    check_watched([sys.executable, "-m", "trimtab", *words], tmp_path, hostile["out"], LIKE_DATA)


@pytest.mark.integration
@pytest.mark.parametrize("trap", MODEL_TRAPS)
@pytest.mark.parametrize("verb", READS_A_MODEL)
def test_no_file_elsewhere_that_a_model_names_is_opened(
    verb: str, trap: str, hostile: dict[str, Path], drawn: Path, planned: Path, tiny: Path, tmp_path: Path
) -> None:
    secret = elsewhere(tmp_path, planned, tiny)
    model = shutil.copytree(tiny, tmp_path / "strange")
    (model / "trap.py").write_text("raise SystemExit('the trap ran')\n")
    for name, content in MODEL_TRAPS[trap].items():
        path = model / name
        own = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**own, **content}).replace("{secret}", str(secret)))
    places = {
        **hostile,
        "plan": planned,
        "model": model,
        "data": drawn / "data.jsonl",
        "table": planned / "samples.npz",
    }
    words = [word.format(**places) for word in READS_A_MODEL[verb].split()]
    check_watched([sys.executable, "-m", "trimtab", *words], tmp_path, hostile["out"])


def _is_in(path: Path, roots: list[Path]) -> bool:
    return any(str(root) and path.is_relative_to(root) for root in roots if root != Path())


def test_a_check_does_not_connect_to_what_a_plan_names(run: Run, drawn: Path, planned: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    shutil.copytree(planned, plan)
    text = (plan / "plan.yaml").read_text(encoding="utf-8")
    with served(drawn) as (port, asked):
        address = f"http://127.0.0.1:{port}/data.jsonl"
        (plan / "plan.yaml").write_text(text.replace(str(drawn / "data.jsonl"), address), encoding="utf-8")
        assert run("check", plan).code == 0
        refused = run("export", "jsonl", plan, "--out", tmp_path / "x.jsonl")
        assert (refused.code, address in refused.err) == (2, True)
        assert asked == []


def test_a_plan_leads_to_no_table_and_no_images_elsewhere(planned: Path, drawn: Path, tmp_path: Path, run: Run) -> None:
    plan = shutil.copytree(planned, tmp_path / "plan")
    old = r"(num_bytes: \d+, blake2b: \"\w+\")\}"
    text, count = re.subn(old, r"\1, media_root: /}", (plan / "plan.yaml").read_text(encoding="utf-8"))
    assert count == 1, "the trap is in the plan"
    (plan / "plan.yaml").write_text(text, encoding="utf-8")
    with refused(SampleError, "--allow-outside"):
        open_records(plan)
    assert open_records(plan, allowed=Allowed(outside=True)).media_root(0) == Path("/")
    packs = ("export", "energon-packs", plan, "--out", tmp_path / "packs")
    assert "/" in run(*packs).err
    assert run(*packs).code == 2
    for name in ("samples.npz", "offsets.npy"):
        linked = shutil.copytree(planned, tmp_path / f"linked {name}")
        (linked / name).unlink()
        (linked / name).symlink_to(planned / name)
        assert name in run("check", linked).out + run("check", linked).err
        assert run("check", linked).code != 0


def test_images_behind_addresses_are_exported_and_trained_on_when_allowed(drawn, tiny, tmp_path, run):
    rows = [json.loads(line) for line in (drawn / "data.jsonl").read_text().splitlines()[:12]]
    with served(drawn) as (port, asked):
        for row in rows:
            names = [row["image"]] if isinstance(row.get("image"), str) else row.get("image", [])
            row["image"] = [f"http://127.0.0.1:{port}/{name}" for name in names]
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ("--cluster", "1xA100-80GB", "--for", "trimtab", "--global-batch", "4", "--out", tmp_path / "plan")
        assert run("plan", tiny, data, *words).code == 2
        assert run("plan", tiny, data, *words, "--allow-remote").code == 0
        asked.clear()
        packs = ("export", "energon-packs", tmp_path / "plan", "--out", tmp_path / "packs")
        assert (run(*packs).code, asked) == (2, [])
        assert run(*packs, "--set", "allow_remote=true").code == 0
        with tarfile.open(next((tmp_path / "packs").glob("*.tar"))) as shard:
            images = [shard.extractfile(x).read() for x in shard if not x.name.endswith(".json")]
        assert {*images} <= {path.read_bytes() for path in (drawn / "images").iterdir()}
        assert len(images) == sum(len(row["image"]) for row in rows)
        pytest.importorskip("transformers", reason="trains")
        asked.clear()
        train = ["train", tmp_path / "plan", tiny, "--random-weights", "--device", "cpu", "--steps", "1"]
        done = [
            subprocess.run(
                [sys.executable, "-m", "trimtab", *map(str, train), "--out", str(tmp_path / name), *more], check=False
            ).returncode
            for name, more in (("refused", []), ("run", ["--allow-remote"]))
        ]
    assert done == [2, 0]
    assert asked


# -- C libraries, which Python's hooks do not see ---------------------------------------------------------------------

STRACE = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: apt-get install strace")
_CONNECTS = """
import ctypes
libc = ctypes.CDLL(None)
libc.connect(libc.socket(2, 1, 0), bytes([2, 0, 0, 9, 127, 0, 0, 1]) + bytes(8), 16)
"""


def traced(words: list[str], folder: Path) -> list[str]:
    """The system calls of a command and of all its children that open files and sockets."""
    log = folder / "strace.log"
    command = ["strace", "-f", "-qq", "-e", "trace=network,openat", "-o", str(log), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if "ptrace" in done.stderr:
        pytest.skip("this machine does not let a process be traced")
    return log.read_text(errors="replace").splitlines()


def internet(calls: list[str]) -> list[str]:
    return [call for call in calls if re.search(r"(connect|bind|sendto|sendmsg)\(.*(AF_INET|sin_port)", call)]


@STRACE
@pytest.mark.integration
def test_a_planted_connect_is_seen(tmp_path: Path) -> None:
    assert internet(traced([sys.executable, "-c", _CONNECTS], tmp_path))


@STRACE
@pytest.mark.integration
@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_no_library_connects_or_opens_what_data_name(verb, hostile, drawn, planned, tiny, tmp_path):
    """In the folder of the videos, where those that name their neighbours would find them.

    `serve` looks whether its port is free.
    """
    command = command_of(verb, hostile, drawn, planned, tiny, tmp_path)
    calls = traced(command, hostile["media"])
    own = r"127\.0\.0\.1.*" if verb == "serve" else "$"  # whether its port is free
    assert [
        call for call in internet(calls) if not re.search(f"(socket|bind|setsockopt|getsockname).*{own}", call)
    ] == []
    opened = [call for call in calls if "openat" in call]
    if verb == "size":
        pytest.importorskip("av", reason="videos are read by PyAV: pip install 'trimtab[video]'")
        assert any("session.mp4" in call for call in opened), "the videos were not read at all"
    assert [call for call in opened if re.search(r"secret\.(mp4|png)|/etc/hostname", call)] == []


@STRACE
@pytest.mark.integration
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_no_library_connects_for_columns_that_name_other_places(
    kind: str, hostile: dict[str, Path], tmp_path: Path
) -> None:
    """Of one file each: whole, and with offsets, lengths and names damaged."""
    pyarrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    image = {"bytes": None, "path": "http://127.0.0.1:9/a.png"}
    turns = [{"from": "human", "value": "<image> what?"}, {"from": "gpt", "value": "a cat"}]
    rows = [
        {"id": f"r{n}", "conversations": turns, "image": {**image, "path": "secret.png"} if n else image}
        for n in range(9)
    ]
    table, path = pyarrow.Table.from_pylist(rows), hostile["media"] / f"rows.{kind}"
    (hostile["media"].parent / "secret.png").write_bytes(b"x")
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    content = path.read_bytes()
    for seed in range(4):
        draw, damaged = random.Random(seed), bytearray(content)
        for _ in range(seed):
            at = draw.randrange(len(damaged) - 4)
            damaged[at : at + 4] = draw.choice([b"\xff\xff\xff\x7f", bytes(4), draw.randbytes(4)])
        path.write_bytes(bytes(damaged))
        words = [
            "size",
            str(path),
            "--model",
            "Qwen2.5-VL-7B",
            "--media-root",
            str(tmp_path / "out"),
            "--on-bad",
            "skip",
        ]
        calls = traced([sys.executable, "-m", "trimtab", *words], hostile["media"])
        assert internet(calls) == []
        assert any(path.name in call for call in calls), "it was not read at all"
        assert [call for call in calls if "secret.png" in call and "= -1" not in call] == []
