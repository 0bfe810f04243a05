"""The table of verbs is what the verbs say, and their options stay few."""

from __future__ import annotations

import inspect

import pytest
import typer

from trimtab.cli.app import Verbs, app
from trimtab.cli.verbs import VERBS, load_verb


@pytest.mark.parametrize("name", VERBS)
def test_the_table_of_verbs_says_what_each_verb_says(name: str) -> None:
    first = " ".join((inspect.getdoc(load_verb(name)) or "").partition("\n\n")[0].split())
    assert VERBS[name][1] == first


def test_all_verbs_have_few_options() -> None:
    context = typer.Context(typer.main.get_command(app))
    verbs = [Verbs.get_command(context.command, context, name) for name in VERBS]  # type: ignore[arg-type]
    assert sum(p.param_type_name == "option" for verb in verbs for p in verb.params) <= 200
