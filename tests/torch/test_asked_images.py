"""Needs torch and Transformers: images that the processor is asked for count as it really makes them."""

import json
import random
from pathlib import Path

import pytest
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

from refusals import refused
from trimtab.errors import ImageError
from trimtab.models.asking.images import own_frames
from trimtab.models.asking.processors import AnyTokenizer
from trimtab.models.describe import describe, image_rule_by_processor, read_config
from trimtab.models.images.asked import AskedImages, ask_clips
from trimtab.models.images.rules import FixedImage, SmartResize
from trimtab.runtime.placing.folder import check_folder
from trimtab.samples.size import size_samples
from trimtab.specs import Clip

SIZES = [(640, 480), (301, 777), (64, 2000), (1919, 1081)]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def saved(processor, folder) -> dict[str, dict]:
    processor.save_pretrained(folder)
    names = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
    return {name: json.loads((folder / name).read_text()) for name in names if (folder / name).is_file()}


def test_rows_of_tiles_are_written_as_the_processor_writes_them(tmp_path):
    """Idefics3: other texts around an image for every number of its tiles; sized data have the processor's ids."""
    tokenizer = AnyTokenizer()
    processor = transformers.Idefics3Processor(transformers.Idefics3ImageProcessorPil(), tokenizer, image_seq_len=64)
    for row in range(6):
        tokenizer.convert_tokens_to_ids([f"<row_{row + 1}_col_{column + 1}>" for column in range(6)])
    files = saved(processor, tmp_path / "model")
    rule, markup = image_rule_by_processor({"model_type": "idefics3"}, files, None)
    assert isinstance(rule, AskedImages)
    images = [Image.new("RGB", size) for size in SIZES]
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    records = []
    for number, picture in enumerate([*images, images[0]]):
        picture.save(tmp_path / f"{number}.png")
        parts = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "What is this?"}]
        if number == 4:  # two images in one sample
            parts.insert(0, {"type": "image", "image": "1.png"})
        records.append({"id": str(number), "messages": [{"role": "user", "content": parts}]})
    (tmp_path / "data.json").write_text(json.dumps(records))
    result = size_samples(tmp_path / "data.json", image_rule=rule, image_markup=markup, tokenizer=tmp_path / "model")
    expected = [
        len(processor(text=f"user: {'<image>' * len(shown)}What is this?", images=shown)["input_ids"][0])
        for shown in ([images[0]], [images[1]], [images[2]], [images[3]], [images[1], images[0]])
    ]
    assert result.table.num_tokens.tolist() == expected
    assert len({rule.count(*size).text for size in SIZES}) > 2
    tiles = [processor(text="<image>", images=[x], return_tensors="pt")["pixel_values"].shape[1] for x in images]
    assert [rule.count(*size).tiles for size in SIZES] == tiles


def test_a_formula_and_a_clip_are_the_processors(tmp_path):
    """Qwen2.5-VL: the rule that is known equals the processor, whose clips are asked for."""
    images = transformers.Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=1003520)
    files = {
        "preprocessor_config.json": {**images.to_dict(), "processor_class": "Qwen2_5_VLProcessor"},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor", "fps": 2.0},
    }
    config = {"model_type": "qwen3_5", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
    rule, markup = image_rule_by_processor(config, files, files["preprocessor_config.json"])
    assert rule == SmartResize(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=1003520)
    assert markup is not None
    assert (markup.before, markup.after) == ("", "")
    rule = ask_clips(config, files)
    clips = [rule.count_clip(Clip(width=280, height=140, num_frames=x, fps=24.0)).image for x in (48, 24)]
    assert [x.tiles for x in clips] == [24, 12]  # pairs of frames: this processor samples only where its file says so
    assert clips[0].patches == 2 * clips[1].patches == 8 * clips[1].tokens


@pytest.mark.parametrize(
    ("facts", "patch", "asked", "expected"),
    [  # (width, height, frames, fps); sum of the frames taken, how many, of how many, width, height there
        ((1280, 720, 300, 30), 14, {"fps": 1}, (1495, 10, 300, 1008, 560)),
        ((640, 480, 250, 23.976), 14, {"nframes": 7, "video_start": 1.3, "video_end": 9}, (988, 8, 184, 644, 476)),
        ((640, 480, 250, 25), 16, {"min_frames": 20, "total_pixels": 4e6}, (2490, 20, 250, 640, 480)),
        ((640, 480, 50, 25), 14, {"fps": 24, "resized_height": 100, "resized_width": 333}, (1176, 48, 50, 336, 112)),
        ((1280, 720, 300, 30), 16, {"max_pixels": 100_352}, None),  # fewer than 128 tokens, with no min_pixels
        ((640, 480, 50, 25), 14, {"nframes": 64}, None),
        ((640, 480, 50, 25), 14, {"fps": 1, "nframes": 4}, None),
        ((640, 480, 50, 25), 14, {"video_start": 1.9, "video_end": 1.0}, None),
    ],
)
def test_frames_that_a_content_part_asks_for_are_those_of_qwen_vl_utils(facts, patch, asked, expected):
    width, height, num_frames, fps = facts
    clip = Clip(width=width, height=height, num_frames=num_frames, fps=fps, own=tuple(asked.items()))
    if expected is None:
        with refused(ImageError):
            own_frames(clip, patch, 2)
        return
    own = own_frames(clip, patch, 2)
    assert (sum(own.indices), len(own.indices), own.num_frames, own.width, own.height) == expected


def test_a_processor_that_cuts_to_one_size_is_a_constant(tmp_path):
    processor = transformers.SiglipImageProcessorPil(size={"height": 224, "width": 224})
    processor.image_seq_length = 256
    whole = transformers.PaliGemmaProcessor(processor, AnyTokenizer())
    files = saved(whole, tmp_path)
    vision = {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 14, "num_hidden_layers": 2}
    rule, _ = image_rule_by_processor({"model_type": "paligemma", "vision_config": vision}, files, None)
    assert rule == FixedImage(rows=256, tokens=256)
    draw = random.Random(0)
    size = draw.randint(30, 900), draw.randint(30, 900)
    ids = whole(text="<image>", images=Image.new("RGB", size))["input_ids"][0]
    assert rule.count(*size).tokens == max(map(ids.count, ids))


def test_what_a_processor_never_writes_is_not_counted():
    files = {
        "preprocessor_config.json": {"processor_class": "GitProcessor", "image_processor_type": "CLIPImageProcessor"}
    }
    rule, _ = image_rule_by_processor({"model_type": "git"}, files, None)
    assert "writes no token in the place of an image" in rule.reason


# -- of several files in a folder, the one that the library reads ------------------------------------------------------


OLD = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
LARGE = {**OLD, "size": {"shortest_edge": 3136, "longest_edge": 1003520}}
SMALL = {**OLD, "size": {"shortest_edge": 3136, "longest_edge": 200704}}
FILES = {
    "preprocessor_config.json": {"preprocessor_config.json": LARGE},
    "processor_config.json": {"processor_config.json": {"image_processor": SMALL}},
    "both, the newer nested": {"preprocessor_config.json": LARGE, "processor_config.json": {"image_processor": SMALL}},
    "both, the newer not nested": {
        "preprocessor_config.json": SMALL,
        "processor_config.json": {"processor_class": "Qwen2_5_VLProcessor", "size": {"longest_edge": 3136}},
    },
    "pixels at the top and in size": {"preprocessor_config.json": {**LARGE, "min_pixels": 784, "max_pixels": 100352}},
    "pixels at the top of the newer": {
        "preprocessor_config.json": {**LARGE, "max_pixels": 100352},
        "processor_config.json": {"image_processor": {**SMALL, "max_pixels": 50176}},
    },
    "a video file too": {"preprocessor_config.json": SMALL, "video_preprocessor_config.json": LARGE},
}


@pytest.mark.parametrize("case", FILES)
def test_the_file_that_counts_is_the_one_that_transformers_reads(case, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(read_config("Qwen2.5-VL-7B"))))
    for name, content in FILES[case].items():
        (tmp_path / name).write_text(json.dumps(content))
    rule = describe(tmp_path, ask=False).image_rule
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for size in ((1920, 1080), (100, 60), (333, 2000)):
        grid = processor(images=Image.new("RGB", size), return_tensors="pt")["image_grid_thw"][0]
        assert rule.count(*size).patches == int(grid[1] * grid[2])


# -- a config.json from outside: what never reaches a loader ----------------------------------------------------------


def test_a_config_of_a_large_model_is_taken(tmp_path: Path) -> None:
    large = {"hidden_size": 16384, "vocab_size": 262_208, "max_position_embeddings": 10_485_760}
    text = {**large, "dtype": "float8_e4m3fn", "_attn_implementation": "sdpa"}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "text_config": text, "torch_dtype": None}))
    check_folder(tmp_path)


# -- LLaVA, whose processor has numbers of the model too --------------------------------------------------------------

LLAVA = {
    "model_type": "llava",
    "image_token_index": 32000,
    "vision_feature_select_strategy": "default",
    "text_config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "image_size": 336}
    | {"patch_size": 14, "intermediate_size": 64, "num_attention_heads": 4, "projection_dim": 32},
}
COUNTS = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
CROPPED = {"image_processor_type": "CLIPImageProcessor", "do_resize": True, "do_center_crop": True}
LLAVAS = {  # what is another in config.json, preprocessor_config.json and processor_config.json
    "as published": ({"image_seq_length": 576}, 336, {}),
    "a length of another": ({"image_seq_length": 144}, 336, {}),
    "no length": ({}, 336, {}),
    "a length in the processor's file": ({"image_seq_length": 576}, 336, {"image_seq_length": 144}),
    "another crop": ({"image_seq_length": 576}, 224, {}),
    "another patch": ({"image_seq_length": 576}, 336, {"patch_size": 28}),
    "another choice of rows": ({"image_seq_length": 576}, 336, {"vision_feature_select_strategy": "full"}),
}


@pytest.mark.parametrize("case", LLAVAS)
def test_files_of_llava_that_contradict_each_other_count_as_its_processor_does(case: str, tmp_path: Path) -> None:
    config, side, counts = LLAVAS[case]
    (tmp_path / "config.json").write_text(json.dumps({**LLAVA, **config}))
    size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**CROPPED, **size}))
    written = {"processor_class": "LlavaProcessor", "image_token": "<image>", **COUNTS, **counts}
    (tmp_path / "processor_config.json").write_text(json.dumps(written))
    words = Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    images = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    processor = LlavaProcessor(images, tokenizer, **{name: written[name] for name in COUNTS})
    rule = describe(tmp_path).image_rule
    for width, height in ((640, 480), (100, 900)):
        ids = processor(images=Image.new("RGB", (width, height)), text="<image>")["input_ids"][0]
        assert rule.count(width, height).tokens == len(ids)
