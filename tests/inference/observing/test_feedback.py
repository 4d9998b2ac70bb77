"""The writer of corrections: what it has accepted is on the disk, once."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from inference.observing.feedback import (
    Correction,
    FeedbackFullError,
    FeedbackWriter,
    Recorded,
    TextNeededError,
    storable,
)
from inference.observing.store import KeptText, Store, StoreError

MOST_IN_FLIGHT = 64


def _correction(number: int = 0, text: str = "Shares fall", **given: str) -> Correction:
    fields = {"model": "news", "request_id": f"r{number}", "position": 0, "text": text, "label": "Business"}
    return Correction(**fields | {"author": "ann", "caller": "anonymous", "revision": "abc"} | given)


@contextmanager
def _writer(path: Path, **options: int) -> Iterator[FeedbackWriter]:
    writer = FeedbackWriter(str(path), **options)
    yield writer
    writer.close()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Another program writes to the database, and commits nothing yet."""
    Store(str(path)).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def test_the_same_correction_is_recorded_once_whatever_else_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "observed.sqlite"
    with _writer(path) as writer:
        first = writer.submit(_correction()).result()
        again = writer.submit(_correction(revision="def", caller="a key")).result()
        others = [
            writer.submit(_correction(**{name: "other"})).result() for name in ("label", "author", "text", "model")
        ]

    assert (first.known, again.known) == (False, True)
    assert first.id == again.id
    assert len({one.id for one in [first, *others]}) == 5
    assert not any(one.known for one in others)


def test_corrections_that_wait_share_a_commit(tmp_path: Path) -> None:
    path = tmp_path / "observed.sqlite"
    with _writer(path) as writer:
        with _locked(path):
            futures = [writer.submit(_correction(i)) for i in range(200)]
        assert not any(one.result().known for one in futures)

    # One moment for each commit: that of what came first, and that of all that came meanwhile.
    found = Store(str(path)).feedback("news")
    assert len(found) == 200
    assert len({one.at for one in found}) <= 2


def test_only_so_many_corrections_may_wait(tmp_path: Path) -> None:
    path = tmp_path / "observed.sqlite"
    with _writer(path, most_waiting=8) as writer:
        accepted: list[Future[Recorded]] = []
        corrections = map(_correction, range(100))
        with _locked(path), pytest.raises(FeedbackFullError):
            accepted.extend(map(writer.submit, corrections))
        assert 8 <= len(accepted) <= 16
        assert not any(one.result().known for one in accepted)


def test_a_text_that_is_kept_need_not_be_sent(tmp_path: Path) -> None:
    path = tmp_path / "observed.sqlite"
    store = Store(str(path))
    kept = KeptText("r1:2", 1.0, "news", "the old one", "anonymous", "A kept text", "World", 0.9, None, 0)
    store.add({}, [kept])
    with _writer(path) as writer:
        writer.submit(_correction(1, "", position=2)).result()
        for unknown in (
            _correction(1, "", position=3),
            _correction(2, ""),
            _correction(1, "", position=2, model="spam"),
        ):
            with pytest.raises(TextNeededError):
                writer.submit(unknown).result()

    [found] = store.feedback("news")
    assert (found.text, found.answered, found.revision) == ("A kept text", "World", "the old one")
    store.close()


def test_another_text_with_the_same_request_id_is_not_taken_for_the_kept_one(tmp_path: Path) -> None:
    path = tmp_path / "observed.sqlite"
    store = Store(str(path))
    store.add({}, [KeptText("r1:0", 1.0, "news", "abc", "anonymous", "A kept text", "World", 0.9, None, 0)])
    with _writer(path) as writer:
        writer.submit(_correction(1, "Another text")).result()

    [found] = store.feedback("news")
    assert (found.text, found.answered) == ("Another text", "")
    store.close()


def test_a_broken_store_fails_each_that_waits_and_is_opened_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "missing"
    with _writer(folder / "observed.sqlite") as writer:
        for _ in range(3):
            with pytest.raises(StoreError, match="there is no folder"):
                writer.submit(_correction()).result()
        folder.mkdir()
        assert not writer.submit(_correction()).result().known

    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["feedback is not recorded"]


def test_nobody_records_what_was_taken_back_before_its_turn(tmp_path: Path) -> None:
    path = tmp_path / "observed.sqlite"
    with _writer(path) as writer:
        with _locked(path):
            first = writer.submit(_correction(1))
            while not first.running():
                pass
            second = writer.submit(_correction(2))
            assert second.cancel()
        first.result()

    assert [one.request for one in Store(str(path)).feedback("news")] == ["r1:0"]


def test_what_a_database_cannot_hold_is_left_out() -> None:
    assert storable("a\0b\ud83dc \U0001f600") == "abc \U0001f600"


def _submit_until_killed(path: Path, first: int, accepted: int) -> None:
    """Write a line with its number for each correction that was accepted; never returns."""
    writer = FeedbackWriter(str(path))
    free = threading.Semaphore(MOST_IN_FLIGHT)
    for number in range(first, first + 1_000_000):
        free.acquire()
        future = writer.submit(_correction(number))

        def say(done: object, number: int = number) -> None:
            os.write(accepted, b"%d\n" % number)
            free.release()

        future.add_done_callback(say)


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_no_accepted_correction_is_lost_or_doubled_by_kill_9_under_load(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "observed.sqlite"
    accepted: list[int] = []
    for kill in range(kills):
        reader, end = os.pipe()
        # Each sends again what its predecessor may have recorded without saying so.
        first = max(accepted[-1] - MOST_IN_FLIGHT, 0) if accepted else 0
        if (child := os.fork()) == 0:
            try:
                _submit_until_killed(path, first, end)
            finally:
                os._exit(1)
        os.close(end)
        with os.fdopen(reader) as lines:
            seen = [int(next(lines)) for _ in range(random.Random(kill).randint(1, 400))]
            os.kill(child, 9)
            seen += [int(line) for line in lines if line.endswith("\n")]
        assert os.waitpid(child, 0)[1] == 9
        accepted += seen

    recorded = [int(one.request[1:-2]) for one in Store(str(path)).feedback("news")]
    assert len(recorded) == len(set(recorded))
    assert set(accepted) <= set(recorded)
    assert len(set(recorded) - set(accepted)) <= kills * MOST_IN_FLIGHT
