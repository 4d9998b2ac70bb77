"""An S3 server on this machine, and a line to it that can be cut."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from select import select

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a server that keeps its buckets in memory."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        told = next(line for line in server.stdout if "Running on http" in line)
        # What it says of each request must not fill the pipe.
        threading.Thread(target=lambda: [None for _ in server.stdout], daemon=True).start()
        yield int(told.strip().rsplit(":", 1)[1])
    finally:
        server.kill()
        server.wait()


class Line:
    """A port that passes everything on to another, until it is cut; then it refuses whoever calls.

    Args:
        to: the other port.
    """

    def __init__(self, to: int) -> None:
        self.to = to
        self.cut_at = b""  # the line breaks when this is sent; it does not arrive
        self._start(_listen(0))

    def _start(self, listener: socket.socket) -> None:
        self.port = listener.getsockname()[1]
        self.is_cut = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        self.thread.start()

    def restore(self) -> None:
        """Answer again, on the same port."""
        self.thread.join()
        self.cut_at = b""
        self._start(_listen(self.port))

    def _serve(self, listener: socket.socket) -> None:
        peers: dict[socket.socket, socket.socket] = {}
        while not self.is_cut.is_set():
            for ready in select([listener, *peers], [], [])[0]:
                if ready is listener:
                    caller, server = listener.accept()[0], socket.create_connection(("127.0.0.1", self.to))
                    peers |= {caller: server, server: caller}
                elif ready in peers:
                    self._pass_on(ready, peers)
        for end in [listener, *peers]:
            end.close()

    def _pass_on(self, ready: socket.socket, peers: dict[socket.socket, socket.socket]) -> None:
        data = b""
        with suppress(OSError):
            data = ready.recv(65536)
        if self.cut_at and self.cut_at in data:
            self.is_cut.set()
        elif data:
            with suppress(OSError):
                peers[ready].sendall(data)
        else:
            for end in (ready, peers[ready]):
                peers.pop(end)
                end.close()


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener
