"""Bytes that cross a link per request when a model does not fit its GPUs: our map and loader beside Accelerate's.

Small models with a real one's proportions on simulated devices: real values, every copy between devices counted, every
answer compared with the whole model's. No GPU is needed, and nothing is said about time. One request of one image and
64 new tokens; both sides get the same memory for weights, which is all that Accelerate plans with.
Needs torch, Transformers and Accelerate. Run: python bench/offload_bytes.py
"""

import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "torch"))

from offload_traffic import FAMILIES, open_shop, run_accelerate, run_ours
from trimtab.errors import PartitionError

NUM_NEW = 64
SETTINGS = ((1, 0.2), (1, 0.5), (1, 0.8), (1, 1.0), (1, 1.2), (1, 2.0), (2, 0.2), (2, 0.6))


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"bytes over links, one request of {NUM_NEW} new tokens; shortage as a share of ViT and untied embedding")
    print(f"{'model':12s} {'GPUs':>4s} {'shortage':>8s} {'Accelerate':>12s} {'trimtab':>12s} {'ratio':>7s}")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            shop = open_shop(family, Path(folder), num_new=NUM_NEW)
            for num_gpus, share in SETTINGS:
                free = int(shop.weights - share * shop.movable)
                gpus = {i: int(free / num_gpus * (1.0 if num_gpus == 1 else 1.05)) for i in range(num_gpus)}
                row = f"{family:12s} {num_gpus:4d} {share:8.1f}"
                try:
                    ours = run_ours(shop, gpus).total
                except PartitionError:
                    print(f"{row}   a layer and its activations are too large for one of these GPUs")
                    continue
                try:
                    theirs = run_accelerate(shop, gpus).total
                except RuntimeError as error:
                    print(f"{row} {'fails':>12s} {ours:12,d}   {str(error)[:60]}")
                    continue
                print(f"{row} {theirs:12,d} {ours:12,d} {theirs / ours:6.0f}x")


if __name__ == "__main__":
    main()
