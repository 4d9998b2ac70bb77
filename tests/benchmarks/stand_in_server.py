"""A server for the load client to meet: it answers, refuses, hangs up or keeps silent, as the text says."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = {"label": "World", "confidence": 1.0, "probabilities": {"World": 1.0}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request.get("text", "")
        if text == "hang up":
            self.close_connection = True
            return
        if text == "keep silent":
            threading.Event().wait()
        answer = [ANSWER] * len(request["texts"]) if "texts" in request else ANSWER
        body = json.dumps(answer).encode()
        self.send_response(503 if text == "refuse" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.num_answered += 1

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class StandInServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.num_answered = 0


if __name__ == "__main__":
    StandInServer(int(os.environ["SERVED_PORT"])).serve_forever()
