"""Every verb over hostile input, watched: no socket, no process but ours, no file outside. Needs [data]."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from border_cases import playlists, served, watched_environment, write_video_set

Run = Any
ROOT = Path(__file__).parents[2]
COMMANDS = {  # of each verb one that reads what came from outside; {word} as in refusals.yaml
    "demo": "demo --samples 20 --out {out}/demo",
    "plan": "plan Qwen2.5-VL-7B {data} --tokenizer {tokenizer} --cluster 8xA100-80GB --out {out}/plan",
    "predict": "predict Qwen2.5-VL-7B {table} --cluster 8xA100-80GB --tp 1 --pp 1 --batch 1",
    "check": "check {plan}",
    "compare": "compare {plan} {plan}",
    "probe": "probe {plan} {model}",
    "train": "train {plan} {model}",
    "replan": "replan {plan} {run} --out {out}/again",
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
    environment, log = watched_environment(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=hostile["out"], env=environment)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1, 2)
    lines = log.read_text().splitlines()
    own = r"socket\.(bind|getaddrinfo '127\.0\.0\.1')" if verb == "serve" else "$"  # whether its port is free
    others = [line for line in lines if not line.startswith("open ") and not re.match(own, line)]
    assert {line for line in others if sys.executable not in line} == set(), done.stderr
    roots = [*map(Path, sys.path), Path(sys.prefix), Path(sys.base_prefix), Path(sysconfig.get_path("stdlib"))]
    roots += [ROOT, tmp_path, drawn, planned, tiny, Path.home() / ".cache", Path("/proc"), Path("/dev"), Path("/sys")]
    roots += [Path("/etc/localtime"), Path("/usr/share"), Path("/etc/mime.types"), Path("/tmp")]
    strange = {line for line in lines if line.startswith("open ") and not _is_in(Path(line[5:]), roots)}
    assert strange == set()
    assert not any(
        re.search(r"secret\.(mp4|png)|/etc/(hostname|passwd)", line) for line in lines if line.startswith("open ")
    )


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
