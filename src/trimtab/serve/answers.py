"""What the model's side tells, and its shapes on the wire: `chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.serve.problems import RequestError


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to send."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The answer is whole."""

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    new_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
        }


Event = Piece | Done | RequestError


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all parts of one answer have in common."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        choices = [{"index": 0, "message": message, "finish_reason": done.finish_reason}]
        return {**self._fields("chat.completion"), "choices": choices, "usage": done.usage}

    def delta(self, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
        return {**self._fields("chat.completion.chunk"), "choices": choices}

    def usage(self, done: Done) -> dict[str, Any]:
        return {**self._fields("chat.completion.chunk"), "choices": [], "usage": done.usage}

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
