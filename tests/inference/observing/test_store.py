"""The database behind the counts and the feedback, on SQLite and on PostgreSQL if it is installed."""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
import sqlite3
from pathlib import Path

import pytest

from inference.observing.store import Counted, Feedback, KeptText, ShadowAnswer, Store, StoreError

DAY = 24 * 60


def _counted(minute: int = 10, kind: str = "texts", key: str = "") -> Counted:
    return Counted(minute, "news", "abc", kind, key)


def _text(number: int, at: float = 1.0, caller: str = "anonymous") -> KeptText:
    return KeptText(f"r{number}:0", at, "news", "abc", caller, "Shares fall", "Business", 0.9, None, 0)


def _statement(number: int, author: str = "ann") -> Feedback:
    return Feedback(
        *(f"f{number}", float(number), "news", "abc", f"r{number}:0", "Shares fall", "World", "Business"),
        *("anonymous", author, "correction", ""),
    )


def _add_from_a_process(address: str, times: int) -> None:
    store = Store(address)
    for _ in range(times):
        count = {("news", "abc"): lambda state: str(int(state or 0) + 1)}
        store.add({_counted(): (2, 0.5), _counted(kind="label", key="World"): (1, 0.0)}, advance=count)


def test_what_several_processes_count_adds_up(address: str) -> None:
    Store(address)
    processes = [
        multiprocessing.get_context("spawn").Process(target=_add_from_a_process, args=(address, 25)) for _ in range(3)
    ]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    store = Store(address)

    assert store.counts("news", "abc", 0, 100) == {("texts", ""): (150, 37.5), ("label", "World"): (75, 0.0)}
    assert store.alarm("news", "abc") == "75"  # no process has overwritten the state of another
    store.close()


def test_counts_are_read_by_time_and_kind(address: str) -> None:
    store = Store(address)
    store.add({_counted(10): (1, 0.0), _counted(11): (2, 0.0), _counted(11, "unfamiliar"): (4, 0.0)})

    assert store.counts("news", "abc", 11, 12, ["texts"]) == {("texts", ""): (2, 0.0)}
    assert not store.counts("news", "other", 0, 100)
    store.close()


def test_feedback_that_is_sent_again_is_recorded_once(address: str) -> None:
    store = Store(address)

    assert store.append([_statement(1), _statement(2)]) == [True, True]
    assert store.append([_statement(2), _statement(3)]) == [False, True]
    assert [one.id for one in store.feedback("news")] == ["f1", "f2", "f3"]
    store.close()


def test_all_of_a_group_is_recorded_or_none(address: str) -> None:
    store = Store(address)
    incomplete = dataclasses.replace(_statement(2), at=None)  # type: ignore[arg-type]

    with pytest.raises(StoreError, match="at"):
        store.append([_statement(1), incomplete])

    assert not store.feedback("news")
    store.close()


def test_what_one_person_sent_can_be_forgotten(address: str) -> None:
    store = Store(address)
    store.add({_counted(kind="caller", key="ann"): (1, 0.0)}, [_text(1, caller="ann"), _text(2, caller="bob")])
    store.append([_statement(1, author="ann"), _statement(2, author="bob")])

    assert store.forget(caller="ann") == 1
    assert store.forget(author="ann") == 1
    assert [one.caller for one in store.texts("news")] == ["bob"]
    assert [one.author for one in store.feedback("news")] == ["bob"]
    assert not store.counts("news", "abc", 0, 100)
    store.close()


def test_old_minutes_become_hours_and_lose_nothing(address: str) -> None:
    store = Store(address)
    store.add({_counted(minute): (1, 0.25) for minute in (60, 61, 119, 120)})
    now = (20 * DAY) * 60.0

    store.tidy(keep_texts_s=0, max_bytes=2**30, now=now)
    store.tidy(keep_texts_s=0, max_bytes=2**30, now=now)

    assert store.counts("news", "abc", 60, 61) == {("texts", ""): (3, 0.75)}
    assert store.counts("news", "abc", 120, 121) == {("texts", ""): (1, 0.25)}
    store.close()


def test_a_text_may_stop_to_count_as_drawn(address: str) -> None:
    store = Store(address)
    store.add({}, [dataclasses.replace(_text(number), uniform=1) for number in (1, 2)], undrawn=["r1:0", "r9:0"])

    assert {one.id: one.uniform for one in store.texts("news")} == {"r1:0": 0, "r2:0": 1}
    store.close()


def _shadow(number: int, text: str = "Shares fall") -> ShadowAnswer:
    return ShadowAnswer(f"r{number}:0", text, "new", "World", 0.7)


def test_what_a_candidate_answered_is_kept_with_its_text_and_goes_with_it(address: str) -> None:
    store = Store(address)
    store.add({}, [_text(1, 10.0), _text(2, 20.0, caller="ann"), _text(3, 30.0)], shadows=[_shadow(1)])
    # Sent again, of a text that is not kept, and of another text with the same request id.
    store.add({}, shadows=[_shadow(1), _shadow(2), _shadow(4), _shadow(3, "Goal!")])

    assert store.shadows("news") == [_shadow(2), _shadow(1)]
    assert not store.shadows("other")
    store.forget(caller="ann")
    assert store.shadows("news") == [_shadow(1)]
    store.tidy(10.0, 2**30, now=25.0)
    store.add({}, [_text(1, 10.0)])
    assert not store.shadows("news")
    store.close()


def test_nothing_of_a_deleted_text_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "observed.sqlite"
    store = Store(str(path))
    store.add({}, [_text(1)])
    assert store.forget(caller="anonymous") == 1
    store.close()

    assert not [one for one in tmp_path.iterdir() if b"Shares fall" in one.read_bytes()]


def test_texts_are_deleted_after_their_time(address: str) -> None:
    store = Store(address)
    store.add({}, [_text(1, at=100.0), _text(2, at=900.0)])

    store.tidy(keep_texts_s=500, max_bytes=2**30, now=1000.0)

    assert [one.id for one in store.texts("news")] == ["r2:0"]
    assert store.text("r1:0") is None
    store.close()


def test_the_oldest_texts_go_first_when_there_is_too_much_and_feedback_stays(address: str) -> None:
    store = Store(address)
    texts = [
        dataclasses.replace(_text(i, at=float(i)), text=random.Random(i).randbytes(1500).hex()) for i in range(6000)
    ]
    store.add({_counted(): (1, 0.0)}, texts)
    store.append([_statement(1)])

    assert store.tidy(keep_texts_s=1e9, max_bytes=6 * 2**20, now=10_000.0)

    kept = store.texts("news")
    assert kept[-1].id == "r5000:0"
    assert store.feedback("news")
    assert store.counts("news", "abc", 0, 100)
    store.close()


def test_a_file_that_is_no_database_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but longer than a header would be" * 10)

    with pytest.raises(StoreError, match=r"notes\.txt: the file is damaged, or not an SQLite database; move it away"):
        Store(str(path))
    assert path.read_text().startswith("not a database")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no folder .*missing; create it"):
        Store(str(tmp_path / "missing" / "observed.sqlite"))


def test_a_store_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "observed.sqlite"
    Store(str(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE about SET version = 99")

    with pytest.raises(StoreError, match="holds observations of version 99, and this server reads version 1"):
        Store(str(path))


def test_the_password_of_a_database_is_in_no_message() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError) as caught:
        Store("postgresql://ann:secret@127.0.0.1:1/observed")

    assert "secret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
