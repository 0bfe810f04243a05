"""Images and videos: their sizes against Pillow's and PyAV's, or an error of ours."""

import io
import math
import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tests.fuzz.damage import damaged

from trimtab.errors import ImageError
from trimtab.samples.media import MAX_FRAME_PIXELS, MAX_PIXELS, image_size, read_clip, read_frames
from trimtab.samples.problems import BadRecordError

Try = Callable[[int], None]


def headers(_folder: Path) -> Try:
    """Images: the size is Pillow's, plain and turned, or an `ImageError`."""
    images = []
    noise = Image.effect_noise((64, 48), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "JPEG2000", "PPM", "AVIF"):
        for options in ({}, {"exif": exif.tobytes()}):
            file = io.BytesIO()
            with suppress(OSError, KeyError):  # a kind that this Pillow cannot write
                noise.save(file, kind, **options)
                images.append(file.getvalue())

    def pillows(content: bytes, turned: bool) -> tuple[int, int] | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with Image.open(io.BytesIO(content)) as image:
                    return ImageOps.exif_transpose(image).size if turned else image.size
            except Exception:
                return None

    def decodes(content: bytes) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                Image.open(io.BytesIO(content)).load()
            except Exception:
                return False
        return True

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        content = damaged(draw.choice(images), draw, head=400)
        for exif_mode in ("ignore", "apply"):
            try:
                size = image_size(content, exif=exif_mode)
            except ImageError:
                continue
            assert size[0] * size[1] <= MAX_PIXELS
            theirs = pillows(content, exif_mode == "apply")
            # an image that Pillow does not decode has no size, whatever its headers say
            assert theirs in (None, size) or not decodes(content), f"{exif_mode}: {size}, and Pillow says {theirs}"

    return try_seed


def videos(_folder: Path) -> Try:
    """Videos: a clip that has pixels, frames and a rate, and frames of its size; or a `BadRecordError`."""
    import av

    files = []
    for kind, codec in (("mp4", "mpeg4"), ("mov", "mjpeg"), ("avi", "mpeg4"), ("webm", "libvpx"), ("matroska", "ffv1")):
        file = io.BytesIO()
        with av.open(file, "w", format=kind) as container:
            stream = container.add_stream(codec, rate=10)
            stream.width, stream.height = 48, 32
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            for number in range(6):
                frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 40 * number, np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        files.append(file.getvalue())

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        content = draw.choice(files)
        # containers keep what says sizes and counts at either end
        content = damaged(content, draw, head=len(content) if draw.random() < 0.5 else 900)
        with suppress(BadRecordError):
            clip = read_clip(io.BytesIO(content), "video")
            assert min(clip.width, clip.height, clip.num_frames) > 0
            assert 0 < clip.fps < math.inf
            assert clip.width * clip.height <= MAX_FRAME_PIXELS
            frames = read_frames(io.BytesIO(content), "video", [0, min(5, clip.num_frames - 1)])
            assert frames.dtype == np.uint8
            assert frames.shape[0] == 2

    return try_seed


TARGETS: dict[str, Callable[[Path], Try]] = {"headers": headers, "videos": videos}
