"""Plan, train on two CPU processes, go on from a checkpoint: `python examples/train_on_two_stages.py [FOLDER]`.

Draws a small data set into FOLDER (default: a temporary one), makes a tiny Qwen2.5-VL, and runs the commands that a
real run takes: `trimtab plan`, `torchrun ... trimtab train`, the same with `--resume`, and `trimtab report --run`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from trimtab.testing import draw_dataset, write_demo_model


def run(words: str, folder: Path) -> None:
    """Print the command and run it in `folder`."""
    print(f"$ {words}", flush=True)
    programs = {"trimtab": ["-m", "trimtab"], "torchrun": ["-m", "torch.distributed.run"]}
    first, *others = shlex.split(words)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *programs[first], *others], cwd=folder, env=environment, check=True)


def main(folder: Path) -> None:
    data = draw_dataset(folder / "data", num_samples=40)
    write_demo_model(folder / "model", data)
    run(
        "trimtab plan model data/data.jsonl --cluster 2xA100-80GB --for trimtab --pp 2 "
        "--set num_microbatches=4 --set max_patches=512 --set max_tokens=2048 --set oversize=skip "
        "--on-bad skip --set dtype=fp32 --set attention=sdpa",
        folder,
    )
    launch = "torchrun --standalone --nproc-per-node 2 -m trimtab train plan model --random-weights --device cpu"
    settings = "--set dtype=float32 --lr 1e-2 --save-every 2"
    run(f"{launch} {settings} --steps 4", folder)
    run(f"{launch} {settings} --steps 6 --resume", folder)
    run("trimtab report plan --run run", folder)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        target = Path(sys.argv[1]).resolve()
        target.mkdir(parents=True, exist_ok=True)
        main(target)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary).resolve())
