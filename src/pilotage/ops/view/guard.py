"""Who gets an answer: on loopback whoever names this machine, elsewhere whoever has the key."""

import hashlib
import ipaddress
from secrets import compare_digest
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address, or whether a name always means this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Refuses strangers and sets the headers of every answer.

    On loopback a page of another site could still be led here by a name that resolves to 127.0.0.1, so the
    Host header must be a loopback name. Elsewhere a key is needed: it comes once in the address and is then
    kept in a cookie that scripts cannot read.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, is_loopback: bool) -> None:
        self._app = app
        self._key = key
        self._is_loopback = is_loopback
        # Cookies do not know ports: two servers on one machine must not take each other's.
        digest = hashlib.sha256((key or "").encode()).hexdigest()
        self._cookie = f"pilotage_view_{digest[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(HTTPConnection(scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, connection: HTTPConnection) -> Response | None:
        """Return what a request gets in place of a page, or None where it gets the page."""
        if self._is_loopback:
            host = connection.headers.get("host", "")
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            if not is_loopback(name):
                return PlainTextResponse(
                    f"this page answers to localhost only, not to {name!r}\n", status_code=421
                )
        if self._key is None:
            return None
        given = connection.query_params.get("key")
        if given is not None and self._is_key(given):
            return self._welcome(connection)
        if self._is_key(connection.cookies.get(self._cookie, "")):
            return None
        return PlainTextResponse(
            "open the address that `pilotage view` printed; it has the key\n", status_code=403
        )

    def _is_key(self, word: str) -> bool:
        return self._key is not None and compare_digest(word.encode(), self._key.encode())

    def _welcome(self, connection: HTTPConnection) -> Response:
        """Keep the key in a cookie and out of the address."""
        rest = [(name, value) for name, value in connection.query_params.multi_items() if name != "key"]
        path = "/" + connection.url.path.lstrip("/")  # `//host` would lead elsewhere
        answer = RedirectResponse(path + (f"?{urlencode(rest)}" if rest else ""), status_code=303)
        answer.set_cookie(self._cookie, self._key or "", httponly=True, samesite="strict")
        return answer
