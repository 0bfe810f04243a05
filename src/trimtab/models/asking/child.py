"""The process that is asked: one question on standard input, one answer on standard output, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from trimtab.errors import ConfigError, UnknownModelError
from trimtab.limited import limit_process

_REFUSED = (
    *("socket.connect", "socket.getaddrinfo", "socket.bind", "subprocess.Popen", "os.system", "os.exec"),
    *("os.posix_spawn", "os.fork", "os.forkpty", "pickle.find_class"),
)


def main() -> None:
    """Limits first, then the libraries, then the watch over what they do, then the question."""
    reply_to = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    limit_process(cpu_s=int(sys.argv[1]), memory_bytes=int(sys.argv[2]))
    question, config = json.load(sys.stdin)
    answer = _answers(question)
    sys.addaudithook(_watch)
    with os.fdopen(reply_to, "w", encoding="utf-8") as out:
        json.dump(_reply(answer, config), out)


def _answers(question: str) -> Callable[[dict[str, object]], Any]:
    """The function that answers; what it needs is imported."""
    if question in ("images", "clips"):
        from trimtab.models.asking.blank import install

        install()
        from trimtab.models.asking import images

        return images.answer_clips if question == "clips" else images.answer
    from trimtab.models.asking.model import described

    return described


def _reply(answer: Callable[[dict[str, object]], Any], config: dict[str, object]) -> dict[str, object]:
    try:
        return {"answer": answer(config)}
    except ConfigError as error:
        return {"refused": str(error), "unknown": isinstance(error, UnknownModelError)}
    except MemoryError:
        return {"refused": "the configuration asks for more memory than any model needs: correct its sizes"}


def _watch(event: str, arguments: tuple[object, ...]) -> None:  # noqa: ARG001 - the hook's arguments
    if event in _REFUSED:
        raise PermissionError(f"describing a model needs no {event}")


if __name__ == "__main__":
    main()
