"""Rows of a plan as the samples that a packed collator takes: ids, labels, and images as the processor cuts them."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import AutoImageProcessor

from trimtab.errors import PlanError, SampleError, UnknownModelError, UnsupportedPlanError
from trimtab.models.asking.build import complete
from trimtab.models.asking.processors import processor_class
from trimtab.models.describe import describe, read_config
from trimtab.models.families.known import family_of
from trimtab.models.images.apply import rule_in_sample
from trimtab.models.images.unsettled import UnsettledRule
from trimtab.options import ReadingOptions
from trimtab.plan.file.figures import model_fingerprint
from trimtab.plan.file.yaml import load_plan
from trimtab.plan.plan import ModelInput
from trimtab.runtime.data.formats import pack_format
from trimtab.runtime.data.loss import IGNORED
from trimtab.runtime.data.missing import UnreadableSampleError
from trimtab.runtime.data.records import PlannedRecords, open_records
from trimtab.runtime.data.videos import VideoReader, alike_videos, pixel_keys
from trimtab.runtime.training.target import refuse_remote_code
from trimtab.samples.encode import ConversationEncoder
from trimtab.samples.lengths import CountImage, image_counter
from trimtab.samples.media_folders import MediaFolders
from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import read_conversation
from trimtab.samples.tokens import TokenizerFiles, read_tokenizer
from trimtab.specs import ModelSpec

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
    options, folder = options or ReadingOptions(), Path(model)
    given = load_plan(plan).inputs.model
    spec = describe(folder, max_pixels=given.max_pixels, max_tiles=given.max_tiles)
    if model_fingerprint(spec) != given.layers_blake2b:
        if isinstance(spec.image_rule, UnsettledRule):
            raise PlanError(
                f"{folder} says of no image how it is cut, and the plan was made for {given.name}: put "
                "preprocessor_config.json (or processor_config.json) beside its config.json"
            )
        raise PlanError(
            f"the model in {folder} has other layers or counts images otherwise than {given.name}, which the plan was "
            "made for: name the folder of that model, or plan again"
        )
    return PlannedConversations(
        open_records(plan, data, options.media_root, allowed=options.allowed),
        spec,
        read_tokenizer(
            options.tokenizer or folder,
            chat_template=options.chat_template,
            markup=family_of(spec.family).markup or spec.image_markup,
            special_tokens=options.special_tokens,
        ),
        folder,
        options=options,
        limits=given,
    )


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

    Ids are those that sizing counted; the assistant's turns are learnt, ends of turn included, nothing else. Images
    are decoded with Pillow and cut by the model's own image processor (its Pillow backend). A row that comes out with
    another number of tokens than the plan counted raises `SampleError`, one whose record or media cannot be read
    `UnreadableSampleError`. Objects go to worker processes.
    """

    def __init__(
        self,
        records: PlannedRecords,
        model: ModelSpec,
        tokenizer: TokenizerFiles,
        preprocessor: Path,
        *,
        options: ReadingOptions,
        limits: ModelInput,
    ) -> None:
        self.records = records
        self.model = model
        self._tokenizer = tokenizer
        self._preprocessor = preprocessor
        self._options = options
        self._limits = limits
        self._keys = _pack_keys(model, preprocessor)
        self._opened: _Opened | None = None

    def __len__(self) -> int:
        return len(self.records)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self._opened is None:
            options = self._options
            self._opened = _Opened(
                ConversationEncoder(self._tokenizer),
                image_counter(self.model.image_rule),
                _image_processor(self._preprocessor, self._limits, self.model.family),
                MediaFolders(None, allow_outside=options.allow_outside, exif=options.exif),
            )
        opened, name = self._opened, self.records.samples.sample_id(row)
        try:
            conversation = read_conversation(self.records[row])
            media = opened.media.of(self.records.place(row).file, self.records.media_root(row))
            pictures = [self._decode(media.read(image)) for image in conversation.images]
            counts = [opened.count_image(len(pictures), picture.width, picture.height) for picture in pictures]
            if conversation.videos and opened.videos is None:
                opened.videos = VideoReader(self.model, self._options.video)
            videos = [opened.videos.read(x, media, self._decode) for x in conversation.videos] if opened.videos else []
            encoded = opened.encoder.encode(conversation, counts, [x for x, _ in videos])
        except BadRecordError as error:
            kind = UnreadableSampleError if error.kind in _UNREADABLE else SampleError
            raise kind(f"sample {name} ({self.records.place(row)}): {error}") from None
        expected = int(self.records.samples.num_tokens[row])
        if len(encoded.input_ids) != expected:
            raise SampleError(
                f"sample {name} ({self.records.place(row)}) has {len(encoded.input_ids)} tokens and was sized at "
                f"{expected}: train with the tokenizer, template and options of the sizing, or size and plan again"
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
                f"sample {name} ({self.records.place(row)}) holds a video, and packs of {self.model.family} have no "
                "place for videos: leave such samples out, or train it without packing"
            )
        return sample

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
