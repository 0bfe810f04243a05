"""Drawn videos and frames, and records of them in every spelling. Needs Pillow; PyAV for files."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def draw_video(path: Path, *, width: int = 96, height: int = 64, num_frames: int = 30, fps: int = 10) -> Path:
    """A square that moves over a grey ground; the suffix says the container."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4" if path.suffix == ".mp4" else "libvpx", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(num_frames):
            pixels = np.full((height, width, 3), 90, np.uint8)
            pixels[8:24, number : number + 16] = (240, 8 * number % 256, 30)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def draw_frames(folder: Path, num: int, *, width: int = 96, height: int = 64) -> list[str]:
    """As images."""
    names = [f"frame{number}.png" for number in range(num)]
    for number, name in enumerate(names):
        Image.new("RGB", (width, height), (10 * number, 90, 30)).save(folder / name)
    return names


def records(folder: Path, *, files: bool) -> list[dict[str, Any]]:
    """One record of each spelling; what they name lies in `folder`. Without `files` no video but frames as images."""
    Image.new("RGB", (120, 60), (200, 40, 40)).save(folder / "c.png")
    frames = draw_frames(folder, 6)

    def chat(text: str) -> list[dict[str, str]]:
        return [{"from": "human", "value": text}, {"from": "gpt", "value": "a red cat"}]

    def parts(*content: dict[str, Any]) -> list[dict[str, Any]]:
        text = {"type": "text", "text": "what moves"}
        return [{"role": "user", "content": [*content, text]}, {"role": "assistant", "content": "a cat"}]

    without = [
        {"id": "frames", "messages": parts({"type": "video", "video": frames, "sample_fps": 2.0})},
        {"id": "text", "conversations": chat("what is in it")},
        {"id": "image", "image": "c.png", "conversations": chat("<image>\nwhat")},
        {"id": "column", "video": frames, "conversations": chat("what moves in <video>")},
    ]
    if not files:
        return without
    draw_video(folder / "a.mp4")
    draw_video(folder / "b.webm", width=64, height=96, num_frames=17, fps=8)
    return [
        {"id": "marked", "video": "a.mp4", "conversations": chat("<video>\nwhat moves")},
        {"id": "llava", "video": "b.webm", "conversations": chat("<image>\nwhat moves")},
        {"id": "both", "messages": parts({"type": "image", "image": "c.png"}, {"type": "video", "video": "a.mp4"})},
        {"id": "two", "videos": ["a.mp4", "b.webm"], "conversations": chat("<video> and <video>")},
        *without,
    ]


def own_records() -> list[dict[str, Any]]:
    """Content parts that ask for their own sampling of the files of `records`, as Qwen's cookbooks write them."""
    asked: tuple[dict[str, Any], ...] = (
        {"video": "a.mp4", "fps": 4, "max_frames": 8, "min_pixels": 3136, "max_pixels": 4 * 3136},
        {"video": "b.webm", "nframes": 5, "resized_height": 120, "resized_width": 60},
        {"video": "a.mp4", "fps": 8.0, "video_start": 0.55, "video_end": 2.2, "total_pixels": 40 * 3136},
    )
    return [
        {
            "id": f"own-{number}",
            "messages": [
                {"role": "user", "content": [{"type": "video", **part}, {"type": "text", "text": "what moves"}]},
                {"role": "assistant", "content": "a cat"},
            ],
        }
        for number, part in enumerate(asked)
    ]
