"""The server answers those who have its token, at its own address, and nobody else."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from threading import Thread

import pytest

from shardscope.report.html.page import Calls
from shardscope.report.serve.call_windows import CallRequest, CallWindow
from shardscope.report.serve.server import PageServer

ROWS = json.dumps({"offset": 0, "limit": 10})


def _answer(request: CallRequest) -> CallWindow:
    return CallWindow(num_rows=7, offset=request.offset, calls=Calls(rank=(1, 2)))


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer("<!doctype html><title>page</title>", _answer) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _ask(
    server: PageServer, method: str, path: str, body: str | None = None, **headers: str
) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, body, {name.title(): text for name, text in headers.items()})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response, data


def _cookie(server: PageServer) -> str:
    return f"shardscope-{server.server_port}={server.token}"


def test_token_is_exchanged_for_a_cookie_that_opens_the_page(server: PageServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.server_port}/?token={server.token}"
    assert len(server.token) >= 32
    response, _ = _ask(server, "GET", f"/?token={server.token}")
    assert (response.status, response.headers["Location"]) == (303, "/")
    cookie = response.headers["Set-Cookie"]
    assert cookie == f"{_cookie(server)}; HttpOnly; SameSite=Lax; Path=/"
    response, data = _ask(server, "GET", "/", cookie=_cookie(server))
    assert response.status == 200
    assert gzip.decompress(data) == b"<!doctype html><title>page</title>"
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["X-Frame-Options"] == "DENY"


def test_page_asks_for_rows(server: PageServer) -> None:
    own = f"http://127.0.0.1:{server.server_port}"
    response, data = _ask(server, "POST", "/calls", ROWS, cookie=_cookie(server), origin=own)
    assert response.status == 200
    window = json.loads(gzip.decompress(data))
    assert (window["num_rows"], window["calls"]["rank"]) == (7, [1, 2])


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 403),
        ("GET", "/?token=guess", {}, 403),
        ("GET", "/?token=", {}, 403),
        ("GET", "/", {"cookie": "shardscope=guess"}, 403),
        ("GET", "/", {"cookie": '="'}, 403),
        ("GET", "/", {"cookie": "OWN", "host": "evil.example"}, 403),  # DNS rebinding
        ("GET", "/?token=OWN", {"host": "evil.example"}, 403),
        ("GET", "/etc/passwd", {"cookie": "OWN"}, 404),
        ("GET", "/../../etc/passwd", {"cookie": "OWN"}, 404),
        ("GET", "/calls", {"cookie": "OWN"}, 404),
        ("POST", "/calls", {}, 403),
        ("POST", "/calls", {"cookie": "OWN", "host": "evil.example"}, 403),
        ("POST", "/calls", {"cookie": "OWN", "origin": "https://evil.example"}, 403),
        ("POST", "/calls", {"cookie": "OWN", "origin": "null"}, 403),
        ("POST", "/", {"cookie": "OWN"}, 404),
        ("PUT", "/", {"cookie": "OWN"}, 501),
    ],
)
def test_others_are_refused(
    server: PageServer, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    own = {"cookie": _cookie(server)}
    known = {name: own[name] if text == "OWN" else text for name, text in headers.items()}
    body = ROWS if method == "POST" else None
    response, data = _ask(server, method, path.replace("OWN", server.token), body, **known)
    assert response.status == status
    assert b"<title>page" not in data
    assert server.token.encode() not in data


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{",
        '{"offset": -1, "limit": 10}',
        '{"offset": 0, "limit": 100000}',
        '{"offset": 0, "limit": 10, "sort": "rank; DROP TABLE calls"}',
        '{"offset": 0, "limit": 10, "filters": [{"x": [[0, 1]]}]}',
        '{"offset": 0, "limit": 10, "filters": [{"rank": [["0", 1]]}]}',
    ],
)
def test_requests_that_are_not_understood_are_refused(server: PageServer, body: str) -> None:
    response, _ = _ask(server, "POST", "/calls", body, cookie=_cookie(server))
    assert response.status == 400


def test_request_that_is_too_large_is_not_read(server: PageServer) -> None:
    for length in ("1048577", "-1", "many"):
        response, _ = _ask(
            server, "POST", "/calls", **{"cookie": _cookie(server), "content-length": length}
        )
        assert response.status == 413


def test_server_listens_on_the_loopback_interface_only(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(OSError, match="in use"):
            PageServer("", None, port=busy.getsockname()[1])
