"""Run by test_videos.py in a process of its own: torchvision, or its stand-in, is there before Transformers is.

    python video_runs.py FOLDER FAMILY ...

Prints one JSON line for each family: what sizing, the real processor and the planned rows say of the same records.
With $TORCHVISION (a folder that holds an unpacked wheel) pixels are real, and compared; the stand-in's are black.
"""

# ruff: noqa: E402 - torchvision comes before what imports it

import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

if os.environ.get("TORCHVISION"):
    sys.path.append(os.environ["TORCHVISION"])
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("no compiled operators")
    import torchvision  # noqa: F401

    sys.path.pop()  # children, which have no such stand-in, shall not find it
REAL_PIXELS = importlib.util.find_spec("torchvision") is not None
if not REAL_PIXELS:
    from trimtab.models.asking.blank import install

    install()

import numpy as np
import torch
import transformers
from model_folders import write_model, write_plan_of
from PIL import Image
from video_cases import own_records, records

from trimtab.models.asking import images
from trimtab.models.images import asked as asked_clips
from trimtab.options import ReadingOptions, VideoOptions
from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.data.conversations import open_conversations
from trimtab.samples.rows import Slot, read_conversation
from trimtab.specs import Clip

HAS_AV = importlib.util.find_spec("av") is not None
KEYS = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")


def here(request: Any, question: str) -> Any:
    """The question put to this process instead of a child, which takes seconds to start."""
    answer = {"images": images.answer, "clips": images.answer_clips}[question]
    return json.loads(json.dumps(answer(json.loads(json.dumps(request, default=dict)))))


class RealProcessor:
    """The processor of a folder, its chat template and every frame decoded."""

    def __init__(self, folder: Path, data: Path, sampling: VideoOptions) -> None:
        self.processor = transformers.AutoProcessor.from_pretrained(folder)
        self.template = (folder / "chat_template.jinja").read_text()
        self.data = data
        self.sampling = {} if sampling.num_frames is None else {"num_frames": sampling.num_frames, "fps": None}

    def __call__(self, record: dict[str, Any]) -> Any:
        conversation = read_conversation(record)
        kinds: dict[Any, str] = {None: "image", Slot.VIDEO: "video"}
        turns = [
            {
                "role": m.role,
                "content": [
                    {"type": "text", "text": p} if isinstance(p, str) else {"type": kinds[p]} for p in m.content
                ],
            }
            for m in conversation.messages
        ]
        text = self.processor.apply_chat_template(turns, tokenize=False, chat_template=self.template)
        given: dict[str, Any] = {}
        if conversation.images:
            given["images"] = [Image.open(self.data / str(x)) for x in conversation.images]
        read = [self.video(video) for video in conversation.videos]
        if read:
            given |= {"videos": [x for x, _ in read], "video_metadata": [x for _, x in read], "return_metadata": True}
            is_listed = isinstance(conversation.videos[0].source, tuple)
            given |= {"do_sample_frames": False} if is_listed else self.sampling
            if conversation.videos[0].own:
                given |= {"do_sample_frames": False, "do_resize": False}
            if self.sampling and not is_listed:
                given["do_sample_frames"] = True
        return self.processor(text=[text], return_tensors="pt", **given)

    def video(self, video: Any) -> tuple[Any, dict[str, Any]]:
        if isinstance(video.source, tuple):
            frames = [np.asarray(Image.open(self.data / name)) for name in video.source]
            fps, duration = video.fps, None
        else:
            import av

            with av.open(str(self.data / video.source)) as container:
                frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
                fps = float(container.streams.video[0].average_rate)
            duration = len(frames) / fps
        known = {"total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
        if video.own:
            return self.own_video(video, frames, fps)
        return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2), {**known, "fps": fps, "duration": duration}

    def own_video(self, video: Any, frames: list[Any], fps: float) -> tuple[Any, dict[str, Any]]:
        """The frames that a content part asks for, resized as qwen_vl_utils does."""
        from torchvision.transforms import InterpolationMode, functional

        height, width = frames[0].shape[:2]
        processor = self.processor.video_processor
        clip = Clip(width=width, height=height, num_frames=len(frames), fps=fps, own=video.own)
        own = images.own_frames(clip, processor.patch_size, processor.merge_size)
        taken = torch.from_numpy(np.stack([frames[index] for index in own.indices])).permute(0, 3, 1, 2)
        taken = functional.resize(taken, [own.height, own.width], InterpolationMode.BICUBIC, antialias=True).float()
        known = {"total_num_frames": own.num_frames, "frames_indices": list(own.indices)}
        return taken, {**known, "fps": fps, "duration": own.num_frames / fps}


def run(folder: Path, family: str) -> dict[str, Any]:
    config = write_model(folder / "model", family, videos=True)
    (folder / "data").mkdir()
    data = folder / "data" / "data.jsonl"
    # videos of unlike lengths share no pack of LLaVA-OneVision, and no call of the processors without grids
    sampling = VideoOptions(num_frames=None if family.startswith("qwen") else 6)
    written = records(folder / "data", files=HAS_AV)
    if HAS_AV and REAL_PIXELS and family.startswith("qwen"):
        written += own_records()
    data.write_text("".join(json.dumps(record) + "\n" for record in written))
    options = {"dp": 1, "pp": 1, "num_microbatches": 2}
    sized = write_plan_of(folder, data, options, video=sampling)
    rows = open_conversations(folder / "plan", folder / "model", ReadingOptions(video=sampling))
    samples = [rows[row] for row in range(len(rows))]
    processor = RealProcessor(folder / "model", folder / "data", sampling)
    outputs = [processor(record) for record in written]
    return {
        "family": family,
        "names": [record["id"] for record in written],
        "sized": sized.table.num_tokens.tolist(),
        "patches": sized.table.num_patches.tolist(),
        "assumptions": sized.assumptions,
        "same_ids": [
            x["input_ids"].tolist() == y["input_ids"][0].tolist() for x, y in zip(samples, outputs, strict=True)
        ],
        "same_keys": [pixels_in(x) == pixels_in(y) for x, y in zip(samples, outputs, strict=True)],
        "apart": [difference(x, y) for x, y in zip(samples, outputs, strict=True)] if REAL_PIXELS else [],
        "rows": [num_rows(x, config) for x in samples],
        **packed(config, samples),
    }


def pixels_in(sample: Any) -> dict[str, list[int]]:
    return {key: list(sample[key].shape) for key in KEYS if key in sample}


def difference(sample: Any, output: Any) -> float:
    return max((float((sample[key] - output[key]).abs().max()) for key in KEYS if key in sample), default=0.0)


def num_rows(sample: Any, config: Any) -> int:
    """Rows of the tower, class tokens aside."""
    total = 0
    for key in ("pixel_values", "pixel_values_videos"):
        pixels = sample.get(key)
        if pixels is not None:
            side = 1 if pixels.dim() == 2 else pixels.shape[-1] // 14  # patches, or whole frames and tiles
            total += (len(pixels) if pixels.dim() == 2 else pixels.shape[:-3].numel()) * side * side
    return total


def packed(config: Any, samples: list[Any]) -> dict[str, Any]:
    """Largest difference of logits between a pack and its samples alone."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    collate = PackedCollator(model.config, vision_in_every_pack=False)

    def logits(*pack: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(**collate(list(pack))).logits[0]

    picked = samples[:3] + samples[-1:]
    whole, alone = logits(*picked), torch.cat([logits(sample) for sample in picked])
    return {"pack": float((whole - alone).abs().max()), "scale": float(alone.abs().max())}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    asked_clips.ask = here
    for name in sys.argv[2:]:
        made = Path(sys.argv[1]) / name
        made.mkdir()
        print("@" + json.dumps(run(made, name)), flush=True)
