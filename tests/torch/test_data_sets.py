"""Data sets as people bring them, sized on the first try: samples/ (shapes, llama_factory, sources); needs torch.

Each is written here, and its tokens and patches equal those of the model's real processor over what the record says.
"""

import base64
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from processor_cases import make_processor
from sample_sets import tar_bytes, write_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trimtab.models.families import family_of
from trimtab.models.images.rules import SmartResize
from trimtab.samples.size import size_samples

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% for t in m['tool_calls'] or [] %}<call>{{ t['function'] | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
)
SIZES = {"a.png": (300, 200), "b.png": (140, 420)}
ASK, SAY, MORE, NO = (
    *("What is in the picture?", "A small cat sits on the red mat.", "and the sun shines", "No cat at all"),
)
CALL = {"name": "look", "arguments": {"at": "mat"}}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def user(text: str, num_images: int = 0) -> dict[str, Any]:
    return {"role": "user", "content": [*[{"type": "image"}] * num_images, {"type": "text", "text": text}]}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


TALK, SEEN = [user(ASK), said(SAY)], [user(ASK, 1), said(SAY)]
SYSTEM = {"role": "system", "content": "Be kind."}
FROM = [{"from": "human", "value": f"<image>{ASK}"}, {"from": "gpt", "value": SAY}]
ROLES = [{"role": "user", "content": f"<image>{ASK}"}, {"role": "assistant", "content": SAY}]
CALLED = [user(ASK), {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]}]
CALLED += [{"role": "tool", "content": MORE}, said(SAY)]

Written = Callable[[Path], Path]


def lines(*rows: Any, name: str = "d.jsonl") -> Written:
    return lambda folder: _text(folder / name, "".join(json.dumps(row) + "\n" for row in rows))


def whole(content: Any, name: str = "d.json") -> Written:
    return lambda folder: _text(folder / name, json.dumps(content))


def _text(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def parquet(row: dict[str, Any], *pictures: str) -> Written:
    def write(folder: Path) -> Path:
        images = [{"bytes": (folder / name).read_bytes(), "path": None} for name in pictures]
        table = pyarrow.Table.from_pylist([row | ({"images": images} if "texts" in row else {"image": images[0]})])
        pyarrow.parquet.write_table(table, folder / "d.parquet")
        return folder / "d.parquet"

    return write


def arrow(row: dict[str, Any]) -> Written:
    def write(folder: Path) -> Path:
        table = pyarrow.Table.from_pylist([row])
        with pyarrow.ipc.new_stream(str(folder / "data.arrow"), table.schema) as stream:
            stream.write_table(table)
        _text(folder / "state.json", json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        return folder

    return write


def shard(**members: Any) -> Written:
    def write(folder: Path) -> Path:
        texts = [(f"7.{name}", (x if name == "txt" else json.dumps(x)).encode()) for name, x in members.items()]
        (folder / "d.tar").write_bytes(tar_bytes([*texts, ("7.png", (folder / "a.png").read_bytes())]))
        return folder / "d.tar"

    return write


def table(*row: tuple[str, str], name: str = "d.csv") -> Written:
    def write(folder: Path) -> Path:
        text = io.StringIO()
        writer = csv.writer(text, delimiter="\t" if name.endswith("tsv") else ",")
        writer.writerows(zip(*row, strict=True))
        return _text(folder / name, text.getvalue())

    return write


def listed(rows: Any, *, file: str = "d.json", **entry: Any) -> Written:
    def write(folder: Path) -> Path:
        _text(folder / file, json.dumps(rows))
        away = {"hf_hub_url": "someone/else"}
        return _text(folder / "dataset_info.json", json.dumps({"mine": {"file_name": file, **entry}, "away": away}))

    return write


def beside(rows: Any, **entry: Any) -> Written:
    """The file itself, with the list of LLaMA-Factory next to it."""
    return lambda folder: listed(rows, **entry)(folder).with_name("d.json")


def _carried(folder: Path) -> dict[str, Any]:
    data = base64.b64encode((folder / "a.png").read_bytes()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def meta(folder: Path) -> Path:
    lines({"image": "a.png", "conversations": FROM}, name="first.jsonl")(folder)
    return whole({"web": {"root": ".", "annotation": "first.jsonl", "repeat_time": 1}}, "meta.json")(folder)


TAGS = {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "you"}
TAGGED = [{"who": "me", "what": f"<image>{ASK}"}, {"who": "you", "what": SAY}]
ALPACA = {"prompt": "ask", "query": "more", "response": "say", "system": "sys", "history": "old", "images": "pics"}
OLDER = [SYSTEM, user("Hi"), said("Yo")]
OLD = {"system": "Be kind.", "history": [["Hi", "Yo"]]}
PAIR: Any = [[user(ASK, 1), said(SAY)], [user(ASK, 1), said(NO)]]
CAPTION = [{"role": "user", "content": [{"type": "image"}]}, said(SAY)]
PARTS = [{"type": "image", "image": "a.png"}, {"type": "text", "text": ASK}]
PLAIN = {"role": "user", "content": ASK}
CALLS_FROM = [{"from": "human", "value": ASK}, {"from": "function_call", "value": json.dumps(CALL)}]
CALLS_FROM += [{"from": "observation", "value": MORE}, {"from": "gpt", "value": SAY}]
CALLS = [PLAIN, {"role": "tool_call", "content": json.dumps(CALL)}, {"role": "tool_response", "content": MORE}]


def shared(*names: str, **others: str) -> dict[str, Any]:
    """The columns of an entry in ShareGPT's form."""
    return {"formatting": "sharegpt", "columns": {**{name: name for name in names}, **others}}


DATA_SETS: dict[str, tuple[Written, Any, dict[str, Any]]] = {
    # how it is written; the turns that it holds, two lists of a pair; options of sizing
    "LLaVA": (whole([{"id": "1", "image": "a.png", "conversations": FROM}]), SEEN, {}),
    "ShareGPT": (lines({"images": ["a.png"], "conversations": FROM}), SEEN, {}),
    "OpenAI messages": (lines({"messages": [{"role": "user", "content": PARTS}, said(SAY)]}), SEEN, {}),
    "Anthropic messages": (
        lambda folder: lines({"messages": [{"role": "user", "content": [_carried(folder), PARTS[1]]}, said(SAY)]})(
            folder
        ),
        SEEN,
        {},
    ),
    "messages, images": (
        lines({"images": ["a.png", "b.png"], "messages": [{"role": "user", "content": "<image><image>?"}, said(SAY)]}),
        [user("?", 2), said(SAY)],
        {},
    ),
    "datasets": (arrow({"images": ["a.png"], "messages": ROLES}), SEEN, {}),
    "The Cauldron": (parquet({"texts": [{"user": ASK, "assistant": SAY}]}, "a.png"), SEEN, {}),
    "shard": (shard(json={"conversations": FROM}), SEEN, {}),
    "shard of captions": (shard(txt=SAY), CAPTION, {}),
    "shard of img2dataset": (shard(json={"caption": SAY, "url": "u", "width": 300, "sha256": "00"}), CAPTION, {}),
    "folder of images": (lines({"file_name": "a.png", "text": SAY}, name="metadata.jsonl"), CAPTION, {}),
    "InternVL's meta file": (meta, SEEN, {}),
    "Alpaca": (whole([{"instruction": ASK, "input": MORE, "output": SAY}]), [user(f"{ASK}\n{MORE}"), said(SAY)], {}),
    "LLaMA-Factory, ShareGPT": (
        listed([{"talk": TAGGED, "pics": ["a.png"]}], **shared(messages="talk", images="pics"), tags=TAGS),
        SEEN,
        {},
    ),
    "LLaMA-Factory, Alpaca": (
        beside(
            [
                {
                    "ask": "<image>?",
                    "more": MORE,
                    "say": SAY,
                    "sys": "Be kind.",
                    "old": [["Hi", "Yo"]],
                    "pics": ["a.png"],
                }
            ],
            columns=ALPACA,
        ),
        [*OLDER, user(f"?\n{MORE}", 1), said(SAY)],
        {},
    ),
    "LLaMA-Factory, pairs": (
        listed(
            [{"talk": FROM[:1], "chosen": FROM[1], "rejected": {"from": "gpt", "value": NO}, "images": ["a.png"]}],
            **shared("chosen", "rejected", "images", messages="talk"),
            ranking=True,
        ),
        PAIR,
        {},
    ),
    "LLaMA-Factory, tools": (
        listed([{"talk": CALLS_FROM, "tools": json.dumps(TOOLS)}], **shared("tools", messages="talk")),
        CALLED,
        {},
    ),
    "ms-swift, query": (
        lines({"query": ASK, "response": SAY, "images": ["a.png"], **OLD}),
        [*OLDER, user(ASK, 1), said(SAY)],
        {},
    ),
    "ms-swift, tools": (lines({"tools": json.dumps(TOOLS), "messages": [*CALLS, said(SAY)]}), CALLED, {}),
    "ms-swift, pairs": (lines({"images": ["a.png"], "messages": ROLES, "rejected_response": NO}), PAIR, {}),
    "ms-swift, conversation": (lines({"conversation": [{"human": ASK, "assistant": SAY}]}), TALK, {}),
    "ms-swift, other names": (lines({"problem": ASK, "solution": SAY}), TALK, {}),
    "prompt, completion": (lines({"prompt": ASK, "completion": SAY}), TALK, {}),
    "TRL, turns": (lines({"prompt": [PLAIN], "completion": [said(SAY)]}), TALK, {}),
    "TRL, pairs": (lines({"prompt": ASK, "chosen": SAY, "rejected": NO, "image": "a.png"}), PAIR, {}),
    "TRL, pairs of turns": (
        lines({"images": ["a.png"], "prompt": [ROLES[0]], "chosen": [said(SAY)], "rejected": [said(NO)]}),
        PAIR,
        {},
    ),
    "ShareGPT, pairs": (
        lines({"conversations": FROM[:1], "chosen": FROM[1], "rejected": said(NO), "images": ["a.png"]}),
        PAIR,
        {},
    ),
    "pairs, whole": (
        lines({"prompt": ASK, "chosen": [PLAIN, said(SAY)], "rejected": [PLAIN, said(NO)]}),
        [TALK, [user(ASK), said(NO)]],
        {},
    ),
    "flat Parquet": (parquet({"question": ASK, "answer": SAY}, "b.png"), SEEN, {}),
    "CSV": (table(("question", ASK), ("answer", SAY), ("image", "a.png")), SEEN, {}),
    "TSV": (table(("messages", json.dumps(ROLES)), ("images", '["a.png"]'), name="d.tsv"), SEEN, {}),
    "other names": (
        table(("ask", ASK), ("say", SAY), ("pic", "a.png")),
        SEEN,
        {"columns": "question=ask,answer=say,image=pic"},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<s>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 200704})
    return make_processor(Qwen2_5_VLProcessor, images, tokenizer, chat_template=TEMPLATE)


OWN_SIZES = [  # of a.png: what its part asks for, and the size that fetch_image of qwen_vl_utils 0.0.14 gave
    ({"max_pixels": 20000, "min_pixels": 10000}, (168, 112)),
    ({"min_pixels": 200704}, (560, 392)),
    ({"resized_height": 280, "resized_width": 420}, (420, 280)),
    ({"resized_height": 100, "resized_width": 1, "max_pixels": 9}, (28, 112)),
    ({"resized_height": None, "max_pixels": None}, (300, 200)),
]


@pytest.mark.parametrize(("own", "size"), OWN_SIZES)
def test_a_part_has_the_size_that_it_asks_for(
    own: Any, size: Any, folder: Path, processor: Any, tmp_path: Path
) -> None:
    Image.new("RGB", SIZES["a.png"]).save(tmp_path / "a.png")
    parts = [{**PARTS[0], **own}, {"type": "image", "image": "a.png"}, PARTS[1]]
    result = size_samples(
        lines({"messages": [{"role": "user", "content": parts}, said(SAY)]})(tmp_path),
        image_rule=SmartResize(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=200704),
        image_markup=family_of("qwen2_5_vl").markup,
        tokenizer=folder,
    )
    text = processor.apply_chat_template([user(ASK, 2), said(SAY)], tokenize=False)
    made = processor(images=[Image.new("RGB", x) for x in (size, SIZES["a.png"])], text=text)
    assert result.table.num_tokens.tolist() == [len(made["input_ids"][0])]
    assert result.table.image_patches.tolist() == made["image_grid_thw"].prod(-1).tolist()


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_data_set_is_sized_first_try(name: str, folder: Path, processor: Any, tmp_path: Path) -> None:
    write, expected, how = DATA_SETS[name]
    for file, size in SIZES.items():
        Image.effect_noise(size, 50).convert("RGB").save(tmp_path / file)
    result = size_samples(
        write(tmp_path),
        image_rule=SmartResize(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=200704),
        image_markup=family_of("qwen2_5_vl").markup,
        tokenizer=folder,
        **how,
    )
    tokens = patches = num_images = 0
    for turns in expected if isinstance(expected[0], list) else [expected]:
        text = processor.apply_chat_template(turns, tokenize=False, tools=TOOLS if turns is CALLED else None)
        num = text.count("<|image_pad|>")
        files = [*SIZES][:num] if name != "flat Parquet" else ["b.png"]
        pictures = [Image.open(tmp_path / file) for file in files]
        made = processor(images=pictures or None, text=text)
        tokens += len(made["input_ids"][0])
        patches += sum(int(grid.prod()) for grid in made["image_grid_thw"]) if pictures else 0
        num_images += num
    assert result.table.num_tokens.tolist() == [tokens]
    assert result.table.num_patches.tolist() == [patches]
    assert result.table.num_images.tolist() == [num_images]
    assert result.table.tokens_exact
    assert any("pairs of answers" in told for told in result.assumptions) == isinstance(expected[0], list)
