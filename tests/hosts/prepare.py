"""What `.ci/run hosts` trains: a tiny LLaVA with weights in FOLDER/model, data for each trainer; losses compared.

Run: python tests/hosts/prepare.py make FOLDER | on_cpu FILE.yaml | same LOG LOG | trained LOG.
"""

import json
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROCESSOR = {"processor_class": "LlavaProcessor", "patch_size": 14, "num_additional_image_tokens": 1}
PROCESSOR |= {"vision_feature_select_strategy": "default", "image_token": "<image>"}


def make(folder: Path) -> None:
    """model/, data/data.jsonl of ShareGPT's form, and data/messages.jsonl with absolute paths of images."""
    sys.path[:0] = [str(TESTS / "torch"), str(TESTS / "unit"), str(TESTS)]
    import torch
    import transformers
    from model_folders import write_data, write_model

    folder.mkdir(parents=True, exist_ok=True)
    config = write_model(folder / "model", "llava")
    published = (folder / "model" / "config.json").read_text()
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(published)  # without the class default of image_seq_length
    (folder / "model" / "processor_config.json").write_text(json.dumps(PROCESSOR))
    data = write_data(folder / "data", num=16)
    with (folder / "data" / "messages.jsonl").open("w") as file:
        for row in map(json.loads, data.read_text().splitlines()):
            question, answer = (turn["value"] for turn in row["conversations"])
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            images = [str(folder / "data" / name) for name in row["image"]]
            file.write(json.dumps({"messages": turns, "images": images}) + "\n")


def on_cpu(exported: Path) -> None:
    """Complete what `export llama-factory` wrote, and take out what a CPU has not: DeepSpeed, bf16, flash attention."""
    import yaml

    folder = exported.parent
    run = {"model_name_or_path": str(folder / "model"), "template": "llava", "output_dir": str(folder / "lf-out")}
    run |= {"learning_rate": 1e-3, "max_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    run |= {"use_cpu": True, "bf16": False, "flash_attn": "sdpa", "optim": "adamw_torch", "deepspeed": None}
    exported.write_text(yaml.safe_dump({**yaml.safe_load(exported.read_text()), **run}))


def losses(log: Path) -> list[float]:
    """Return the losses that a Trainer printed."""
    return [float(x) for x in re.findall(r"'loss': '?([0-9.e+-]+)", log.read_text(errors="replace"))]


def same(plain: Path, balanced: Path) -> None:
    """Fail unless both runs printed the same losses, to the four digits that a Trainer prints."""
    expected, found = losses(plain), losses(balanced)
    print(f"{plain.name} {expected}\n{balanced.name} {found}")
    assert len(expected) >= 3, "the plain run printed no losses"
    assert len(expected) == len(found)
    assert all(abs(a - b) <= 1e-3 * abs(a) for a, b in zip(expected, found, strict=True))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]).resolve())
    elif sys.argv[1] == "on_cpu":
        on_cpu(Path(sys.argv[2]).resolve())
    elif sys.argv[1] == "same":
        same(Path(sys.argv[2]), Path(sys.argv[3]))
    else:  # a run under a plan: it has trained
        found = losses(Path(sys.argv[2]))
        assert len(found) >= 3, "it printed no losses"
        assert all(loss > 0 for loss in found), f"it has trained on nothing: {found}"
