"""One field is one option: the command line, the default, the help and the checks come from it."""

import inspect
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from plans import small_plan
from typer.testing import CliRunner

from trimtab.cli.app import Verb, Verbs, app
from trimtab.cli.settings import verb
from trimtab.cli.verbs import VERBS, load_verb
from trimtab.options import Option, option_problems, same_fields
from trimtab.plan.file.reload import options_of
from trimtab.plan.options import PlanOptions
from trimtab.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    depth: Annotated[Literal["low", "high"], Option("How deep.", flag="--inner-depth")] = "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    where: Annotated[str, Option("Where.", argument=True)]
    count: Annotated[int | None, Option("How many.", least=2, common=True)] = None
    room_bytes: Annotated[int, Option("How large.", flag="--room", read=parse_bytes, shown="1KiB", common=True)] = 1024
    names: Annotated[tuple[str, ...], Option("Which.", flag="--name", read=tuple, typed=list[str])] = ()
    loud: Annotated[bool, Option("Louder.", common=True)] = False
    careful: Annotated[bool, Option("Check.")] = True
    share: Annotated[float, Option("How much.", most=1)] = 0.5
    hidden: int = 7
    inner: Inner = field(default_factory=Inner)


def call(*words: str) -> tuple[Knobs, str] | str:
    """What a verb is called with, and a parameter of its own; or what the command line says instead."""
    seen: list[tuple[Knobs, str]] = []

    @verb
    def run(knobs: Knobs, own: Annotated[str, typer.Option(help="Not of the dataclass.")] = "x") -> None:
        seen.append((knobs, own))

    alone = typer.Typer(rich_markup_mode=None)
    alone.command(cls=Verb)(run)
    result = CliRunner().invoke(alone, list(words))
    return seen[0] if seen else result.output + str(result.exception or "")


def test_what_is_not_typed_keeps_the_default_of_its_field() -> None:
    assert call("here") == (Knobs(where="here"), "x")


WHOLE = Knobs(
    where="here", count=3, room_bytes=2 * 2**20, names=("a", "b"), loud=True, careful=False, inner=Inner(depth="high")
)


def test_what_is_typed_becomes_the_value_of_its_field() -> None:
    flags = "here --count 3 --room 2MiB --set name=a --set name=b --loud --own y"
    assert call(*flags.split(), "--set", "careful=false", "--set", "inner_depth=high") == (WHOLE, "y")
    plain = "count=3 room=2MiB name=a name=b loud=true careful=false inner_depth=high"
    assert call("here", *(word for text in plain.split() for word in ("--set", text))) == (WHOLE, "x")


def test_a_file_of_settings_gives_what_is_not_typed(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("count: 5\nroom: 2MiB\nname: [a, b]\nloud: true\ncareful: false\ninner_depth: high\nshare:\n")
    assert call("here", "--options", str(file), "--count", "3") == (WHOLE, "x")
    assert call("here", "--options", str(file), "--set", "count=3") == (WHOLE, "x")


@pytest.mark.parametrize(
    ("content", "named"),
    [("counts: 5", "counts"), ("[1]", "options.yaml"), ("count: [2, 3]", "count"), ("count: 5\ncount: 6", "count")],
)
def test_a_file_that_is_wrong_is_refused(content: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    refused = call("here", "--options", str(file))
    assert isinstance(refused, str)
    assert named in refused


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--count 1", "--count"),
        ("--set count=1", "count"),
        ("--set share=1.5", "share"),
        ("--set inner_depth=mid", "low, high"),
        ("--set hidden=1", "hidden"),
        ("--set inner-depth=low", "did you mean inner_depth?"),
        ("--set count", "NAME=VALUE"),
        ("--set count=3 --count 3", "count"),
        ("--set careful=maybe", "careful=false"),
        ("--set count=many", "whole number"),
        ("--share 0.25", "--set share=0.25"),
        ("--share=0.25", "--set share=0.25"),
        ("--no-careful", "--set careful=false"),
        ("--unknown", "--unknown"),
    ],
)
def test_the_command_line_refuses_what_a_field_does_not_take(words: str, named: str) -> None:
    refused = call("here", *words.split())
    assert isinstance(refused, str)
    assert named in refused


def test_help_shows_flags_and_defaults_and_counts_settings() -> None:
    shown = " ".join(str(call("--help")).split())
    for part in ("How many.", "How large.", "default: 1KiB", "Not of the dataclass.", "4 more"):
        assert part in shown
    for part in ("hidden", "--careful", "How much."):
        assert part not in shown


def test_values_out_of_range_are_named_with_their_setting() -> None:
    wrong = Knobs(where="", count=2**50, inner=Inner(depth="mid"))  # type: ignore[arg-type]
    first, second = option_problems(wrong)
    assert "count" in first
    assert str(2**40) in first
    assert "inner_depth" in second
    assert "low, high" in second
    assert "2" in option_problems(Knobs(where="", count=1))[0]


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
        plan.inputs, training=replace(plan.inputs.training, **training), cluster=replace(plan.inputs.cluster, **cluster)
    )
    decisions = replace(plan.decisions, packing=replace(plan.decisions.packing, **packing))
    found = options_of(replace(plan, inputs=inputs, decisions=decisions))
    for name, value in {**training, **packing, **cluster}.items():
        assert getattr(found, name) == value, name
    assert (found.dp, found.pp, found.schedule) == (2, 2, plan.decisions.schedule.name)
    assert found.profile is None


@pytest.mark.parametrize("name", VERBS)
def test_the_table_of_verbs_says_what_each_verb_says(name: str) -> None:
    first = " ".join((inspect.getdoc(load_verb(name)) or "").partition("\n\n")[0].split())
    assert VERBS[name][1] == first


def test_all_verbs_have_few_options() -> None:
    context = typer.Context(typer.main.get_command(app))
    verbs = [Verbs.get_command(context.command, context, name) for name in VERBS]  # type: ignore[arg-type]
    assert sum(p.param_type_name == "option" for verb in verbs for p in verb.params) <= 200
