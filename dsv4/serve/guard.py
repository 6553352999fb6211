"""Who may ask: with an API key whoever has it, without one whoever is on this machine."""

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv4.serve.errors import ApiError
from dsv4.serve.reply import json_response

OPEN_PATHS = frozenset(("/health",))
# Pages of the web reach a server on this machine by names of their own.
LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


class Guard:
    """Lets through who may ask; others get the error."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application behind the guard."""
        error = self._refused(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await json_response(error.body(), error.status)(scope, receive, send)

    def _refused(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._api_key is None:
            if _host_name(headers.get("host", "")) in LOCAL_NAMES:
                return None
            return ApiError(403, "Host: found another name than localhost, and no API key is set")
        given = headers.get("authorization", "").partition(" ")[2].strip()
        # A header is read as Latin-1, which gives back the bytes that were sent.
        same = hmac.compare_digest(given.encode("latin-1"), self._api_key)
        if same or scope["path"] in OPEN_PATHS:
            return None
        message = "Authorization: found no key of this server, expected Bearer KEY"
        return ApiError(401, message, code="invalid_api_key")


def _host_name(host: str) -> str | None:
    """The name or address in a header ``Host``."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
