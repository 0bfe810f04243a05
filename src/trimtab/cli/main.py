"""`trimtab`: one file per verb; bad input ends with one sentence and exit code 2."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from trimtab import __version__
from trimtab.cli import export
from trimtab.cli.check import check
from trimtab.cli.demo import demo
from trimtab.cli.describe import describe
from trimtab.cli.image_size import image_size
from trimtab.cli.map import map_model
from trimtab.cli.options import Verb, Verbs
from trimtab.cli.pack import pack
from trimtab.cli.plan import plan
from trimtab.cli.predict import predict
from trimtab.cli.probe import probe
from trimtab.cli.profile import profile
from trimtab.cli.report import report
from trimtab.cli.serve import serve
from trimtab.cli.size import size
from trimtab.cli.train import train
from trimtab.cli.uneven import uneven
from trimtab.errors import TrimtabError

app = typer.Typer(
    cls=Verbs,
    help="Balance data, pipeline stages and memory of vision-language models; write the decisions as one plan.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "plan": plan,
    "predict": predict,
    "check": check,
    "probe": probe,
    "train": train,
    "report": report,
    "serve": serve,
    "map": map_model,
    "describe": describe,
    "image-size": image_size,
    "profile": profile,
    "size": size,
    "pack": pack,
    "uneven": uneven,
}
for name, function in _VERBS.items():
    app.command(name, cls=Verb)(function)
for exported in export.app.registered_commands:
    exported.cls = Verb
app.add_typer(export.app, name="export")

_INSTALL_HINTS = {
    "pyarrow": "data",
    "PIL": "data",
    "tokenizers": "data",
    "jinja2": "data",
    "torch": "torch",
    "transformers": "torch",
    "safetensors": "torch",
    "accelerate": "torch",
    "ray": "ray",
    "fastapi": "serve",
    "openai": "serve",
    "uvicorn": "serve",
}


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; the one place where errors become messages and exit codes."""
    warnings.showwarning = lambda message, *_: print(f"trimtab: warning: {message}", file=sys.stderr)
    try:
        app()
    except TrimtabError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        extra = _INSTALL_HINTS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        _fail(f"this needs {error.name}, which is not installed: pip install 'trimtab[{extra}]'")
    except (FileExistsError, NotADirectoryError, FileNotFoundError, PermissionError, IsADirectoryError) as error:
        reason = (error.strerror or "no reason given").lower()
        _fail(f"cannot use {error.filename}: {reason}; name another file or folder")
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away: nothing is wrong, nobody is left to tell
        sys.exit(0)


def _fail(message: str) -> None:
    if "--json" in sys.argv:
        print(json.dumps({"error": message}))
    print(f"trimtab: {message}", file=sys.stderr)
    sys.exit(2)
