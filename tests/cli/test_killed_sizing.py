"""`trimtab size --set resume` killed with SIGKILL at random moments: sizes and packs to the last byte. Needs [data]."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

NUM_KILLS = 4


@pytest.fixture
def large(drawn: Path, tmp_path: Path) -> Path:
    """The drawn records 20 times over: 4,800, in some 25 chunks of 1 MiB."""
    records = [json.loads(line) for line in (drawn / "data.jsonl").read_text(encoding="utf-8").splitlines()]
    with (tmp_path / "data.jsonl").open("w", encoding="utf-8") as file:
        for copy in range(20):
            for record in records:
                more = {"id": f"{record['id']}-{copy}", "note": "x" * 3600}  # ballast: more chunks of little work
                file.write(json.dumps(record | more) + "\n")
    return tmp_path


def count_kept(folder: Path) -> int:
    return len(list((folder / "kept").glob("chunk-*.npz")))


def size_command(drawn: Path, folder: Path, out: str, *more: str) -> list[str]:
    command = [sys.executable, "-m", "trimtab", "size", str(folder / "data.jsonl"), "--model", "Qwen2.5-VL-7B"]
    command += ["--tokenizer", str(drawn / "tokenizer.json"), "--media-root", str(drawn), "--on-bad", "skip"]
    return [*command, "--set", "workers=2", "--out", str(folder / out), *more]


def group_alive(group: int) -> bool:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


@pytest.mark.integration
def test_sizing_killed_at_random_moments_comes_to_the_same_bytes(drawn: Path, large: Path) -> None:
    calm = subprocess.run(size_command(drawn, large, "calm.npz"), capture_output=True, text=True, check=False)
    assert calm.returncode == 0, calm.stderr

    seed = random.Random().randrange(10**6)
    draw = random.Random(seed)
    command = size_command(drawn, large, "stormy.npz", "--set", f"resume={large}/kept")
    num_kept = 0
    for _ in range(NUM_KILLS):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        wanted, deadline = num_kept + draw.randint(0, 4), time.monotonic() + 60
        while (kept := count_kept(large)) < wanted and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.3))  # in the middle of whatever it is at: starting, sizing, writing
        process.kill()
        status = process.wait()
        print(f"seed {seed}: killed when {kept} chunks were finished, {num_kept} before; status {status}")
        assert status == -signal.SIGKILL, "it had ended before it was killed"
        deadline = time.monotonic() + 10
        while group_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not group_alive(process.pid), "workers outlived their parent"
        assert num_kept <= kept <= count_kept(large), "a kill lost finished chunks"
        num_kept = count_kept(large)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (large / "stormy.npz").read_bytes() == (large / "calm.npz").read_bytes()

    for name in ("calm", "stormy"):
        pack = [sys.executable, "-m", "trimtab", "pack", str(large / f"{name}.npz"), "--dp", "2"]
        pack += ["--max-patches", "4096", "--max-tokens", "4096", "--set", "oversize=skip", "--out", str(large / name)]
        packed = subprocess.run(pack, capture_output=True, text=True, check=False)
        assert packed.returncode == 0, packed.stderr
    files = sorted(path.name for path in (large / "calm").iterdir())
    assert len(files) >= 3
    assert files == sorted(path.name for path in (large / "stormy").iterdir())
    for name in files:
        assert (large / "calm" / name).read_bytes() == (large / "stormy" / name).read_bytes(), name
