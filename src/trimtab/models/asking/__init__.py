"""What Transformers says of its own models: the side that needs torch. A limited child is asked one question."""

import json
import sys
from collections.abc import Callable
from typing import Any

from trimtab.limited import at

_REFUSED = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pickle.find_class")


def answer(question: str, config: dict[str, object], cpu_s: int) -> bytes:
    """The answer as JSON: the libraries first, then a watch over what they do, then the question."""
    at("the configuration", cpu_s=cpu_s)
    work = find_work(question)
    sys.addaudithook(_watch)
    return json.dumps(work(config)).encode()


def find_work(question: str) -> Callable[[dict[str, object]], Any]:
    """The function that answers; what it needs is imported."""
    if question in ("images", "clips"):
        from trimtab.models.asking.blank import install

        install()
        from trimtab.models.asking import images

        return images.answer_clips if question == "clips" else images.answer
    from trimtab.models.asking import model

    return model.described_by_its_code if question == "own code" else model.described


def _watch(event: str, arguments: tuple[object, ...]) -> None:  # noqa: ARG001 - the hook's arguments
    if event in _REFUSED:
        raise PermissionError(f"describing a model needs no {event}")
