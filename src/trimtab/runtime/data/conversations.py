"""Rows of a plan as the samples that a packed collator takes: ids, labels, and images as the processor cuts them."""

from __future__ import annotations

import contextlib
import io
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import AutoImageProcessor

from trimtab.errors import PlanError, SampleError, UnknownModelError, UnsupportedPlanError, join_problems
from trimtab.models.asking.inputs import image_token
from trimtab.models.asking.model import complete, library_reads
from trimtab.models.asking.processors import processor_class
from trimtab.models.describe import describe, read_config
from trimtab.models.families import PackFormat, family_of
from trimtab.models.images.rules import UnsettledRule, rule_in_sample
from trimtab.options import ReadingOptions
from trimtab.plan.file.figures import model_fingerprint
from trimtab.plan.file.records import PlannedRecords, open_records
from trimtab.plan.file.yaml import load_plan
from trimtab.plan.layout import refuse_remote_code
from trimtab.plan.plan import ModelInput
from trimtab.runtime.data.formats import (
    GRIDS,
    TOKEN_TYPE_KEYS,
    VideoReader,
    alike_videos,
    pack_format,
    pixel_keys,
)
from trimtab.samples.encode import ConversationEncoder
from trimtab.samples.lengths import CountImage, image_counter
from trimtab.samples.media import MediaFolder, MediaFolders
from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import Conversation, read_conversation
from trimtab.samples.shapes import columns_next_to, read_columns
from trimtab.samples.tokens import TokenizerFiles, read_tokenizer
from trimtab.specs import ModelSpec

# What a Transformers processor gives for one conversation, checked and brought to one shape.


_OWN_KEYS = frozenset(
    {"input_ids", "labels", "assistant_masks", "attention_mask", "loss_weight", "id", *TOKEN_TYPE_KEYS}
)

IGNORED = -100
"""The label that Transformers and `torch.nn.functional.cross_entropy` leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedSample:
    """One sample of a pack; vectors are (tokens,) int64."""

    input_ids: Tensor
    labels: Tensor
    token_types: Tensor  # 0 text, 1 image, 2 video
    weight: float
    images: Mapping[str, Tensor]  # the family's keys, first dimension images, patches or frames

    @property
    def grids(self) -> dict[str, Tensor]:
        """Return what M-RoPE positions depend on apart from the token types."""
        return {key: self.images[key] for key in GRIDS if key in self.images}


def read_processed(samples: Sequence[Mapping[str, Any]], config: Any, family: PackFormat) -> list[ProcessedSample]:
    """Raises `SampleError` with all problems of all samples, each named by its `id` or its place in the pack."""
    read, problems = [], []
    pieces = image_token(config), getattr(config, "video_token_id", None)  # asked once: a third of the time of a pack
    for place, sample in enumerate(samples):
        name = f"sample {sample['id']}" if "id" in sample else f"sample {place} of the pack"
        try:
            read.append(_read_one(sample, family, config.model_type, pieces))
        except SampleError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise SampleError(join_problems(problems))
    return read


def _read_one(
    sample: Mapping[str, Any], family: PackFormat, model_type: str, pieces: tuple[int | None, int | None]
) -> ProcessedSample:
    unknown = sorted(set(sample) - _OWN_KEYS - set(family.joined))
    if unknown:
        raise SampleError(f"packs of {model_type} have no place for {', '.join(unknown)}: remove it")
    if "input_ids" not in sample:
        raise SampleError("input_ids are missing: give what the processor returns")
    ids = _vector(sample, "input_ids")
    if len(ids) == 0:
        raise SampleError("it has no tokens: leave it out, or give a filler")
    given = {key: _vector(sample, key) for key in _VECTORS if sample.get(key) is not None}
    for key, vector in given.items():
        if len(vector) != len(ids):
            raise SampleError(f"{key} has {len(vector)} entries, input_ids {len(ids)}")
    if "attention_mask" in given and not bool((given["attention_mask"] == 1).all()):
        raise SampleError("it is padded: process samples with padding=False")
    weight = float(sample.get("loss_weight", 1.0))
    if not 0 <= weight < float("inf"):
        raise SampleError(f"loss_weight must be finite and at least 0, not {weight}")
    images = {key: _stack(sample[key]) for key in family.joined if sample.get(key) is not None and len(sample[key]) > 0}
    types = _token_types(given, ids, *pieces)
    if "batch_num_images" in family.joined and "image_sizes" in images and "batch_num_images" not in images:
        images["batch_num_images"] = torch.ones(len(images["image_sizes"]), dtype=torch.int64)
    return ProcessedSample(input_ids=ids, labels=_labels(given, ids), token_types=types, weight=weight, images=images)


_VECTORS = ("labels", "assistant_masks", "attention_mask", *TOKEN_TYPE_KEYS)


def _labels(given: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    if "labels" in given:
        return given["labels"]
    if "assistant_masks" in given:
        return torch.where(given["assistant_masks"] == 1, ids, IGNORED)
    raise SampleError("labels are missing: give them, or assistant_masks from the chat template")


def _token_types(given: Mapping[str, Tensor], ids: Tensor, image: int | None, video: int | None) -> Tensor:
    for key in TOKEN_TYPE_KEYS:
        if key in given:
            return given[key]
    types = torch.zeros_like(ids) if image is None else (ids == image).long()
    return types if video is None else torch.where(ids == video, 2, types)


def _vector(sample: Mapping[str, Any], key: str) -> Tensor:
    value = sample[key]
    if type(value) is list and value and type(value[0]) is int:  # five times as fast as torch, and ids mostly are lists
        with suppress(TypeError, OverflowError):  # of what is no row of whole numbers, torch says more
            return torch.frombuffer(array("q", value), dtype=torch.int64)
    tensor = torch.as_tensor(value)
    if tensor.dim() == 2 and tensor.shape[0] == 1:  # a processor's batch of one
        tensor = tensor[0]
    if tensor.dim() != 1:
        raise SampleError(f"{key} is {tuple(tensor.shape)}, not one row: give each conversation by itself")
    return tensor.long()


def _stack(value: Any) -> Tensor:
    if isinstance(value, (list, tuple)) and not isinstance(value[0], (int, float)):
        return torch.stack([torch.as_tensor(part) for part in value])
    return torch.as_tensor(value)


# What stands in for a sample that could not be read: the same size, and no weight in the loss.


class UnreadableSampleError(SampleError):
    """A sample whose record or media cannot be read: a filler may stand for it, as for no sample that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingSample:
    """A sample that is missing, and how large the plan takes it to be."""

    row: int
    sample_id: str
    reason: str
    num_tokens: int
    num_patches: int
    num_images: int

    def __str__(self) -> str:
        return (
            f"sample {self.sample_id} (row {self.row} of the plan) cannot be read ({self.reason}): a filler of "
            f"{self.num_tokens} tokens without weight takes its place"
        )


def make_text_filler(filler: MissingSample) -> dict[str, torch.Tensor]:
    """Return as many tokens as the sample has, none of them with a label; no images.

    The language model computes what was planned, the vision tower less: it has `num_patches` rows fewer.
    """
    length = max(1, filler.num_tokens)
    return {"input_ids": torch.zeros(length, dtype=torch.int64), "labels": torch.full((length,), IGNORED)}


_UNREADABLE = ("json", "type", "path", "image", "video")
"""Kinds of bad records that say nothing about tokenizer and template."""


def open_conversations(
    plan: Path | str, model: Path | str, options: ReadingOptions | None = None, *, data: list[Path] | None = None
) -> PlannedConversations:
    """The samples of a plan folder, for the model in the folder `model` (config.json, its preprocessor, its tokenizer).

    Use it as the data of a `PlanDataset`: item i is row i of the plan as token ids, labels and pixels.
    docs/howto-trainer.md is a whole run.

    Raises `PlanError` where the model is another than the plan's, `ConfigError` where its files do not say enough.
    """
    options = options or ReadingOptions()
    reader = open_reader(load_plan(plan).inputs.model, Path(model), options)
    return PlannedConversations(open_records(plan, data, options.media_root, allowed=options.allowed), reader)


def open_reader(given: ModelInput, folder: Path, options: ReadingOptions) -> ConversationReader:
    """Return what encodes conversations as they were sized for the plan's model `given`, which lies in `folder`."""
    spec = describe(folder, max_pixels=given.max_pixels, max_tiles=given.max_tiles)
    if model_fingerprint(spec) != given.layers_blake2b:
        if isinstance(spec.image_rule, UnsettledRule):
            raise PlanError(f"{folder} has no preprocessor_config.json or processor_config.json: add it")
        raise PlanError(f"the model in {folder} is not the plan's {given.name}: name its folder, or plan again")
    tokenizer = read_tokenizer(
        options.tokenizer or folder,
        chat_template=options.chat_template,
        markup=family_of(spec.family).markup or spec.image_markup,
        special_tokens=options.special_tokens,
    )
    return ConversationReader(spec, tokenizer, folder, options=options, limits=given)


@dataclass(slots=True)
class _Opened:
    """What every process opens for itself."""

    encoder: ConversationEncoder
    count_image: CountImage
    processor: Any
    media: MediaFolders
    videos: VideoReader | None = None  # made with the first


class PlannedConversations:
    """Item i is row i of the plan as a processed sample: see `PackedCollator` for its keys.

    A row that comes out with another number of tokens than the plan counted raises `SampleError`, one whose record or
    media cannot be read `UnreadableSampleError`. Objects go to worker processes.
    """

    def __init__(self, records: PlannedRecords, reader: ConversationReader) -> None:
        self.records = records
        self.model = reader.model
        self._reader = reader

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> dict[str, Any]:
        records, place = self.records, self.records.place(row)

        def load(folders: MediaFolders) -> LoadedConversation:
            columns = self._reader.columns or columns_next_to(place.file)
            conversation = read_conversation(records[row], columns=columns)
            media = folders.of(place.file, records.media_root(row))
            return LoadedConversation(conversation, [media.read(image) for image in conversation.images], media)

        name, expected = records.samples.sample_id(row), int(records.samples.num_tokens[row])
        return self._reader.encode(name, str(place), expected, load)


@dataclass(frozen=True, slots=True)
class LoadedConversation:
    """A conversation and the bytes of its images."""

    conversation: Conversation
    images: list[bytes]
    media: MediaFolder  # where its videos lie


class ConversationReader:
    """Encodes conversations for a `PackedCollator`.

    Ids are those that sizing counted; the assistant's turns are learnt, ends of turn included, nothing else. Images
    are decoded with Pillow and cut by the model's own image processor (its Pillow backend).
    """

    def __init__(
        self,
        model: ModelSpec,
        tokenizer: TokenizerFiles,
        preprocessor: Path,
        *,
        options: ReadingOptions,
        limits: ModelInput,
    ) -> None:
        self.model = model
        self.columns = read_columns(options.columns)
        self._tokenizer = tokenizer
        self._preprocessor = preprocessor
        self._options = options
        self._limits = limits
        self._keys = _pack_keys(model, preprocessor)
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def encode(
        self, name: str, place: str, expected: int, load: Callable[[MediaFolders], LoadedConversation]
    ) -> dict[str, Any]:
        """Return what `load` reads at `place` as a processed sample of `expected` tokens."""
        if self._opened is None:
            options = self._options
            self._opened = _Opened(
                ConversationEncoder(self._tokenizer),
                image_counter(self.model.image_rule),
                _image_processor(self._preprocessor, self._limits, self.model.family),
                MediaFolders(None, allowed=options.allowed, exif=options.exif),
            )
        opened = self._opened
        try:
            loaded = load(opened.media)
            conversation, media = loaded.conversation, loaded.media
            if conversation.rejected is not None:
                raise BadRecordError(
                    "template", "it has two answers, and one is learnt here: train pairs in your own trainer"
                )
            pictures = self._decode_all(loaded)
            counts = [opened.count_image(len(pictures), picture.width, picture.height) for picture in pictures]
            if conversation.videos and opened.videos is None:
                opened.videos = VideoReader(self.model, self._options.video)
            videos = [opened.videos.read(x, media, self._decode) for x in conversation.videos] if opened.videos else []
            encoded = opened.encoder.encode(conversation, counts, [x for x, _ in videos])
        except BadRecordError as error:
            kind = UnreadableSampleError if error.kind in _UNREADABLE else SampleError
            raise kind(f"sample {name} ({place}): {error}") from None
        if len(encoded.input_ids) != expected:
            raise SampleError(
                f"sample {name} ({place}) has {len(encoded.input_ids)} tokens, sized at {expected}: "
                "train with the tokenizer and template of the sizing, or plan again"
            )
        ids, learnt = torch.from_numpy(encoded.input_ids), torch.from_numpy(encoded.learnt)
        sample = {"id": name, "input_ids": ids, "labels": torch.where(learnt, ids, IGNORED)}
        tensors = [x for _, x in videos]
        if not pictures or any("pixel_values" in x for x in tensors):  # of both kinds in one array: in their order
            slots = [part for message in conversation.messages for part in message.content if not isinstance(part, str)]
            alone, clips = iter(pictures), iter(tensors)
            media_in_order = [self._pixels(opened, [next(alone)]) if x is None else next(clips) for x in slots]
        else:
            media_in_order = [self._pixels(opened, pictures), *tensors]
        for key in self._keys:
            parts = [x[key] for x in media_in_order if key in x]
            if parts:
                sample[key] = torch.cat(alike_videos(key, parts))
        if any(not pixel_keys(x) & set(self._keys) for x in tensors):
            raise UnsupportedPlanError(
                f"sample {name} ({place}) holds a video, {self.model.family} packs none: leave it out"
            )
        return sample

    def _decode_all(self, loaded: LoadedConversation) -> list[Image.Image]:
        """Return the images, each in the size that its content part asks for."""
        pictures = [self._decode(content) for content in loaded.images]
        for i, own in enumerate(loaded.conversation.own_sizes):
            if own is not None:
                width, height = pictures[i].size
                pictures[i] = pictures[i].resize(own.of(width, height, self.model.image_rule))
        return pictures

    def _decode(self, content: bytes) -> Image.Image:
        try:
            with Image.open(io.BytesIO(content)) as image:
                turned = ImageOps.exif_transpose(image) if self._options.exif == "apply" else image
                return turned.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow's decoders raise
            raise BadRecordError("image", f"an image cannot be decoded ({error}): replace or drop it") from None

    def _pixels(self, opened: _Opened, pictures: list[Image.Image]) -> dict[str, Tensor]:
        rule = self.model.image_rule  # some processors cut images of one sample otherwise than lone ones
        nested = rule_in_sample(rule, len(pictures)) != rule
        return dict(opened.processor(images=[pictures] if nested else pictures, return_tensors="pt"))


def _pack_keys(model: ModelSpec, folder: Path) -> tuple[str, ...]:
    refuse_remote_code(model)
    return pack_format(complete(read_config(folder))).joined


def _image_processor(folder: Path, limits: ModelInput, family: str) -> Any:
    """The model's image processor under the user's own limits; nothing is fetched, and no code of the folder runs."""
    with library_reads(f"reads no image processor in {folder}", "download its preprocessor_config.json again"):
        processor = AutoImageProcessor.from_pretrained(
            folder, backend="pil", trust_remote_code=False, local_files_only=True
        )
    with contextlib.suppress(UnknownModelError):  # a processor may switch on what the file of its part does not
        given = getattr(processor_class(family, {}), "images_kwargs", None)
        for name, value in given.items() if isinstance(given, dict) else ():
            setattr(processor, name, value)
    if limits.max_pixels is not None:
        size = dict(processor.size)
        processor.size = {
            "shortest_edge": min(size["shortest_edge"], limits.max_pixels),
            "longest_edge": limits.max_pixels,
        }
    if limits.max_tiles is not None:
        processor.max_patches = limits.max_tiles
        processor.min_patches = min(processor.min_patches, limits.max_tiles)
    return processor
