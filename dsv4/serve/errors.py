"""Errors as OpenAI's API has them: a status code and an object."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsv4.cli.prompt import PromptTooLong
from dsv4.command.errors import user_message

TOO_LONG = "context_length_exceeded"
# The encoder names the place by itself.
_TWICE = re.compile(r"^messages: (?=(messages|tools|response_format)\b)")
_FIELD = re.compile(r"^(messages|tools|response_format|prompt|reasoning_effort|stop)\b")


class ApiError(Exception):
    """What a client is told instead of an answer. ``param``: the field that is wrong."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def server_ending() -> ApiError:
    """What those are told who are not answered any more."""
    return ApiError(503, "the server is ending", code="shutdown")


def server_fault(error: Exception) -> ApiError:
    """What the client is told of a fault of the program that does not concern the engine."""
    return ApiError(500, f"a fault of the server: {error!r}"[:200])


@contextmanager
def field_errors(param: str) -> Iterator[None]:
    """What is wrong with a field, or with what it holds, as ``ApiError`` that names it."""
    try:
        yield
    except ValueError as error:
        message = user_message(error).removeprefix("--max-context: ")
        message = _TWICE.sub("", message)
        named = _FIELD.match(message)
        if named is None:
            message = f"{param}: {message}"
        code = TOO_LONG if isinstance(error, PromptTooLong) else None
        raise ApiError(400, message, param if named is None else named[0], code) from None
