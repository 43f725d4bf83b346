"""A server with GitHub's addresses for comments of a pull request, on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

COMMENTS = re.compile(r"/repos/octo/model/issues/(\d+)/comments\?per_page=(\d+)&page=(\d+)$")


class Comments:
    """Comments by their id; `may_write` is whether the token's holder may write."""

    def __init__(self, bodies: list[str], *, may_write: bool = True) -> None:
        self.bodies = dict(enumerate(bodies))
        self.may_write = may_write
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.url = ""

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        if method == "GET":
            match = COMMENTS.match(path)
            assert match is not None, path
            size, page = int(match[2]), int(match[3])
            listed = [{"id": number, "body": text} for number, text in self.bodies.items()]
            return 200, listed[size * (page - 1) : size * page]
        if not self.may_write:
            return 403, {"message": "Resource not accessible by integration"}
        number = len(self.bodies) if method == "POST" else int(path.rpartition("/")[2])
        self.bodies[number] = body["body"]
        return 201 if method == "POST" else 200, {"id": number}


@contextmanager
def serve_comments(comments: Comments) -> Iterator[Comments]:
    """Serve the comments at `comments.url` until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            comments.tokens.add(self.headers["Authorization"])
            status, answer = comments.answer(self.command, self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def do_GET(self) -> None:
            self.reply()

        def do_POST(self) -> None:
            self.reply()

        def do_PATCH(self) -> None:
            self.reply()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    comments.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield comments
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
