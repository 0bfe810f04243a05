"""`trimtab`: runs a verb; bad input ends with one sentence and exit code 2."""

import errno
import json
import os
import shutil
import sys
import warnings
from contextlib import suppress
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from trimtab.errors import TrimtabError, shorten

_INSTALL_HINTS = {
    **dict.fromkeys(("pyarrow", "PIL", "tokenizers", "jinja2"), "data"),
    **dict.fromkeys(("torch", "transformers", "safetensors", "accelerate"), "torch"),
    **dict.fromkeys(("fastapi", "openai", "uvicorn"), "serve"),
}

_MADE_WITH = {"transformers": "5.23"}
"""Packages whose names moved from version to version, and the one that ours are of (docs/tables/compatibility.md)."""


def _what_to_install(package: str, error: ImportError) -> str:
    """Return a sentence on a package that is not there, or is another version than the one that was imported from."""
    extra = _INSTALL_HINTS[package]
    if find_spec(package) is None:
        return f"this needs {package}, which is not installed: pip install 'trimtab[{extra}]'"
    needed = f"{package}=={_MADE_WITH[package]}.*" if package in _MADE_WITH else f"trimtab[{extra}]"
    found = getattr(sys.modules.get(package), "__version__", "the one that is installed")
    said = str(error).partition(" (")[0]  # without the file
    return f"this needs another version of {package} than {found} ({said}): pip install -U '{needed}'"


def main() -> None:
    """Run the command line; the one place where errors become messages and exit codes."""
    warnings.showwarning = lambda message, *_: print(f"trimtab: warning: {message}", file=sys.stderr)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open to the end)
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of characters that the terminal lacks
    if sys.argv[1:] == ["--help"]:  # without Typer
        from trimtab.cli.verbs import help_text

        print(help_text(min(shutil.get_terminal_size().columns, 120)), end="")
        return
    from trimtab.cli.app import app

    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # which typer has turned into exit code 1
            _stop_quietly()
        raise
    except BrokenPipeError:
        _stop_quietly()
    except TrimtabError as error:
        _fail(str(error), error)
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if package not in _INSTALL_HINTS:
            raise
        _fail(_what_to_install(package, error))
    except OSError as error:
        reason = (error.strerror or str(error) or "no reason given").lower()
        _fail(f"cannot use {error.filename or 'the output'}: {reason}; {_CURES.get(error.errno or 0, _OTHER)}", error)
    except MemoryError:
        _fail("this takes more memory than there is here: give less data at once, or use a larger machine")


_OTHER = "name another file or folder"
_CURES = {
    errno.ENOSPC: "make room there, or name another place",
    errno.EDQUOT: "make room there, or name another place",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or name another place",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


def _stop_quietly() -> NoReturn:
    """The reader of our output went away: nothing is wrong, nobody is left to tell."""
    _drop_output()
    sys.exit(0)


def _drop_output() -> None:
    """Drop what is left to print; else Python complains once more at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, error: Exception | None = None) -> NoReturn:
    from trimtab.cli.app import is_further_rank, shorten_words

    is_said = getattr(error, "is_said", None)
    if is_said or (is_said is None and is_further_rank()):
        sys.exit(2)
    message = "\n".join(shorten(line, len(line)) for line in shorten_words(message).split("\n"))
    try:
        if "--json" in sys.argv:
            print(json.dumps({"error": message}))
        sys.stdout.flush()
    except OSError:
        _drop_output()
    print(f"trimtab: {message}", file=sys.stderr)
    sys.exit(2)
