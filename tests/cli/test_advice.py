"""Messages name only options and verbs that exist: every text in the source, beside the command line's own tree."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer import Context
from typer.main import get_command

from trimtab.cli.app import app

SRC = Path(__file__).parents[2] / "src" / "trimtab"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
FOREIGN = {  # of torchrun, the hub's downloader, Megatron-LM and ms-swift, which the same texts name
    "--bad",  # a colour of the style sheet
    *("--start", "--ncs", "--foreground", "--model-store", "--models", "--ts-config"),  # of torchserve
    "--overlap-moe-expert-parallel-comm",
    *("--nproc-per-node", "--no-python", "--revision", "--repo-type", "--tp-comm-overlap", "--packing"),
    *("--enable-full-hetero-dp", "--hetero-parallel", "--external"),  # LoongForge, MindSpeed-MM, ms-swift
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--pipeline-model-parallel-layout"),
    "--seq-length",
}


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Words of every verb, and its options."""
    yield words, {"--help", *(name for one in command.params for name in (*one.opts, *one.secondary_opts))}
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


GROUP: Any = get_command(app)
VERBS = {name: GROUP.get_command(Context(GROUP), name) for name in GROUP.list_commands(None)}
ROOT = {"--help", "--version", "--install-completion", "--show-completion"}
TREE = {(): ROOT} | {(name,): words for name, verb in VERBS.items() for _, words in commands(verb)}
SETTINGS = {name for verb in VERBS.values() for name in getattr(verb.callback, "settings", {})}


def texts(source: str) -> Iterator[str]:
    """Every string, f-strings whole: what is computed in them stands as an ellipsis."""
    parts = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def wrong_advice(source: str) -> list[str]:
    known = set().union(*TREE.values()) | FOREIGN
    wrong = []
    for text in texts(source):
        if text.startswith("--") and text[2:].replace("-", "_") in SETTINGS:  # the name of a setting in its `Option`
            continue
        wrong += [option for option in OPTION.findall(text) if option not in known]
        wrong += [name for name in re.findall(r"--set (?!and\b)([a-z_]+)", text) if name not in SETTINGS]
        for told in re.findall(r"`trimtab ([^`…]+)", text):
            words = told.split()
            verb = tuple(words[:1])
            options = TREE.get(verb if verb in TREE or not words[-1].isupper() else verb[:1])
            if options is None or set(OPTION.findall(told)) - options:
                wrong.append(f"trimtab {told}")
    return wrong


def test_every_option_and_verb_that_a_text_names_exists() -> None:
    files = [file for file in SRC.rglob("*.py") if file.parent.name != "adapters"]  # which write others' command lines
    wrong = {str(file.relative_to(SRC)): wrong_advice(file.read_text(encoding="utf-8")) for file in files}
    assert {name: advice for name, advice in wrong.items() if advice} == {}


def test_advice_that_is_wrong_is_found() -> None:
    source = 'raise E(f"{x} was asked: give --no-such, or run `trimtab nope`, or `trimtab report --cluster {y}`")'
    assert wrong_advice(source) == ["--no-such", "trimtab nope", "trimtab report --cluster "]
