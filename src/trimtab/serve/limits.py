"""What one server takes on: every size and time that a stranger's request could stretch."""

from dataclasses import dataclass, fields
from typing import Annotated

from trimtab.errors import TrimtabError
from trimtab.options import Option
from trimtab.units import MIB, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """Bounds of one request, of a batch and of the queue.

    Memory beyond the model is at most `max_waiting + max_batch` bodies, the decoded images of one request and the
    processed ones of those that wait, and one KV cache for each request of a batch.
    """

    max_body_bytes: Annotated[
        int, Option("Largest request, as in 32MiB.", flag="--max-body", read=parse_bytes, shown="32MiB")
    ] = 32 * MIB
    max_images: Annotated[int, Option("Images in a request.")] = 8
    max_pixels: Annotated[int, Option("Pixels of a request's images together.")] = 32 * 2**20
    max_characters: int = 1_000_000  # of all texts of one request: a bound on templating and tokenising
    max_prompt_tokens: Annotated[int | None, Option("Tokens of a conversation, images included.")] = (
        None  # None: as many as the model has positions
    )
    max_new_tokens: Annotated[int, Option("Tokens of an answer.")] = 1024  # also of a request without max_tokens
    max_batch: Annotated[int, Option("Requests that are generated together; each has its KV cache.")] = 16
    max_batch_tokens: int = 32_768  # of the prompts of one batch, padding included; a request alone may have more
    max_waiting: Annotated[int, Option("Requests that may wait while others are answered.")] = 16
    max_request_s: Annotated[float, Option("Seconds from acceptance to the last token.")] = 300.0
    max_transfer_s: float = 60.0  # for a client to send its body, and to take each piece of the answer
    drain_s: Annotated[float, Option("Seconds that accepted requests have left after SIGTERM.")] = 330.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("max_waiting", "max_images") else 1
            if value is not None and not value >= least:  # nan too
                option = field.name.removesuffix("_bytes").replace("_", "-")
                raise TrimtabError(f"--{option} {value} leaves nothing to serve: give {least} or more")

    @property
    def num_places(self) -> int:
        """Requests that may be accepted and unanswered at the same time."""
        return self.max_waiting + self.max_batch
