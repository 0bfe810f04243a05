"""What a model's own processor makes of images and videos: run on blank ones, of which only sizes are looked at."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trimtab.errors import ConfigError, ImageError
from trimtab.models.asking.blank import blank
from trimtab.models.asking.forward import ForwardWatch, make_weightless
from trimtab.models.asking.inputs import find_encoder, first_int, vision_config
from trimtab.models.asking.layers import first_block
from trimtab.models.asking.model import build, complete, one_line
from trimtab.models.asking.processors import NUM_BYTES, load_processor
from trimtab.models.asking.units import split_units
from trimtab.models.images.rules import OwnSize, SmartResize
from trimtab.options import VideoOptions
from trimtab.specs import Clip

NO_IMAGE = "a"
FEWEST = 8  # tokens of an image that no placeholder stands for: fewer are marks around it
_PIXELS = re.compile(r"^(high_res_)?pixel_values(_images|_local)?$|^flattened_patches$|^image_patches$")
_CLIP = re.compile(r"^pixel_values(_videos)?$")
_GRIDS = re.compile(r"grid_(thw|hw)$|^(spatial_shapes|target_sizes|tgt_sizes)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One image (or clip) after its processor."""

    segments: tuple[int, ...]  # patches of each input that the tower attends over by itself
    tokens: int
    text: str | None  # what stands in the place of its placeholder, each run of its token written once

    def counts(self, extra_rows: int) -> list[int]:
        """Return the patches, tokens, tiles, patches squared: `extra_rows` class tokens with each segment."""
        rows = [x + extra_rows for x in self.segments]
        return [sum(rows), self.tokens, len(rows), sum(x * x for x in rows)]


class Looker:
    """Holds a processor, and the side of a patch."""

    def __init__(self, model_type: str, files: Mapping[str, Mapping[str, Any]], patch_size: int | None) -> None:
        self.processor = load_processor(model_type, files)
        self.token = self.processor_token("image") or "<image>"
        self.processor.tokenizer.convert_tokens_to_ids(self.token)
        self.patch_size = patch_size
        self.soft = self.token  # of an image's features, as its text was last found to repeat it
        self._found: dict[tuple[str, int], tuple[Any, ...]] = {}  # ways in which it takes images
        self._texts: list[str] = []
        for name in ("replace_image_token", "replace_video_token"):
            if hasattr(self.processor, name):
                setattr(self.processor, name, self._recorded(getattr(self.processor, name)))

    def processor_token(self, kind: str) -> str | None:
        token = getattr(self.processor, f"{kind}_token", None)
        return None if token is None else str(token)

    def run(self, sizes: Sequence[tuple[int, int]]) -> tuple[Any, list[str]]:
        """The processor's output for one sample of images of (width, height), and each image's text."""
        return self.call("images", len(sizes), sizes, _image)

    def look(self, width: int, height: int, copies: int = 1) -> Seen:
        """Return one image among `copies` alike in its sample."""
        output, texts = self.run([(width, height)] * copies)
        tokens, soft = self.count_tokens(output)
        if tokens < copies * (1 if self._expands("images") else FEWEST):
            raise ConfigError("its processor writes no token in the place of an image: only its model knows the rows")
        if tokens % copies:
            raise ConfigError("its processor does not treat equal images of one sample alike")
        segments = self.segments(output)
        if not all(segments):  # a tower without patches
            segments = [tokens // max(len(segments), 1)] * max(len(segments), 1)
        each = len(segments) // copies
        return Seen(segments=tuple(segments[:each]), tokens=tokens // copies, text=fold_runs(texts, soft))

    def segments(self, output: Mapping[str, Any], *, clip: bool = False) -> list[int]:
        """Count patches of every input of the tower: by the grids of the processor, else by the shapes of pixels."""
        kinds = _CLIP if clip else _PIXELS
        pixels = [value for key, value in output.items() if kinds.search(key)]
        shapes = [s for x in pixels for t in tensors_in(x) for s in self._shapes(t, one=isinstance(x, Tensor))]
        for key, value in output.items():
            if _GRIDS.search(key):
                rows = [[int(v) for v in row] for x in tensors_in(value) for row in x.reshape(-1, x.shape[-1])]
                grids = [h * w for *t, h, w in rows for _ in range(t[0] if t else 1)]
                if sum(grids) == sum(shapes) or 0 in shapes or not shapes:  # else they count something else than rows
                    return grids
        return shapes

    def _shapes(self, pixels: Tensor, *, one: bool) -> list[int]:
        """Return (..., channels, height, width) is a segment for each leading place; (..., rows, values) its rows.

        `one`: all pixels are this tensor, and not each input of the tower one. 0 where the shape does not say.
        """
        patch, shape = self.patch_size, pixels.shape
        if len(shape) >= 3 + one and shape[-3] in (1, 3, 4) and shape[-1] > 8:  # channels
            count, (height, width) = int(np.prod(shape[:-3])), shape[-2:]
            if patch is None or min(height, width) < patch:
                return [0]
            if (height, width) == (patch, patch):
                return [count]  # a patch each
            return [(height // patch) * (width // patch)] * count
        return [shape[1]] * shape[0] if len(shape) == 3 else [shape[0]]

    def call(
        self,
        kind: str,
        count: int,
        sizes: Sequence[tuple[int, int]],
        make: Callable[[str, int, int], Any],
        *,
        token: str | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[Any, list[str]]:
        """The output of the first way in which the processor takes its input, and the texts that it put in."""
        failed: Exception | None = None
        for way in self._ways(kind, token or self.token, count):
            device, prompt, nested, tensors = way[1:]
            media = [make(device, width, height) for width, height in sizes]
            self._texts.clear()
            try:
                output = self.processor(
                    text=[prompt] if nested else prompt, **{kind: [media] if nested else media}, **tensors, **more
                )
                _ = [int(x) for k, v in output.items() if _GRIDS.search(k) for t in tensors_in(v) for x in t.flatten()]
            except Exception as error:  # whatever a processor raises on an input that is not its own
                if failed is None or isinstance(failed, NotImplementedError):  # what pixels of no memory raise
                    failed = error
                continue
            self._found[kind, count] = way
            return output, list(self._texts)
        assert failed is not None
        raise failed

    def _ways(self, kind: str, token: str, count: int) -> Iterator[tuple[Any, ...]]:
        """Yield (kind, pixels' place, prompt, images nested by sample, other arguments); first the one that worked."""
        known = self._found.get((kind, count))
        if known is not None:
            yield known
            if kind == "videos":  # what it refuses now is the clip
                return
        begin, end = (self._word(self.processor, f"image_{x}_token", f"{x}_image_token") for x in ("start", "end"))
        prompts = [token * count, (begin + token + end) * count, "<image>" * count, NO_IMAGE]
        if not self._expands(kind):  # its tokens stand next to the text, not in it
            prompts.reverse()
        for device in ("meta", "cpu", "pil"):
            for nested in (False, True):
                for prompt in dict.fromkeys(prompts):
                    for tensors in ({}, {"return_tensors": "pt"}):
                        yield kind, device, prompt, nested, tensors

    def _expands(self, kind: str) -> bool:
        """Return whether it writes image tokens in the place of a placeholder."""
        name = f"replace_{kind.removesuffix('s')}_token"
        return getattr(type(self.processor), name) is not getattr(transformers.ProcessorMixin, name)

    def _word(self, own: Any, *names: str) -> str:
        return next((str(x) for name in names if (x := getattr(own, name, None))), "")

    def count_tokens(self, output: Mapping[str, Any]) -> tuple[int, str]:
        """Return how often the token that stands for an image's features is in the text, and the token."""
        ids = [
            int(x) for x in tree_leaves(output["input_ids"]) for x in (x.flatten() if isinstance(x, Tensor) else [x])
        ]
        tokenizer = self.processor.tokenizer
        named = Counter(ids)
        for number in [x for x in named if x < NUM_BYTES or x in tokenizer.all_special_ids[:7]]:
            del named[number]
        if not named:
            return 0, self.token
        own = [str(x) for kind in ("image", "video") if (x := self.processor_token(kind)) is not None]
        best, most = max(named.items(), key=lambda x: (x[1], tokenizer.convert_ids_to_tokens(x[0]) in own))
        self.soft = str(tokenizer.convert_ids_to_tokens(best))
        return most, self.soft

    def _recorded(self, function: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            text = function(*args, **kwargs)
            self._texts.append(text)
            return text

        return recorded


def _image(device: str, width: int, height: int) -> Any:
    if device == "pil":
        from PIL import Image

        return Image.new("RGB", (width, height))
    return blank(3, height, width, device=device)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield tensors in any nesting; arrays of numpy and plain numbers too, as far as they are one."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, np.ndarray):
        yield torch.from_numpy(value)
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(x, int) for x in tree_leaves(value)):
            with contextlib.suppress(ValueError):
                yield torch.tensor(value)
            return
        for x in value:
            yield from tensors_in(x)


def fold_runs(texts: list[str], soft: str) -> str | None:
    """Return what stands in the place of the first placeholder, each run of the image's token written once."""
    return re.sub(f"(?:{re.escape(soft)})+", lambda _: soft, texts[0]) if texts else None


# -- answering ------------------------------------------------------------------------------------------------------


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Count every size asked for; where the request gives a whole `config`, also what all sizes have in common.

    Rows are patches, tokens, tiles, patches squared, and the number of their text from 1, the first of which is none.
    A size that the processor refuses has its sentence in place of a row.
    """
    files = request["files"]
    config = request.get("config")
    made = None if config is None else complete(config)
    patch = request.get("patch_size") if made is None else find_patch_size(made)
    looker = Looker(request["model_type"], files, patch)
    extra = request.get("extra_rows", 0) if made is None else _extra_rows(made, looker)
    copies = request.get("copies", 1)
    seen: list[Seen | str] = []
    for width, height in request.get("sizes", ()):
        try:
            seen.append(looker.look(width, height, copies))
        except Exception as error:  # a processor refuses what it likes
            if config is not None and not any(isinstance(x, Seen) for x in seen) and len(seen) > 3:
                kind = type(looker.processor).__name__
                raise ConfigError(f"{kind} takes no image ({one_line(error)})") from None
            seen.append(" ".join(str(error).split())[:300])
    markup = None if config is None else _markup(looker, [x for x in seen if isinstance(x, Seen)])
    texts = [""] if markup else ["", *dict.fromkeys(x.text for x in seen if isinstance(x, Seen) and x.text)]
    numbers = {text: i + 1 for i, text in enumerate(texts)}
    rows = [x if isinstance(x, str) else [*x.counts(extra), numbers.get(x.text or "", 1)] for x in seen]
    return {
        "patch_size": patch,
        "extra_rows": extra,
        "rows": rows,
        "texts": texts,
        "token": looker.token,
        "soft": looker.soft,
        "markup": markup,
        "by_sample": config is not None and _differs_in_sample(looker),
    }


def find_patch_size(config: Any) -> int | None:
    """Return the side of a patch in pixels: the vision section's, else the first that any section names."""
    names = ("patch_size", "spatial_patch_size", "encoder_patch_size")
    found = first_int(vision_config(config), *names)
    sections = [x for x in vars(config).values() if hasattr(x, "to_dict")]
    return found or next((x for section in sections if (x := find_patch_size(section))), None)


def _markup(looker: Looker, seen: Sequence[Seen]) -> dict[str, str] | None:
    """The text of an image, where it is the same around any number of its token."""
    texts = {x.text for x in seen}
    if len(texts) != 1 or None in texts:
        return None
    text, soft = str(next(iter(texts))), looker.soft
    before, found, after = text.partition(soft)
    if not found or soft in after:
        return None
    return {"placeholder": looker.token, "soft": soft, "before": before, "after": after}


def _differs_in_sample(looker: Looker) -> bool:
    """Return whether an image counts otherwise where it is not alone."""
    try:
        return looker.look(1000, 700, 2) != looker.look(1000, 700)
    except Exception:  # one image a sample is all it takes
        return False


def _extra_rows(config: Any, looker: Looker) -> int:
    """Return class tokens and registers of each input: rows of the tower next to its patches; 0 where it cannot run."""
    try:
        model = build(config)
        units = split_units(model)
        make_weightless(model)
        encode = find_encoder(model)
        if encode is None:
            return 0
        output, _ = looker.run([(512, 512)])
        segments = looker.segments(output)
        names = set(inspect.signature(encode).parameters)
        given = {k: _pixels_of(v) for k, v in output.items() if k in names}
        block = first_block(units, "vision")
        if block is None:
            return 0
        seen = ForwardWatch(units).run(partial(encode, **given)).ran[block.path]
        extra, rest = divmod(seen.rows_in - sum(segments), len(segments))
        return extra if rest == 0 and 0 < extra < 64 else 0
    except Exception:  # of any class that the model's own code likes
        return 0


def _pixels_of(value: Any) -> Any:
    tensors = list(tensors_in(value))
    if not tensors:
        return value
    made = [torch.ones(x.shape, dtype=torch.bfloat16) if x.is_floating_point() else x for x in tensors]
    return made[0] if len(made) == 1 and isinstance(value, Tensor) else torch.stack(made)


# -- videos: frames sampled, cut and written into the text by the processor's rules -----------------------------------


def run_clip(looker: Looker, clip: Clip, given: Any = None, **more: Any) -> tuple[Any, list[str]]:
    """The processor's output for one video, of which it samples what it will, and the text that it put in.

    `given`: its frames (frames, 3, height, width), or the name of a file that `fetch_videos` of its video processor
    reads; None: blank ones, which take no memory. Frames that a content part asked for are taken and resized already.
    """
    token = looker.processor_token("video")
    if token is None or not hasattr(looker.processor, "video_processor"):
        raise ConfigError("it takes no videos: leave such samples out")
    indices, total = tuple(range(clip.num_frames)), clip.num_frames
    width, height = clip.width, clip.height
    if clip.own:
        own = frames_of(looker, clip)
        indices, total, width, height = own.indices, own.num_frames, own.width, own.height
        more["do_resize"] = False
    metadata = {
        "total_num_frames": total,
        "frames_indices": list(indices),
        "fps": clip.fps,
        "duration": None if clip.fps is None else total / clip.fps,
        "width": width,
        "height": height,
    }
    more |= {"video_metadata": [metadata], "return_metadata": True}
    if clip.listed or clip.own:
        more["do_sample_frames"] = False
    make = partial(_blank_frames, len(indices)) if given is None else lambda *_: given
    return looker.call("videos", 1, [(width, height)], make, token=token, more=more)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFrames:
    """The frames of a file that a content part asks for, as `fetch_video` of qwen_vl_utils 0.0.14 takes and resizes."""

    indices: tuple[int, ...]
    num_frames: int  # between `video_start` and `video_end`
    width: int
    height: int


def own_frames(clip: Clip, patch_size: int, merge_size: int) -> OwnFrames:
    """Return what is taken of a clip with sampling of its own; `ImageError` where that cannot be had.

    n = fps x seconds, 2 frames a second by default, within min_frames (4) and max_frames (768), or `nframes`; an even
    number, evenly spread. A frame has 128 to 768 tokens by default, and all of them 115,200 at most, two frames a time.
    """
    own = dict(clip.own)
    if clip.fps is None or {"fps", "nframes"} <= own.keys():
        raise ImageError("a content part asks for fps and nframes: give one of them")
    # 1. the range
    last, end_s = clip.num_frames - 1, clip.num_frames / clip.fps
    first = math.ceil(min(own.get("video_start", 0.0), end_s) * clip.fps)
    if "video_end" in own:
        last = min(math.floor(min(own["video_end"], end_s) * clip.fps), last)
    if (first, last) != (0, clip.num_frames - 1) and first >= last:
        raise ImageError(f"a content part asks for frames {first} to {last} of {clip.num_frames}: correct video_start")
    total = last - first + 1
    # 2. how many of them
    if "nframes" in own:
        num = round(own["nframes"] / 2) * 2
    else:
        fewest = math.ceil(own.get("min_frames", 4) / 2) * 2
        most = math.floor(own.get("max_frames", min(768, total)) / 2) * 2
        num = math.floor(min(max(total / clip.fps * own.get("fps", 2.0), fewest), most, total) / 2) * 2
    if not 2 <= num <= total:
        raise ImageError(f"a content part asks for {num} of {total} frames: give nframes of 2 to {total}")
    indices = torch.linspace(first, last, num).round().long().tolist()
    # 3. their size
    f = patch_size * merge_size
    lowest = own.get("min_pixels", 128.0 * f * f)
    highest = max(min(768.0 * f * f, own.get("total_pixels", 115_200.0 * f * f) / num * 2), int(lowest * 1.05))
    size = OwnSize(
        min_pixels=lowest,
        max_pixels=min(own.get("max_pixels", highest), highest),
        resized_height=own.get("resized_height"),
        resized_width=own.get("resized_width"),
    )
    rule = SmartResize(patch_size=patch_size, merge_size=merge_size, min_pixels=1, max_pixels=1)  # limits: `size`
    width, height = size.of(clip.width, clip.height, rule)
    return OwnFrames(indices=tuple(indices), num_frames=total, width=width, height=height)


def frames_of(looker: Looker, clip: Clip) -> OwnFrames:
    """Return what a content part asks of its own video; `ConfigError` where the processor is not Qwen's."""
    processor: Any = getattr(looker.processor, "video_processor", None)
    if type(processor).__name__ not in ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"):
        asked = ", ".join(name for name, _ in clip.own)
        raise ConfigError(f"a content part asks for its own sampling ({asked}), which only Qwen's videos have: drop it")
    return own_frames(clip, processor.patch_size, processor.merge_size)


def see_clip(looker: Looker, output: Mapping[str, Any], texts: list[str]) -> Seen:
    """Return what `run_clip` made; its text always says something."""
    tokens, soft = looker.count_tokens(output)
    text = fold_runs(texts, soft)
    if not text or not tokens:
        raise ConfigError("it writes no tokens in the place of a video: leave such samples out")
    return Seen(segments=tuple(looker.segments(output, clip=True)), tokens=tokens, text=text)


def answer_clips(request: Mapping[str, Any]) -> dict[str, Any]:
    """Count every clip asked for: rows as those of images, with rows and columns of patches of its first input.

    The two are 0 where no grid says them. A clip that the processor refuses has its sentence in place of a row.
    """
    looker = Looker(request["model_type"], request["files"], request["patch_size"])
    set_sampling(looker, VideoOptions(**request["sampling"]))
    texts: dict[str, int] = {}
    rows: list[list[int] | str] = []
    for asked in request["clips"]:
        clip = Clip(**{**asked, "own": tuple((name, value) for name, value in asked["own"])})
        try:
            seen = see_clip(looker, *(run := run_clip(looker, clip)))
            number = texts.setdefault(str(seen.text), len(texts) + 1)
            rows.append([*seen.counts(request["extra_rows"]), number, *_sides(run[0])])
        except Exception as error:  # a processor refuses what it likes
            rows.append(" ".join(str(error).split())[:300])
    return {"rows": rows, "texts": list(texts), "clip_token": looker.processor_token("video"), "soft": looker.soft}


def set_sampling(looker: Looker, sampling: VideoOptions) -> None:
    """The user's own settings in the place of those of the files; `ConfigError` where the processor has none such."""
    processor = getattr(looker.processor, "video_processor", None)
    asked = {name: value for name, value in asdict(sampling).items() if value is not None}
    if processor is None or not asked:
        return
    sides = {"video_min_pixels": "shortest_edge", "video_max_pixels": "longest_edge"}
    size = dict(processor.size or {})
    for name, value in asked.items():
        known = (
            sides[name] in size and len(size) == 2 if name in sides else name in processor.valid_kwargs.__annotations__
        )
        if not known:
            raise ConfigError(f"{type(processor).__name__} has no setting {name} {value}: leave it out")
        if name in sides:
            size[sides[name]] = value
        else:
            setattr(processor, name, value)
            processor.do_sample_frames = True
    if asked.keys() & sides.keys():
        processor.size = type(processor.size)(**size)
    for name, other in (("fps", "num_frames"), ("num_frames", "fps")):
        if name in asked and other not in asked and getattr(processor, other, None) is not None:
            try:  # most take one of the two, and the files may have set the other
                see_clip(looker, *run_clip(looker, Clip(width=256, height=256, num_frames=96, fps=24.0)))
            except ValueError as error:
                if "mutually exclusive" in str(error):
                    setattr(processor, other, None)


def _blank_frames(num_frames: int, device: str, width: int, height: int) -> Tensor:
    return blank(num_frames, 3, height, width, device="meta" if device == "meta" else "cpu")


def _sides(output: Mapping[str, Any]) -> tuple[int, int]:
    grids = [tensor for key, value in output.items() if key.endswith("grid_thw") for tensor in tensors_in(value)]
    return (int(grids[0].reshape(-1, 3)[0, 1]), int(grids[0].reshape(-1, 3)[0, 2])) if grids else (0, 0)
