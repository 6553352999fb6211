"""Who may ask: with an API key whoever has it, without one whoever is on this machine; and how
many at once.
"""

import hmac
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv4.serve.errors import ApiError
from dsv4.serve.reply import json_response

OPEN_PATHS = frozenset(("/health",))
# Pages of the web reach a server on this machine by names of their own.
LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
# With those whose bodies are still being sent, which the queue does not see: no more than these
# wait, however long the queue may be.
MOST_REQUESTS = 256


class Guard:
    """Lets through who may ask, up to ``MOST_REQUESTS`` at once; others get the error."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode("utf-8")
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application behind the guard."""
        scope = _origin_form(scope)
        error = (self._refused(scope) or self._full(scope)) if scope["type"] == "http" else None
        if error is not None:
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            await json_response(error.body(), error.status, headers)(scope, receive, send)
            return
        self._requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1

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

    def _full(self, scope: Scope) -> ApiError | None:
        if self._requests < MOST_REQUESTS or scope["path"] in OPEN_PATHS:
            return None
        message = f"the server is full: {self._requests} requests"
        return ApiError(503, message, code="queue_full")


def _origin_form(scope: Scope) -> Scope:
    """The same request for one whose target is a whole URL, as proxies are sent: its host counts,
    and not that of the headers (RFC 9112, 3.2.2).
    """
    scheme, _, rest = scope.get("raw_path", b"").partition(b"://")
    if scheme.lower() not in (b"http", b"https"):
        return scope
    host, _, path = rest.partition(b"/")
    raw_path = b"/" + path
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {
        **scope,
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "headers": [(b"host", host), *headers],
    }


def _host_name(host: str) -> str | None:
    """The name or address in a header ``Host``."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
