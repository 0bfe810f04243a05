"""Builds the documentation site: `python -m sphinx -W -q docs site`. Nothing is fetched, to build it or to view it."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

project = "trimtab"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["requirements.txt"]
html_theme = "furo"
html_title = "trimtab"
html_copy_source = False
myst_heading_anchors = 4  # as GitHub makes them, so that links between pages work in both places

default_role = "code"  # docstrings write `name` as Markdown does
maximum_signature_line_length = 100
# The reference needs docstrings and signatures alone, so the site builds without what the extras bring.
with (ROOT / "pyproject.toml").open("rb") as file:
    _extras = tomllib.load(file)["project"]["optional-dependencies"]
_packages = {re.match(r"[\w-]+", line)[0] for name in ("data", "torch", "serve") for line in _extras[name]}
autodoc_mock_imports = sorted(_packages - {"pillow", "trimtab"} | {"PIL", "huggingface_hub"})


class PublicNames(SphinxDirective):
    """The documented public names of each module, under the headings that the comments of its stub are."""

    def run(self) -> list[nodes.Node]:
        from trimtab import errors
        from trimtab.public import MODULES

        lines: list[str] = []
        for module in MODULES:
            stub = Path(str(importlib.import_module(module).__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
            for heading, name in re.findall(r"^# (.+)$|\b(\w+) as \2\b", stub, re.M):
                if heading:
                    title = heading if module == "trimtab" else f"{module}: {heading}"
                    lines += [title, "-" * len(title), ""]
                else:
                    kind = "data" if name.isupper() else "class" if name[0].isupper() else "function"
                    options = {"class": ["   :members:"], "data": ["   :no-value:"], "function": []}[kind]
                    lines += [f".. auto{kind}:: {module}.{name}", *options, ""]
        lines += ["trimtab.errors", "--------------", ""]
        for name, found in vars(errors).items():
            if inspect.isclass(found) and issubclass(found, errors.TrimtabError) and found is not errors.TrimtabError:
                lines += [f".. autoclass:: trimtab.errors.{name}", ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def menu_from_index(_: Sphinx, docname: str, source: list[str]) -> None:
    """The table of `index.md` is the site's menu: a bold row is a heading, a link a page."""
    if docname != "index":
        return
    for row in re.findall(r"^\|(.+)\|$", source[0], re.M):
        heading = re.match(r" \*\*(.+)\*\*", row)
        pages = re.findall(r"\]\(([\w/-]+)\.(?:md|rst)\)", row)
        if heading:
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading[1]}\n```\n"
        elif pages:
            source[0] = source[0].removesuffix("```\n") + "\n".join(pages) + "\n```\n"


class AsWritten(str):
    """An annotation that is printed as the source has it: `IntArray`, not what the name stands for."""

    __repr__ = str.__str__


def sign_as_written(_: Sphinx, kind: str, __: str, found: Any, *___: Any) -> tuple[str, str] | None:
    """The signature with the source's own names of types; none for a class of options, whose fields are listed."""
    if kind not in ("class", "function", "method") or (kind == "class" and issubclass(found, Exception)):
        return None
    if options_of(found):
        return "", ""
    signature = inspect.signature(found)
    parameters = []
    for parameter in signature.parameters.values():
        if inspect.isfunction(parameter.default):
            parameter = parameter.replace(default=AsWritten(parameter.default.__name__))
        parameters.append(parameter.replace(annotation=written(parameter.annotation)))
    returned = "" if kind == "class" or signature.return_annotation is signature.empty else signature.return_annotation
    plain = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return str(plain), str(returned)


def written(annotation: Any) -> Any:
    return AsWritten(annotation) if isinstance(annotation, str) else annotation


def options_of(found: Any) -> list[tuple[str, Any]]:
    """Names and `Option`s of a class of options, which the command line has as well."""
    from trimtab.options import option_fields

    if not (inspect.isclass(found) and is_dataclass(found)):
        return []
    return [(name, option) for name, _, option in option_fields(found) if option is not None]


def text_of_data(_: Sphinx, kind: str, name: str, __: Any, ___: Any, lines: list[str]) -> None:
    """What stands below the name where it is defined: a dict itself would say what a dict is."""
    if kind == "data":
        from trimtab.public import homes

        public, _, short = name.rpartition(".")
        module, there = homes(str(importlib.import_module(public).__file__))[short]
        lines[:] = ModuleAnalyzer.for_module(module).find_attr_docs()["", there]


def list_options(_: Sphinx, kind: str, __: str, found: Any, ___: Any, lines: list[str]) -> None:
    if kind == "class" and options_of(found):
        lines += ["", "Fields, each an option of the command line:", ""]
        for field, option in options_of(found):
            default = inspect.signature(found).parameters[field].default
            lines.append(f"- ``{field} = {default!r}``: {option.text}")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", sign_as_written)
    app.connect("autodoc-process-docstring", text_of_data)
    app.connect("autodoc-process-docstring", list_options)
    app.add_directive("public-names", PublicNames)
    app.connect("source-read", menu_from_index)
