"""Refusals of a request, in the shape of OpenAI's errors."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


def refusal(error: HTTPException) -> JSONResponse:
    """The answer that says what `error` says. A refusal is raised as `HTTPException(status, "one sentence")`."""
    kind = _KINDS.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    content = {"message": str(error.detail), "type": kind, "param": None, "code": None}
    return JSONResponse({"error": content}, status_code=error.status_code, headers=error.headers)
