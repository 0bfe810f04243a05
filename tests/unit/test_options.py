"""One field is one option: the command line, the default, the help and the checks come from it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from plans import small_plan
from typer.testing import CliRunner

from trimtab.cli.options import verb
from trimtab.errors import TrimtabError
from trimtab.options import Option, option_problems, same_fields
from trimtab.plan.file.reload import options_of
from trimtab.plan.options import PlanOptions
from trimtab.runtime.probe.settings import ProbeSettings
from trimtab.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    depth: Annotated[Literal["low", "high"], Option("How deep.", flag="--inner-depth")] = "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    where: Annotated[str, Option("Where.", argument=True)]
    count: Annotated[int | None, Option("How many.", least=2)] = None
    room_bytes: Annotated[int, Option("How large.", flag="--room", read=parse_bytes, shown="1KiB")] = 1024
    names: Annotated[tuple[str, ...], Option("Which.", flag="--name", read=tuple, typed=list[str])] = ()
    loud: Annotated[bool, Option("Louder.")] = False
    careful: Annotated[bool, Option("Do not check.", flag="--no-care")] = True
    hidden: int = 7
    inner: Inner = field(default_factory=Inner)


def call(*words: str) -> tuple[Knobs, str] | str:
    """What a verb is called with, and a parameter of its own; or what the command line says instead."""
    seen: list[tuple[Knobs, str]] = []

    @verb
    def run(knobs: Knobs, own: Annotated[str, typer.Option(help="Not of the dataclass.")] = "x") -> None:
        seen.append((knobs, own))

    app = typer.Typer()
    app.command()(run)
    result = CliRunner().invoke(app, list(words))
    return seen[0] if seen else result.output


def test_what_is_not_typed_keeps_the_default_of_its_field() -> None:
    assert call("here") == (Knobs(where="here"), "x")


def test_what_is_typed_becomes_the_value_of_its_field() -> None:
    words = "here --count 3 --room 2MiB --name a --name b --loud --no-care --inner-depth high --own y"
    expected = Knobs(
        where="here",
        count=3,
        room_bytes=2 * 2**20,
        names=("a", "b"),
        loud=True,
        careful=False,
        inner=Inner(depth="high"),
    )
    assert call(*words.split()) == (expected, "y")


@pytest.mark.parametrize(
    "words", [["here", "--count", "1"], ["here", "--inner-depth", "mid"], ["here", "--hidden", "1"], []]
)
def test_the_command_line_refuses_what_a_field_does_not_take(words: list[str]) -> None:
    assert isinstance(call(*words), str)


def test_help_shows_text_range_and_default() -> None:
    told = " ".join(str(call("--help")).split())
    for part in ("How many.", "x>=2", "How large.", "default: 1KiB", "--no-care", "Not of the dataclass."):
        assert part in told
    assert "hidden" not in told


def test_values_out_of_range_are_named_with_their_flag() -> None:
    wrong = Knobs(where="", count=2**50, inner=Inner(depth="mid"))  # type: ignore[arg-type]
    assert option_problems(wrong) == [
        f"count {2**50} was asked for, which no run has: give at most {2**40}",
        "depth (--inner-depth) 'mid' was asked for: choose one of low, high",
    ]
    assert option_problems(Knobs(where="", count=1)) == ["count 1 was asked for: give 2 or more"]


def test_same_fields_are_handed_on_under_one_name() -> None:
    assert same_fields(PlanOptions(dp=4), Knobs) == {}
    assert same_fields(Knobs(where="a"), Inner) == {}
    assert same_fields(Inner(depth="high"), Inner) == {"depth": "high"}


def test_what_a_plan_keeps_of_its_options_comes_back() -> None:
    plan = small_plan()
    training = {
        "dtype": "fp16",
        "optimizer": "sgd",
        "zero_stage": 2,
        "attention": "eager",
        "fused_kernels": True,
        "frozen_towers": ("vision",),
        "recompute": "full",
    }
    packing = {"order": "sorted", "oversize": "alone", "method": "isf", "seed": 5, "max_patches": 7, "max_tokens": 9}
    cluster = {"memory_bytes": 2**34, "risk": 0.2}
    inputs = replace(
        plan.inputs,
        training=replace(plan.inputs.training, **training),
        cluster=replace(plan.inputs.cluster, **cluster),
    )
    decisions = replace(plan.decisions, packing=replace(plan.decisions.packing, **packing))
    found = options_of(replace(plan, inputs=inputs, decisions=decisions))
    for name, value in {**training, **packing, **cluster}.items():
        assert getattr(found, name) == value, name
    assert (found.dp, found.pp, found.schedule) == (2, 2, plan.decisions.schedule.name)
    assert found.profile is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timeout_s": 0}, r"--timeout\) 0 was asked for: give 1 or more"),
        ({"timeout_s": 10**9}, r"--timeout\) 1000000000 was asked for: give 604800 or less"),
        ({"timeout_s": 1.5}, r"--timeout\) 1\.5 was asked for, which is a float: give a whole number"),
        ({"device": "tpu"}, "device 'tpu' was asked for: choose one of cpu, cuda"),
    ],
)
def test_a_probe_asked_in_python_is_checked_as_on_the_command_line(change, words):
    with pytest.raises(TrimtabError, match=words):
        ProbeSettings(plan=Path("plan"), model=Path("model"), **change)
