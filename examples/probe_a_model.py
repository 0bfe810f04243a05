"""Measure what a model's layers keep, and choose the recompute that fits: `python examples/probe_a_model.py [FOLDER]`.

Draws a small data set into FOLDER (default: a temporary one), makes a tiny Qwen2.5-VL, plans it for one device, and
probes the plan on the CPU, where the memory is a budget that is counted: `trimtab plan`, `trimtab probe`, `trimtab
check`. On GPUs the same commands stand without `--device cpu`; for several stages `torchrun` starts the probe.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from train_on_two_stages import run
from trimtab.testing import draw_dataset, write_demo_model


def main(folder: Path) -> None:
    data = draw_dataset(folder / "data", num_samples=24)
    write_demo_model(folder / "model", data)
    file, tokenizer = "data/data.jsonl", "data/tokenizer.json"
    run(
        f"trimtab plan model {file} --tokenizer {tokenizer} --cluster A100-80GB --pp 1 --dp 1 --set num_microbatches=2 "
        "--set max_patches=256 --set max_tokens=512 --set oversize=skip --on-bad skip "
        "--set dtype=fp32 --set attention=sdpa",
        folder,
    )
    run(f"trimtab probe plan model --tokenizer {tokenizer} --device cpu --budget 52MiB --risk 5%", folder)
    run("trimtab check probed", folder)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        target = Path(sys.argv[1]).resolve()
        target.mkdir(parents=True, exist_ok=True)
        main(target)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary).resolve())
