"""Takes corrections from users: those that wait are written together, in one transaction, and each
is answered once it is on the disk.

A commit waits for the disk, for milliseconds. While it does, further corrections arrive, and the
next commit writes all of them: so the more arrive, the more share a commit.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from typing import NamedTuple

from inference.observing.failures import FailureLog
from inference.observing.store import Feedback, KeptText, Store

logger = logging.getLogger(__name__)

# Corrections that may wait for the disk; the largest that a request can carry take 64 MiB.
MOST_WAITING = 1024
CORRECTION, REVIEW = "correction", "review"
_CLOSE_S = 10.0


class TextNeededError(Exception):
    """A correction names its text by a request whose text is not kept."""


class FeedbackFullError(Exception):
    """As many corrections wait as may."""


@dataclass(frozen=True, slots=True)
class Correction:
    """``text``: empty if the store is to look it up by ``request_id`` and ``position``, the place of
    the text in that request. ``revision``: of the model that is served now.
    """

    model: str
    request_id: str
    position: int
    text: str
    label: str
    author: str
    caller: str
    revision: str

    @property
    def id(self) -> str:
        """The same for the same statement: sending it again records nothing new. When, by which
        key, and what is served by then make no difference.
        """
        return statement_id(*astuple(self)[:6])


class Recorded(NamedTuple):
    """``known``: the same correction had been recorded before."""

    id: str
    known: bool


def statement_id(*parts: str | int) -> str:
    # Each part with its length, since any of them may hold any character.
    joined = "".join(f"{len(str(part))}:{part}" for part in parts)
    return hashlib.sha256(joined.encode()).hexdigest()[:32]


def storable(text: str) -> str:
    """Without what a database refuses: half of a surrogate pair, and PostgreSQL the character 0."""
    return text.encode("utf-8", "ignore").decode().replace("\0", "")


class FeedbackWriter:
    """Writes corrections on a thread of its own, which starts with the first one."""

    def __init__(self, address: str, most_waiting: int = MOST_WAITING) -> None:
        """``address``: as `Store` takes it; opened on the thread, and again after a failure."""
        self._address = address
        self._waiting: queue.Queue[tuple[Correction, Future[Recorded]] | None]
        self._waiting = queue.Queue(most_waiting)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._store: Store | None = None
        self._log = FailureLog("feedback is not recorded", logger)

    def submit(self, correction: Correction) -> Future[Recorded]:
        """Have a correction recorded; the future ends when it is on the disk.

        Its errors: `TextNeededError`; `StoreError`, of which nothing is recorded.

        Raises:
            FeedbackFullError: too many wait.
        """
        future: Future[Recorded] = Future()
        try:
            self._waiting.put_nowait((correction, future))
        except queue.Full:
            raise FeedbackFullError from None
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="feedback", daemon=True)
                self._thread.start()
        return future

    def close(self) -> None:
        """Write what waits, and end the thread; nothing may be submitted any more."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            group = [self._waiting.get()]
            while not self._waiting.empty():
                group.append(self._waiting.get())
            is_open = None not in group
            # Nobody waits any more for a cancelled one, whose client is gone.
            self._write(
                [one for one in group if one is not None and one[1].set_running_or_notify_cancel()]
            )
        if self._store is not None:
            self._store.close()

    def _write(self, group: list[tuple[Correction, Future[Recorded]]]) -> None:
        try:
            statements = self._record([correction for correction, _ in group])
        except Exception as error:
            self._log(error)
            self._store = None  # opened again for the next group: it may be there again by then
            for _, future in group:
                future.set_exception(error)
            return
        for (_, future), recorded in zip(group, statements, strict=True):
            if recorded is None:
                future.set_exception(TextNeededError())
            else:
                future.set_result(recorded)

    def _record(self, corrections: list[Correction]) -> list[Recorded | None]:
        if self._store is None:
            self._store = Store(self._address)
        now, store = time.time(), self._store
        statements = [_statement(one, _kept(store, one), now) for one in corrections]
        new = iter(store.append([one for one in statements if one is not None]))
        return [one and Recorded(one.id, not next(new)) for one in statements]


def _kept(store: Store, correction: Correction) -> KeptText | None:
    if not correction.request_id:
        return None
    kept = store.text(f"{correction.request_id}:{correction.position}")
    # Request ids are the clients' own, so another text may have the same one.
    is_same = kept is not None and kept.model == correction.model
    return kept if is_same and correction.text in ("", kept.text) else None


def _statement(correction: Correction, kept: KeptText | None, now: float) -> Feedback | None:
    """None if there is no text."""
    if kept is None and not correction.text:
        return None
    return Feedback(
        id=correction.id,
        at=now,
        model=correction.model,
        revision=kept.revision if kept else correction.revision,
        request=f"{correction.request_id}:{correction.position}" if correction.request_id else "",
        text=kept.text if kept else correction.text,
        answered=kept.label if kept else "",
        label=correction.label,
        caller=correction.caller,
        author=correction.author,
        kind=CORRECTION,
        why="",
    )
