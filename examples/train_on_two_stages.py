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
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trimtab.demo.draw import draw_dataset


def write_model(folder: Path, tokenizer_folder: Path) -> None:
    """config.json and preprocessor of a Qwen2.5-VL of two vision and three language layers."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    }
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}
    tokens: dict[str, Any] = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()
    }
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens
    )
    config.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16).save_pretrained(folder)


def run(words: str, folder: Path) -> None:
    """Print the command and run it in `folder`."""
    print(f"$ {words}", flush=True)
    programs = {"trimtab": ["-m", "trimtab"], "torchrun": ["-m", "torch.distributed.run"]}
    first, *others = shlex.split(words)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *programs[first], *others], cwd=folder, env=environment, check=True)


def main(folder: Path) -> None:
    data = draw_dataset(folder / "data", num_samples=40)
    write_model(folder / "model", data.folder)
    file, tokenizer = data.data.relative_to(folder), data.tokenizer.relative_to(folder)
    run(
        f"trimtab plan model {file} --tokenizer {tokenizer} --cluster 2xA100-80GB --pp 2 --dp 1 --num-microbatches 4 "
        "--max-patches 512 --max-tokens 2048 --oversize skip --on-bad skip --dtype fp32 --attention sdpa",
        folder,
    )
    launch = "torchrun --standalone --nproc-per-node 2 -m trimtab train plan model --random-weights --device cpu"
    settings = f"--tokenizer {tokenizer} --dtype float32 --lr 1e-2 --save-every 2"
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
