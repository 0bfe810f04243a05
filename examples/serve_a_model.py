"""Serve a model and ask it about an image: `python examples/serve_a_model.py [MODEL_DIR]`.

Without MODEL_DIR a tiny Qwen2.5-VL with random weights is made: its answer is noise. `trimtab serve` runs next to
this process and is asked by OpenAI's own client, whole and as a stream; then it drains and stops.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from trimtab.testing import draw_dataset

QUESTION = "what is in the picture?"


def main(folder: Path, image: Path) -> None:
    command = [sys.executable, "-m", "trimtab", "serve", str(folder), "--port", "0", "--max-new-tokens", "32"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            url = next(line.split()[-1] for line in server.stderr if line.startswith("serving "))
            with openai.OpenAI(base_url=url, api_key="none") as client:
                asked: dict[str, Any] = {"model": folder.name, "messages": question(image), "temperature": 0}
                whole = client.chat.completions.create(**asked)
                print(f"{folder.name} on {client.base_url}: {whole.choices[0].message.content!r}, {whole.usage}")
                for chunk in client.chat.completions.create(**asked, stream=True):
                    print(chunk.choices[0].delta.content or "", end="")
                print()
        finally:
            server.terminate()  # it finishes what it accepted, then it ends


def question(image: Path) -> list[dict[str, Any]]:
    data = base64.b64encode(image.read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": QUESTION},
    ]
    return [{"role": "user", "content": parts}]


def save_tiny_model(folder: Path, tokenizer: Path) -> Path:
    """What a downloaded model folder holds: weights, configs, tokenizer, chat template, image processor."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer.parent / name).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((tokenizer.parent / name).read_bytes())
    words = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64},
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": len(words),
            "max_position_embeddings": 8192,
            "bos_token_id": None,
            "eos_token_id": words.eos_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        image_token_id=words.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=words.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=words.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=words.convert_tokens_to_ids("<|vision_end|>"),
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    pixels = {"shortest_edge": 3136, "longest_edge": 200_704}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor", "size": pixels})
    )
    return folder


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        drawn = draw_dataset(Path(temporary) / "data", num_samples=20)
        picture = next(iter(sorted(drawn.rglob("*.png"))))
        given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
        main(given or save_tiny_model(Path(temporary) / "tiny", drawn / "tokenizer.json"), picture)
