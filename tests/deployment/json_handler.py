"""What a stand-in for a JSON interface needs of HTTP."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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

    def send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        """Answer with bytes, or with anything else as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def served(
    handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Answer with a handler on a free port of this machine; gives its address."""
    with ThreadingHTTPServer((host, 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"{'https' if tls else 'http'}://{host}:{server.server_port}"
        server.shutdown()
        thread.join()
