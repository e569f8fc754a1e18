"""The outermost ASGI layer: who may enter, and how large a body may be.

Owns default-deny. It looks at the raw path alone, never at a URL built from the Host header or at
the router's idea of the path, so a route that is added later is covered without being named.
/health is open to all.
"""

import hmac
import json
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from anabranch.server.errors import ApiError

_OPEN = b"/health"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Guard:
    """api_key: the one accepted bearer token, or None. origins: web origins allowed (CORS)."""

    def __init__(self, app: ASGIApp, api_key: str | None, origins: tuple[str, ...]) -> None:
        self._app = app
        self._digest = None if api_key is None else sha256(api_key.encode()).digest()
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        error = self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await send_error(error, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if scope.get("raw_path") == _OPEN and scope["path"] == "/health":
            return None
        headers = dict(scope["headers"])
        if self._digest is not None:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            given = sha256(key.strip()).digest()
            if not hmac.compare_digest(given, self._digest) or scheme.lower() != b"bearer":
                return ApiError(401, "give the API key as 'Authorization: Bearer KEY'",
                                type="authentication_error", code="invalid_api_key")  # fmt: skip
            return None
        # No key: a page of another site must not use the visitor's own server.
        origin = headers.get(b"origin")
        if origin is not None and not self._may(origin.decode("latin-1")):
            return ApiError(403, "this web origin is not allowed; see --cors",
                            type="permission_error", code="origin_not_allowed")  # fmt: skip
        return None

    def _may(self, origin: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            return urlsplit(origin).hostname in _LOOPBACK
        except ValueError:
            return False


async def read_body(receive: Receive, limit: int) -> bytes:
    """The request's body; 413 past `limit` bytes, however its length was announced."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client left before its request ended")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def send_error(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    headers |= error.headers
    raw = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
