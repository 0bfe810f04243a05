"""What people type and other programs write: tokenizers, chat templates, launchers' files, options with a grammar."""

import json
import os
import random
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.damage import damaged, reshaped

from trimtab import TrimtabError, describe
from trimtab.adapters.launch_files import from_megatron
from trimtab.cli.data import parse_filters
from trimtab.cli.describe import read_size
from trimtab.costs.devices import parse_cluster, parse_node_link
from trimtab.demo import train_tokenizer
from trimtab.limited import MEMORY_BYTES, STEP_CPU_S, limit_process
from trimtab.lora import parse_lora
from trimtab.options import SpecialTokens
from trimtab.placement.machine import parse_images, parse_machine
from trimtab.plan.options import GivenRun, parse_baseline, parse_share, parse_weights
from trimtab.plan.predict import parse_stages
from trimtab.samples.encode import ConversationEncoder
from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import read_conversation
from trimtab.samples.tokens import TokenCounter, read_tokenizer
from trimtab.units import parse_bytes

ROOT = Path(__file__).parents[2]
Try = Callable[[int], None]
_PIECES = (
    *("-1", "0", "1.5", "1e999", "nan", "inf", "9" * 25, "9" * 5000, "--", "--=", "'", "x", "é", "\u202e"),
    *("٣", "²", "１"),  # digits, to some of Python's functions
    *"xX,=+|%:.-~*/\\ \n\t\0",
)


def tokenizers(folder: Path) -> Try:
    """A tokenizer, its settings and chat template: counts of texts and what is learnt of them, or an error of ours."""
    settings = ROOT / "src" / "trimtab" / "demo" / "tiny_model" / "tokenizer_config.json"
    template = json.loads(settings.read_text())["chat_template"] + (
        "{%- set ns = namespace(n=range(3) | list | tojson) -%}{%- generation -%}{%- endgeneration -%}"
        "{%- if ns.n == '%5s' % 'a' -%}{{ 'ab' * 2 ** 3 | indent(4) }}{%- endif -%}"
    )
    contents = {
        "tokenizer.json": train_tokenizer(["What is this? A cat."], vocab_size=290).encode(),
        "tokenizer_config.json": json.dumps(
            {"eos_token": {"content": "<|im_end|>"}, "extra_special_tokens": ["<a>"], "chat_template": template}
        ).encode(),
        "chat_template.jinja": template.encode(),
    }
    talk = [{"from": "human", "value": "What is this?\u2028é漢"}, {"from": "gpt", "value": "A cat."}]
    conversation = read_conversation({"conversations": talk})
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not outlive a fork

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        name = draw.choice(sorted(contents))
        for file, content in contents.items():
            (folder / file).write_bytes(content)
        if draw.random() < 0.5 and name.endswith(".json"):
            (folder / name).write_text(json.dumps(reshaped(json.loads(contents[name]), draw)), encoding="utf-8")
        else:
            (folder / name).write_bytes(damaged(contents[name], draw))
        if name == "tokenizer_config.json":
            (folder / "chat_template.jinja").unlink()
        _limited(partial(read, draw.choice(("template", "processor"))))

    def read(special_tokens: SpecialTokens) -> None:
        with suppress(TrimtabError, BadRecordError):
            files = read_tokenizer(folder, special_tokens=special_tokens)
            counter = TokenCounter(files)
            (count,) = counter.count([counter.render(conversation, [])])
            if isinstance(count, BadRecordError):
                return
            assert count >= 0
            encoded = ConversationEncoder(files).encode(conversation, [])
            assert len(encoded.input_ids) == len(encoded.learnt) == count

    return try_seed


def _limited(read: Callable[[], None]) -> None:
    """Read as `size` does, in a child with its limits: forty steps that each double a text end by its processor time.

    A library that gives up its process (SIGABRT: no memory) costs a sample there, and is no finding.
    """
    there, here = os.pipe()
    if (child := os.fork()) == 0:
        try:
            limit_process(memory_bytes=MEMORY_BYTES)
            signal.setitimer(signal.ITIMER_PROF, STEP_CPU_S)
            read()
            os._exit(0)
        except BaseException:
            os.write(here, traceback.format_exc()[-4000:].encode(errors="replace"))
        os._exit(1)
    os.close(here)
    _, status = os.waitpid(child, 0)
    said = os.read(there, 4000).decode(errors="replace")
    os.close(there)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    assert status == 0 or ended_by in (signal.SIGPROF, signal.SIGABRT), f"ended by {ended_by}: {said}"


def launchers(folder: Path) -> Try:
    """Megatron's flags: a `GivenRun`, or a `TrimtabError`."""
    model = describe("Qwen2.5-VL-7B")
    flags = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 64 "
        "--decoder-first-pipeline-num-layers 4 --recompute-granularity full --recompute-method block --bf16 "
        "--use-distributed-optimizer --optimizer adam --num-layers-per-virtual-pipeline-stage 2 --fp8-format hybrid"
    )

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        with suppress(TrimtabError, OSError):  # OSError: what is meant as flags may be the name of a file
            words = flags.split()
            for _ in range(draw.randint(1, 3)):
                at = draw.randrange(len(words))
                words[at] = draw.choice((*words, *_PIECES))
            run = from_megatron(" ".join(words), model)
            assert isinstance(run, GivenRun)

    return try_seed


WORDS: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "lora": (parse_lora, ("r=16,targets=q_proj+v_proj,bits=4", "r=8,alpha=16,dropout=0.1,weights=bf16,towers=vision")),
    "cluster": (parse_cluster, ("32xA100-80GB", "4 x H200", "B200+H100")),
    "link": (lambda text: parse_node_link(text, devices_per_node=8), ("8x400Gb", "400Gb x8", "25GB")),
    "machine": (parse_machine, ("4x24GiB", "A100-80GB:31GiB,3xA100-80GB", "2x2GiB")),
    "cpu": (lambda text: parse_machine("2x24GiB", cpu=text), ("64GiB", "100")),
    "images": (lambda text: parse_images([text]), ("1024x768,4", "1x1")),
    "size": (read_size, ("1920x1080",)),
    "bytes": (parse_bytes, ("80GiB", "1.5TB", "100")),
    "share": (parse_share, ("6%", "0.06")),
    "weights": (lambda text: parse_weights([text]), ("web=1,docs=2.5",)),
    "stages": (parse_stages, ("24v|8v+10l|18l",)),
    "baseline": (lambda text: parse_baseline(text).problems(text), ("random,batch=4,full-recompute", "isf,packed")),
    "filters": (parse_filters, ("4,8",)),
    "run": (lambda text: replace(GivenRun(batch=1), stages=text, recompute=text), ("full", "8|8", "vision-first")),
}


def words(_folder: Path) -> Try:
    """Short languages of options: read, or a `TrimtabError`."""

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        read, texts = WORDS[draw.choice(sorted(WORDS))]
        text = draw.choice(texts)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(("", draw.choice(_PIECES), *_PIECES)) + text[at + draw.randrange(4) :]
        with suppress(TrimtabError):
            read(text)

    return try_seed


TARGETS: dict[str, Callable[[Path], Try]] = {"launchers": launchers, "tokenizers": tokenizers, "words": words}
