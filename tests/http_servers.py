"""Stand-ins for what answers over HTTP: a server on a free port of this machine."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Reads bodies and sends answers over connections that stay open."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *values: object) -> None:
        """Stay quiet."""

    def body(self) -> bytes:
        """Read what was sent, whole or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def send(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        """Answer with bytes, or with anything else as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Files(SimpleHTTPRequestHandler):
    def __init__(
        self, *arguments: Any, headers: Mapping[str, str], before: Callable[[str], object], **keywords: Any
    ) -> None:
        self._more_headers, self._before = headers, before
        super().__init__(*arguments, **keywords)

    def do_GET(self) -> None:
        self._before(self.path)
        super().do_GET()

    def end_headers(self) -> None:
        for name, value in self._more_headers.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *values: object) -> None:
        """Stay quiet."""


@contextmanager
def served(
    handler: Callable[..., BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Answer with a handler on a free port of this machine; gives its address."""
    with ThreadingHTTPServer((host, 0), handler) as server:
        # A browser keeps its connections open, and the end of the test does not wait for it to let go of them.
        server.block_on_close = False
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://{host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def served_answers(answer: Callable[[JsonHandler], Any]) -> Iterator[str]:
    """Answer every request with ``answer(request)`` as bytes or JSON; one that returns None has answered itself."""

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            content = answer(self)
            if content is not None:
                self.send(200, content)

        do_HEAD = do_POST = do_PUT = do_GET

    with served(Handler) as address:
        yield address


@contextmanager
def served_folder(
    folder: Path, headers: Mapping[str, str] | None = None, before: Callable[[str], object] = str
) -> Iterator[str]:
    """Serve a folder as any web server would, with these headers besides; ``before(path)`` may hold an answer up."""
    with served(partial(_Files, directory=str(folder), headers=headers or {}, before=before)) as address:
        yield address
