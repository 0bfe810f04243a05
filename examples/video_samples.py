"""Draw small videos, size them for Qwen3-VL and pack them: `python examples/video_samples.py`.

Needs Transformers and torch, which the model's own video processor is asked of; no weights, no torchvision. With PyAV
(`pip install 'trimtab[video]'`) one video is a file, and its header is read; the others are frames given as images.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import trimtab
import trimtab.models

WIDTH, HEIGHT = 320, 240


def write_model(folder: Path) -> None:
    """What the Hub's folder of Qwen3-VL-2B holds, tokenizer and weights aside."""
    sides = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    images = {"processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"}
    files = {
        "config.json": trimtab.models.read_config("Qwen3-VL-2B"),
        "preprocessor_config.json": {**images, **sides, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            **sides,
            "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, default=dict))


def draw_frames(num: int) -> list[Any]:
    """A square that moves over a grey ground."""
    frames = []
    for number in range(num):
        pixels = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
        pixels[100:140, 2 * number : 2 * number + 40] = (240, 80, 30)
        frames.append(pixels)
    return frames


def write_data(folder: Path) -> Path:
    """Eight samples of four to eighteen frames; the last one is a file where PyAV is there to write it."""
    records = []
    for sample in range(8):
        names = []
        for number, pixels in enumerate(draw_frames(4 + 2 * sample)):
            names.append(f"{sample}-{number}.png")
            Image.fromarray(pixels).save(folder / names[-1])
        video = {"type": "video", "video": names, "sample_fps": 2}
        records.append(chat(f"frames {sample}", video))
    if importlib.util.find_spec("av") is not None:
        import av

        with av.open(str(folder / "square.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
            for pixels in draw_frames(120):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        records.append(chat("file", {"type": "video", "video": "square.mp4"}))
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(name: str, video: dict[str, Any]) -> dict[str, Any]:
    question = [video, {"type": "text", "text": "What moves?"}]
    answer = {"role": "assistant", "content": "A square, from left to right."}
    return {"id": name, "messages": [{"role": "user", "content": question}, answer]}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        data = write_data(folder)
        model = trimtab.describe(folder)
        rule = model.clip_rule
        assert rule is not None, "the folder holds the processor's files"
        hour = trimtab.models.Clip(width=1280, height=720, num_frames=108_000, fps=30.0)
        counts = rule.count_clip(hour).image
        print(f"an hour of 1280 x 720: {counts.tiles} inputs, {counts.patches:,} patches, {counts.tokens:,} tokens")
        sized = trimtab.size_samples(data, image_rule=model.image_rule, clip_rule=rule, tokenizer=None)
        print(f"{len(sized.table)} samples of {sized.table.num_tokens.min()} to {sized.table.num_tokens.max()} tokens")
        packed = trimtab.pack_samples(sized.table, limits=(12_000, 3_000), dp=2)
        figures = trimtab.report_packing(sized.table, packed)
        print(f"{figures.num_packs} packs, dist ratio of the cost {figures.dist_ratio_cost:.3f}")
        smaller = trimtab.models.clip_rule_of(model, trimtab.models.VideoOptions(video_max_pixels=4_194_304))
        assert smaller is not None
        counts = smaller.count_clip(hour).image
        print(f"with --video-max-pixels 4194304 the hour is {counts.patches:,} patches, {counts.tokens:,} tokens")


if __name__ == "__main__":
    main()
