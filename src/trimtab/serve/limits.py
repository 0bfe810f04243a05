"""What one server takes on: every size and time that a stranger's request could stretch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trimtab.errors import TrimtabError
from trimtab.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """Bounds of one request, of a batch and of the queue.

    Memory beyond the model is at most `max_waiting + max_batch` bodies, the decoded images of one request and the
    processed ones of those that wait, and one KV cache for each request of a batch.
    """

    max_body_bytes: int = 32 * MIB
    max_images: int = 8  # of one request
    max_pixels: int = 32 * 2**20  # of all images of one request together
    max_characters: int = 1_000_000  # of all texts of one request: a bound on templating and tokenising
    max_new_tokens: int = 1024  # of one answer; also what a request without max_tokens gets
    max_prompt_tokens: int | None = None  # image tokens included; None: as many as the model has positions
    max_batch: int = 16  # requests that are generated together
    max_batch_tokens: int = 32_768  # of the prompts of one batch, padding included; a request alone may have more
    max_waiting: int = 16  # accepted requests behind those that are being answered
    max_request_s: float = 300.0  # from acceptance to the last token
    max_transfer_s: float = 60.0  # for a client to send its body, and to take each piece of the answer
    drain_s: float = 330.0  # after SIGTERM, for what was accepted to finish

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
