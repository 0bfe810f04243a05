"""Token counts against Transformers 5.23's chat templates, and processors for tests with images; needs torch.

Tokenizers are trained here, templates follow the public ones in shape (ChatML with vision markers, Vicuna, Gemma,
InternVL). Processors run on drawn images, so that markers, crops and image tokens are counted where they are written.
"""

import random

import pytest
from PIL import Image
from processor_cases import make_processor
from sample_sets import CHATML, GEMMA, INTERNVL, VICUNA, write_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trimtab.models.images.rules import SmartResize
from trimtab.samples.rows import read_conversation
from trimtab.samples.tokens import TokenCounter, read_tokenizer
from trimtab.specs import ImageCounts

TOOLS = (
    "{{- bos_token }}\n{%- if tools %}\n    {{- '<tools>' + (tools | tojson(indent=2)) + '</tools>' }}\n{%- endif %}\n"
    "{%- set ns = namespace(last=0) %}\n{%- for m in messages %}\n    {%- set ns.last = loop.index0 %}\n"
    "    {%- if m.role == 'system' %}\n        {%- continue %}\n    {%- endif %}\n"
    "    {%- if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}\n"
    "    {%- generation %}{{ m.role | upper }}: {{ m.content }}{%- endgeneration %}\n"
    "{%- endfor %}\n{{- ns.last }}{% if add_generation_prompt %}A{% endif %}"
)
WORDS = (
    "what is in the picture a small cat sits on the red mat and the sun shines user É 猫 \n\n  ! 12.5 <|im_end|> </s>"
)


def talks(num, *, with_system, seed=0):
    """Conversations of random text, special tokens and odd spaces in it."""
    rng, words = random.Random(seed), WORDS.split(" ")
    for _ in range(num):
        turns = [
            {"role": role, "content": " ".join(rng.choices(words, k=rng.randrange(1, 30)))}
            for role in ["user", "assistant"] * rng.randrange(1, 4)
        ]
        if with_system and rng.random() < 0.5:
            turns.insert(0, {"role": "system", "content": "be kind"})
        if with_system and rng.random() < 0.2:
            turns[-1]["reasoning"] = "the cat"
        yield turns


@pytest.mark.parametrize("loader", ["file", "folder"])
@pytest.mark.parametrize(
    ("name", "template"), [("chatml", CHATML), ("vicuna", VICUNA), ("gemma", GEMMA), ("tools", TOOLS)]
)
def test_counts_equal_apply_chat_template(tmp_path, name, template, loader):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",  # not in tokenizer.json: both must add it
        "added_tokens_decoder": {
            "9000": {"content": "sits on", "special": False, "lstrip": True, "rstrip": False, "normalized": True}
        },
    }
    folder = write_tokenizer(tmp_path, template, config=config if loader == "folder" else None, post=True)
    if loader == "folder":
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        theirs = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
        theirs.chat_template = template
    ours = TokenCounter(read_tokenizer(folder))
    conversations = list(talks(200, with_system=name not in ("vicuna",)))
    tools = [{"name": "look", "about": "É <b>"}] if name == "tools" else None
    expected = [
        len(theirs.apply_chat_template(turns, tools=tools, tokenize=True, return_dict=False)) for turns in conversations
    ]
    rows = [{"messages": turns, "tools": tools} for turns in conversations]
    assert ours.count([ours.render(read_conversation(row), ()) for row in rows]) == expected


CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 32,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def noise(width, height):
    return Image.effect_noise((width, height), 50).convert("RGB")


def fast_tokenizer(folder, **extra):
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<s>",
        extra_special_tokens=extra,
    )


def qwen(folder):
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 200704})
    tokenizer = fast_tokenizer(folder, image_token="<|image_pad|>", video_token="<|video_pad|>")
    processor = make_processor(Qwen2_5_VLProcessor, images, tokenizer, chat_template=CHATML)
    rule = SmartResize(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=200704)
    return processor, "qwen2_5_vl", rule.count


def internvl(folder):
    images = GotOcr2ImageProcessorPil(crop_to_patches=False, size={"height": 56, "width": 56})
    tokenizer = fast_tokenizer(
        folder,
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    processor = make_processor(InternVLProcessor, images, tokenizer, image_seq_length=4, chat_template=INTERNVL)
    return processor, "internvl", lambda width, height: counts(4, 1)


def gemma(folder):
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    tokenizer = fast_tokenizer(
        folder, boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    processor = Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=GEMMA)

    def rule(width, height):
        long, short = max(width, height), min(width, height)
        crops = min(3, max(2, int(long / short + 0.5)), long // 32) if long / short >= 1.2 else 0
        if crops and min(short, -(-long // crops)) < 32:
            crops = 0
        return counts(4 * (1 + crops), 1 + crops)

    return processor, "gemma3", rule


def llava(folder):
    images = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    tokenizer = fast_tokenizer(folder, image_token="<image>")
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=VICUNA,
    )
    return processor, "llava", lambda width, height: counts(16, 1)


def counts(tokens, tiles):
    return ImageCounts(patches=1, tokens=tokens, tiles=tiles, patches_sq=1, patches_windowed=1)
