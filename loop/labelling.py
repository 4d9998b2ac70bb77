"""A small page on this machine to label texts with the keyboard: one text at a time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from common.errors import UserError
from inference.observing.feedback import REVIEW, statement_id, storable
from inference.observing.store import Feedback, Store, StoreError
from loop.candidates import Item

HOST = "127.0.0.1"
_PAGE = (Path(__file__).parent / "labelling.html").read_bytes()
_MAX_BODY = 4096
# Nothing but this page: no other site can frame it, and none is asked for anything.
_POLICY = (
    "default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
)


def review_of(model: str, item: Item, label: str, author: str, at: float) -> Feedback:
    """The statement that ``label`` is right for a text of the queue."""
    return Feedback(
        id=statement_id(REVIEW, model, item.request, item.text, label, author),
        at=at,
        model=model,
        revision=item.revision,
        request=item.request,
        text=item.text,
        answered=item.answered,
        label=label,
        caller=item.caller,
        author=author,
        kind=REVIEW,
        why=item.why,
    )


class Session:
    """Labels a queue. Any thread may call it, since a browser asks on several connections."""

    def __init__(
        self, store: Store, model: str, labels: Sequence[str], items: Sequence[Item], author: str
    ) -> None:
        self._store, self._model, self._author = store, model, author
        self.labels, self._items = list(labels), list(items)
        # The label of each text so far, None if it was skipped. A label is written when the next
        # text is done with, so that it can be taken back: nothing that is recorded is deleted.
        self._given: list[str | None] = []
        self._num_written = 0
        self._lock = threading.Lock()

    def state(self) -> dict[str, Any]:
        with self._lock:
            place = len(self._given)
            item = self._items[place] if place < len(self._items) else None
            return {
                "labels": self.labels,
                "done": place,
                "total": len(self._items),
                "skipped": self._given.count(None),
                "can_undo": place > self._num_written,
                "item": item and {"text": item.text},
            }

    def give(self, place: int, label: str | None) -> None:
        """Label the text at ``place``, or skip it for None; another place than the current one is
        a key that was pressed twice, and does nothing.
        """
        with self._lock:
            if place != len(self._given) or place >= len(self._items):
                return
            self._write(place)
            self._given.append(label)

    def undo(self) -> None:
        with self._lock:
            if len(self._given) > self._num_written:
                self._given.pop()

    def finish(self) -> int:
        """Write what is not written yet; returns how many texts were labelled."""
        with self._lock:
            self._write(len(self._given))
            return len(self._given) - self._given.count(None)

    def _write(self, until: int) -> None:
        new = zip(
            self._items[self._num_written : until], self._given[self._num_written :], strict=False
        )
        now = time.time()
        reviews = [
            review_of(self._model, item, label, self._author, now)
            for item, label in new
            if label is not None
        ]
        if reviews:
            self._store.append(reviews)
        self._num_written = until


class LabellingServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, session: Session) -> None:
        """Raises:
        UserError: the port is in use.
        """
        self.session = session
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "must be between 0 and 65535"
            what = f"--port {port}: {reason}; name another one"
            raise UserError(what, code="review-port") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: LabellingServer

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(200, _PAGE, "text/html; charset=utf-8")
        elif self.path == "/state":
            self._send_json(200, self.server.session.state())
        else:
            self._send_json(404, {"error": "not found"})

    def do_POST(self) -> None:
        # Pages of other sites may send a form here, but not with this type without being asked;
        # and a name that leads to this machine is none of ours.
        is_ours = self.headers.get("Content-Type") == "application/json"
        if not is_ours or self.headers.get("Host") != self.server.address.removeprefix("http://"):
            self._send_json(403, {"error": "only this page may send labels"})
            return
        session = self.server.session
        try:
            sent = json.loads(self.rfile.read(min(int(self.headers["Content-Length"]), _MAX_BODY)))
            if self.path == "/undo":
                session.undo()
            elif self.path == "/label" and sent["label"] in (None, *session.labels):
                session.give(sent["place"], sent["label"])
            else:
                raise ValueError
        except StoreError as error:
            self._send_json(503, {"error": error.line})
        except (ValueError, KeyError, TypeError):
            self._send_json(400, {"error": "no such request"})
        else:
            self._send_json(200, session.state())

    def _send_json(self, status: int, content: Any) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: texts and labels are nobody's business."""


def author_named(name: str) -> str:
    """A name as the store can hold it.

    Raises:
        UserError: nothing is left of it.
    """
    if not (name := storable(name).strip()):
        raise UserError("--by: must be a name", code="review-value")
    return name
