"""An HTTP server for one page, which only the user of this machine who started it can reach."""

from __future__ import annotations

import gzip
import hmac
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final
from urllib.parse import parse_qs, urlsplit

import msgspec

from shardscope.record.encoding import encode_json
from shardscope.report.serve.call_windows import CallRequest, CallWindow

_HOST = "127.0.0.1"
_COOKIE = "shardscope"
_MAX_BODY = 2**20
_TIMEOUT_S = 30  # for a request to arrive
_GZIP_LEVEL = 1

AnswerCalls = Callable[[CallRequest], CallWindow]


@final
class PageServer(ThreadingHTTPServer):
    """Serves a document and the rows of its table, on the loopback interface.

    The address has a token that is drawn anew for each server; it is exchanged for a cookie, so
    that it does not stay in the address bar. Requests whose Host is not this server's own are
    refused, because any name may resolve to 127.0.0.1 and would reach it too.
    """

    daemon_threads = False  # closing the server waits for its threads
    allow_reuse_address = False

    def __init__(self, document: str, answer_calls: AnswerCalls | None, *, port: int = 0) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__((_HOST, port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self.document = gzip.compress(document.encode("utf-8"), _GZIP_LEVEL)
        self.answer_calls = answer_calls
        self.hosts = frozenset(f"{name}:{self.server_port}" for name in (_HOST, "localhost"))

    @property
    def url(self) -> str:
        """The address to open, with the token."""
        return f"http://{_HOST}:{self.server_port}/?token={self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close all connections, which browsers leave open, and wait for their threads."""
        for connection in tuple(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close a connection; others are answered by the handler."""


@final
class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "shardscope", ""
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """Answer the document, or exchange the token for a cookie."""
        address = urlsplit(self.path)
        if not self._is_own_host() or address.path != "/":
            self._refuse(HTTPStatus.NOT_FOUND if self._is_own_host() else HTTPStatus.FORBIDDEN)
        elif self._has_token(*parse_qs(address.query).get("token", [])):
            self._redirect()
        elif self._has_cookie():
            self._send(self.server.document, "text/html; charset=utf-8")
        else:
            self._refuse(HTTPStatus.FORBIDDEN)

    def do_POST(self) -> None:
        """Answer the rows that the page's table asks for."""
        origin = self.headers.get("Origin")
        is_own = self._is_own_host() and (origin is None or urlsplit(origin).netloc in self._hosts)
        if not is_own or not self._has_cookie():
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        if self.path != "/calls" or self.server.answer_calls is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        body = self._read_body()
        if body is None:
            return
        try:
            request = msgspec.json.decode(body, type=CallRequest)
        except (ValueError, RecursionError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"{error}.")
            return
        window = encode_json(self.server.answer_calls(request))
        self._send(gzip.compress(window, _GZIP_LEVEL), "application/json")

    @property
    def _hosts(self) -> frozenset[str]:
        return self.server.hosts

    def _is_own_host(self) -> bool:
        return self.headers.get("Host", "") in self._hosts

    def _has_token(self, *tokens: str) -> bool:
        return any(_is_equal(token, self.server.token) for token in tokens)

    def _has_cookie(self) -> bool:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return False
        name = self._cookie_name
        return name in cookies and _is_equal(cookies[name].value, self.server.token)

    @property
    def _cookie_name(self) -> str:
        # Cookies are shared by all ports of a host.
        return f"{_COOKIE}-{self.server.server_port}"

    def _read_body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return None
        return self.rfile.read(int(length))

    def _redirect(self) -> None:
        self.send_response(HTTPStatus.SEE_OTHER)
        cookie = f"{self._cookie_name}={self.server.token}; HttpOnly; SameSite=Lax; Path=/"
        self.send_header("Set-Cookie", cookie)
        self.send_header("Location", "/")
        self._end(b"")

    def _refuse(self, status: HTTPStatus, reason: str = "") -> None:
        self.close_connection = True  # the rest of the request was not read
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Connection", "close")
        remedy = "Open the address that `shardscope serve` printed."
        self._end((reason or f"{status.phrase}. {remedy}\n").encode("utf-8", "replace"))

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Encoding", "gzip")
        self._end(data)

    def _end(self, data: bytes) -> None:
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a log would contain the token."""


def _is_equal(text: str, token: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), token.encode())
