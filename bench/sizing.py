"""Samples sized per second: headers, chat template and tokens, beside a loop of Pillow and a tokenizer call each.

    python bench/sizing.py [--samples 20000] [--workers 2]

Draws PNG and JPEG files, trains a byte-level BPE tokenizer on the drawn text, writes a JSONL file whose samples open
one of 500 files each (2 % open three, 8 % none) and hold about 200 tokens of text, and sizes it with 1 and more
workers. The peer opens images with Pillow and calls the same tokenizer one sample at a time; its token counts and image
sizes must be equal to ours. A core's rate is samples per second of CPU time, of all processes, their start included:
it does not change when others use the machine too, as the wall clock does.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trimtab.models.describe import describe
from trimtab.samples.media import image_size
from trimtab.samples.size import size_samples
from trimtab.samples.templates import compile_template

NUM_IMAGES = 500
MODEL = "Qwen2.5-VL-7B"  # whose rule counts the tokens of images, ours and the peer's
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


def draw(folder: Path, num_samples: int, seed: int) -> Path:
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    for i in range(NUM_IMAGES):
        width, height = (max(16, int(rng.lognormvariate(5.5, 0.5))) for _ in range(2))
        # small noise scaled up compresses like a picture and not like noise
        small = noise.integers(0, 256, (max(2, height // 16), max(2, width // 16), 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        image.save(folder / "images" / (f"{i}.png" if i % 2 else f"{i}.jpg"))
    onsets = ("b", "c", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "st", "tr", "ch")
    syllables = [onset + rest for onset in onsets for rest in ("a", "e", "i", "o", "u", "an", "er", "in")]
    words = ["".join(rng.choices(syllables, k=rng.choice([1, 1, 2, 2, 3, 4]))) for _ in range(6000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]  # Zipf, as words of a language

    def text(num_words: int) -> str:
        return " ".join(rng.choices(words, weights, k=num_words)).capitalize() + "."

    with (folder / "data.jsonl").open("w") as file:
        for i in range(num_samples):
            images = [f"images/{rng.randrange(NUM_IMAGES)}.x" for _ in range(rng.choices((0, 1, 3), (8, 90, 2))[0])]
            images = [n.replace(".x", ".png" if int(n[7:-2]) % 2 else ".jpg") for n in images]
            question = "<image>\n" * len(images) + text(rng.randrange(5, 60))
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": text(rng.randrange(50, 200))}]
            row = {"id": str(i), "conversations": turns} | ({"image": images} if images else {})
            file.write(json.dumps(row) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text(100) for _ in range(400)), trainer)
    (folder / "model").mkdir()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "model" / "chat_template.jinja").write_text(CHATML)
    return folder / "data.jsonl"


def run_peer(data: Path, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens and pixels of each sample, with Pillow and one tokenizer call a sample."""
    rule, render = describe(MODEL).image_rule, compile_template(CHATML, {})
    tokens, pixels = [], []
    with data.open() as file:
        for line in file:
            row = json.loads(line)
            names = iter(row.get("image", ()))
            messages, extra, area = [], 0, 0
            for turn in row["conversations"]:
                parts = []
                for i, piece in enumerate(turn["value"].split("<image>")):
                    if i:
                        with Image.open(data.parent / next(names)) as image:
                            width, height = image.size
                        extra += rule.count(width, height).tokens - 1
                        area += width * height
                        parts.append({"type": "image"})
                    if piece:
                        parts.append({"type": "text", "text": piece})
                messages.append({"role": "user" if turn["from"] == "human" else "assistant", "content": parts})
            tokens.append(len(tokenizer.encode(render(messages, None), add_special_tokens=False)) + extra)
            pixels.append(area)
    return tokens, pixels


def cpu_seconds() -> float:
    """CPU time of this process and of its finished workers."""
    usage = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usage)


def report(name: str, num_samples: int, wall_s: float, cpu_s: float) -> None:
    print(
        f"{name}: {num_samples / cpu_s:,.0f} samples a core second, {num_samples / wall_s:,.0f} a second of wall time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = draw(Path(folder) / "set", arguments.samples, seed=0)
        model = data.parent / "model"
        print(f"{arguments.samples} samples, {data.stat().st_size / 2**20:.1f} MiB of JSONL, {NUM_IMAGES} image files")
        for workers in (1, arguments.workers):
            wall, cpu = [], []
            for _ in range(arguments.repeats):
                start, cpu_start = time.perf_counter(), cpu_seconds()
                result = size_samples(data, image_rule=describe(MODEL).image_rule, tokenizer=model, workers=workers)
                wall.append(time.perf_counter() - start)
                cpu.append(cpu_seconds() - cpu_start)
            report(f"trimtab, {workers} worker(s)", arguments.samples, min(wall), min(cpu))
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        start, cpu_start = time.perf_counter(), cpu_seconds()
        tokens, _ = run_peer(data, tokenizer)
        elapsed, cpu_elapsed = time.perf_counter() - start, cpu_seconds() - cpu_start
        report("Pillow + tokenizer, one by one", arguments.samples, elapsed, cpu_elapsed)
        assert result.table.num_tokens.tolist() == tokens, "the peer counts other tokens"
        names = list((data.parent / "images").iterdir())
        start = time.process_time()
        ours = []
        for name in names:
            with name.open("rb", buffering=0) as file:
                ours.append(image_size(file.fileno()))
        middle = time.process_time()
        theirs = []
        for name in names:
            with Image.open(name) as image:
                theirs.append(image.size)
        ours_us, theirs_us = (1e6 * t / len(names) for t in (middle - start, time.process_time() - middle))
        print(f"one image header: {ours_us:.0f} us CPU, Pillow's Image.open {theirs_us:.0f} us")
        assert ours == theirs, "Pillow reads other sizes"


if __name__ == "__main__":
    main()
