"""One error form for everything that goes wrong: OpenAI's object, and nothing of the machine in it.

    ApiError(status, message, code, param) ──body()──> {"error": {"message", "type", "param", "code"}}   (+ Retry-After)

Never a path, an address, a module or a trace: messages are written here or by a check of the client's own values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...core.errors import RidgelineError

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
LONGEST_MESSAGE = 500


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s
        self.message = message[:LONGEST_MESSAGE]

    def content(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return json.dumps(self.content()).encode()

    def headers(self) -> dict[str, str]:
        extra = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return extra | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def internal() -> ApiError:
    """What a client learns of a bug of ours: that it is not the client's."""
    return ApiError(500, "the server failed to answer this request; it is not the request's fault", code="internal_error")


def unavailable(retry_after_s: int, why: str) -> ApiError:
    return ApiError(503, why, code="unavailable", retry_after_s=retry_after_s)


def busy(retry_after_s: int) -> ApiError:
    return ApiError(429, "too many requests are waiting; try again later", code="overloaded", retry_after_s=retry_after_s)


def refused(error: RidgelineError, what: str | None = None, param: str | None = None) -> ApiError:
    """A value of the client's that one of our checks refused; words with a slash in them might name a file, and stay here."""
    words = f"{what or error.what}: {error.why}"
    return ApiError(400, words if "/" not in words else what or "the request was refused", code="invalid_value", param=param)


def invalid(found: Sequence[Any]) -> ApiError:
    """From pydantic's list of what is wrong: the first of it, by the names of our own fields; values are not repeated."""
    first = found[0]
    # numbers and the names of union members stand between field names; only the latter are the client's business
    names = [part for part in first["loc"] if isinstance(part, str) and part.isidentifier() and part not in ("body", "str")]
    param = ".".join(names)[:100] or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field: {param}" if param else "unknown field", code="unknown_field", param=param)
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    if first["loc"] == ("body",) and first["type"] != "value_error":
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_body")
    reason = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {reason}" if param else reason, code="invalid_value", param=param)
