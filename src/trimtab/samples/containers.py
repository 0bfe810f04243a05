"""Video files by PyAV: what their header says, and the frames that were sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trimtab.errors import ConfigError
from trimtab.samples.problems import BadRecordError, shorten
from trimtab.specs import Clip

MAX_FRAME_PIXELS = 2**26
"""Twice those of 8K: a decoder holds several frames, and larger ones would take gigabytes before any is looked at."""

_DAMAGED = "replace or drop it"
_HEAD_BYTES = 400
_DEMUXERS = (  # first bytes, where they stand, FFmpeg's demuxer: none of these opens a second file or a connection
    *((kind, 4, "mov") for kind in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")),
    (b"\x1aE\xdf\xa3", 0, "matroska"),
    (b"AVI ", 8, "avi"),
    (b"OggS", 0, "ogg"),
    (b"FLV\x01", 0, "flv"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", 0, "asf"),
    (b"\x00\x00\x01\xba", 0, "mpeg"),
    (b"GIF8", 0, "gif"),
)
_TRANSPORT = "mpegts"  # a packet of 188 bytes begins with G


def read_clip(file: BinaryIO, name: str) -> Clip:
    """Size, frames and frames a second of the first video stream; nothing is decoded.

    As Transformers' reader by PyAV sees them: sides as coded (no rotation), the average rate. Where the header does not
    count the frames (WebM, MKV), the packets are. Raises `BadRecordError` of kind video.
    """
    with _opened(file, name) as (container, stream):
        num_frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        rate = stream.average_rate
        if not num_frames or not rate or not _has_sides(stream):
            found = f"{num_frames} frames of {stream.width} x {stream.height} at {rate or 0} a second"
            raise BadRecordError("video", f"{name} holds {found}: {_DAMAGED}")
        return Clip(width=stream.width, height=stream.height, num_frames=num_frames, fps=float(rate))


def read_frames(file: BinaryIO, name: str, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
    """The frames of these numbers (ascending, repeats kept) as (frames, height, width, 3); `BadRecordError` if not all.

    Decoded from the start up to the last one: no seeking, so that numbers are those of the header in any file.
    """
    wanted, found = set(indices), dict[int, npt.NDArray[np.uint8]]()
    with _opened(file, name) as (container, stream):
        if not _has_sides(stream):
            raise BadRecordError("video", f"{name} holds frames of {stream.width} x {stream.height}: {_DAMAGED}")
        stream.thread_type = "AUTO"
        sides = stream.height, stream.width
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                if (frame.height, frame.width) != sides:
                    told = f"frame {number} of {frame.width} x {frame.height} pixels after a header of another size"
                    raise BadRecordError("video", f"{name} holds {told}: {_DAMAGED}")
                found[number] = frame.to_ndarray(format="rgb24")
            if len(found) == len(wanted):
                break
    if len(found) < len(wanted):
        missing = min(wanted - found.keys())
        raise BadRecordError("video", f"{name} ends before frame {missing}, which its header counts: {_DAMAGED}")
    return np.stack([found[number] for number in indices])


def _has_sides(stream: Any) -> bool:
    pixels: int = stream.width * stream.height
    return 0 < pixels <= MAX_FRAME_PIXELS


@contextmanager
def _opened(file: BinaryIO, name: str) -> Iterator[tuple[Any, Any]]:
    try:
        import av
    except ModuleNotFoundError:
        raise ConfigError(
            "videos are read by PyAV, which is not installed: pip install 'trimtab[video]', or give width, height, fps "
            "and num_frames in every record"
        ) from None
    try:
        demuxer = _demuxer(file, name)
        with av.open(file, mode="r", format=demuxer, options={"protocol_whitelist": ""}, io_open=_refuse) as container:
            if not container.streams.video or container.streams.video[0].codec_context is None:
                raise BadRecordError("video", f"{name} holds no video stream that can be decoded: {_DAMAGED}")
            yield container, container.streams.video[0]
    except BadRecordError:
        raise
    except (av.FFmpegError, OSError, ValueError, MemoryError) as error:  # as FFmpeg's readers fail
        raise BadRecordError("video", f"{name} cannot be read as a video ({shorten(str(error))}): {_DAMAGED}") from None


def _demuxer(file: BinaryIO, name: str) -> str:
    """The demuxer that the first bytes ask for; FFmpeg, left to guess, takes playlists and session descriptions too."""
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    found = next((kind for mark, at, kind in _DEMUXERS if head[at : at + len(mark)] == mark), None)
    if found is None and all(head[at : at + 1] == b"G" for at in (0, 188, 376)):
        found = _TRANSPORT
    if found is None:
        raise BadRecordError(
            "video",
            f"{name} begins with {head[:8]!r}, no MP4, MOV, WebM, MKV, AVI, MPEG, FLV, WMV, OGV or GIF: convert it",
        )
    return found


def _refuse(url: str, *_: Any) -> Any:
    raise BadRecordError("video", f"it names another file, {shorten(url)}: {_DAMAGED}")
