"""The command: its queue, its page, its files, and what it deletes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from inference.observing.store import KeptText, Store
from tests.inference.demo_browser import chromium, until, visits
from tests.processes import REPOSITORY, run_python

LABELS = "Business,Sports,World"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(str(tmp_path / "observed.sqlite"))
    texts = [
        KeptText(
            *(f"r{i}:0", float(i), "news", "abc", "a key" if i < 3 else "anonymous", f"Text number {i}"),
            *("World", i / 20, None, int(i % 4 == 0)),
        )
        for i in range(20)
    ]
    store.add({}, texts)
    yield store
    store.close()


def _review(store: Store, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", "loop.review", "--store", store.address, *arguments])


@contextmanager
def _serving(store: Store, *more: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-u", "-m", "loop.review", "--store", store.address]
    command += ["serve", "--by", "ann", "--port", "0", "--labels", LABELS, *more]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as one:
        try:
            line = one.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line + one.stdout.read()
            yield found[0], one
        finally:
            one.kill()


def test_the_queue_says_how_many_and_why(store: Store) -> None:
    done = _review(store, "queue", "--count", "10")

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("1", "uniform", "0", "disagreeing", "0", "shadow", "0", "unfamiliar", "9", "uncertain"),
        *("10", "in", "all"),
    ]


def test_the_page_is_labelled_with_the_keyboard_and_ends_cleanly(store: Store) -> None:
    with chromium() as browser, _serving(store, "--count", "5") as (address, process):
        with visits(browser, f"{address}/", "#labels button") as open_page:
            page = open_page(viewport={"width": 390, "height": 800})
            first = page.inner_text("#text")
            page.keyboard.press("3")
            until(page, "count.textContent.startsWith('1 of 5')")
            page.keyboard.press("u")
            until(page, "count.textContent.startsWith('0 of 5')")
            assert page.inner_text("#text") == first
            page.keyboard.press("2")
            until(page, "count.textContent.startsWith('1 of 5')")
            page.keyboard.press("s")
            until(page, "count.textContent === '2 of 5, 1 skipped'")
            for number in (3, 4, 5):
                page.get_by_role("button", name="Business").click()
                until(page, f"count.textContent.startsWith('{number} of 5')")
            until(page, "why.textContent.startsWith('Done')")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().split("\n")[-2] == "labelled 4 of 5 texts"
        assert process.wait() == 0

    found = store.feedback("news")
    assert {one.label for one in found if one.text == first} == {"Sports"}
    assert sorted(one.label for one in found) == ["Business", "Business", "Business", "Sports"]
    assert {(one.kind, one.author, one.answered, one.revision) for one in found} == {("review", "ann", "World", "abc")}
    assert {one.why for one in found} <= {"uncertain", "uniform"}


def test_only_the_page_itself_may_send_labels(store: Store) -> None:
    with _serving(store) as (address, _):
        label = {"place": 0, "label": "World"}
        form = httpx.post(f"{address}/label", content=json.dumps(label), headers={"Content-Type": "text/plain"})
        rebound = httpx.post(f"{address}/label", json=label, headers={"Host": "evil.example"})
        strange = httpx.post(f"{address}/label", json=label | {"label": "Weather"})
        twice = [httpx.post(f"{address}/label", json=label).json()["done"] for _ in range(2)]

    assert (form.status_code, rebound.status_code, strange.status_code) == (403, 403, 400)
    assert twice == [1, 1]  # a key that was pressed twice


@pytest.mark.parametrize("form", ["labelstudio", "argilla"])
def test_labels_of_a_queue_that_was_labelled_elsewhere_are_reviews(store: Store, tmp_path: Path, form: str) -> None:
    path = tmp_path / "queue.json"
    assert _review(store, "export", str(path), "--queue", "--count", "10", "--format", form).returncode == 0
    rows = json.loads(path.read_text())
    for row in rows:
        if form == "argilla":
            row["responses"] = {"label": [{"value": "Sports", "user_id": "bob"}]}
        else:
            row["annotations"] = [{"result": row["predictions"][0]["result"], "completed_by": {"email": "bob"}}]
    path.write_text(json.dumps(rows))

    done = _review(store, "import", str(path), "--labels", LABELS)
    again = _review(store, "import", str(path), "--labels", LABELS)

    assert done.stdout == f"{path}: 10 labels, 10 of them new\n", done.stderr
    assert again.stdout == f"{path}: 10 labels, 0 of them new\n"
    found = store.feedback("news")
    assert {(one.kind, one.author, one.answered) for one in found} == {("review", "bob", "World")}
    assert {one.request for one in found if one.why == "uniform"} <= {f"r{i}:0" for i in range(0, 20, 4)}
    assert sum(one.why == "uniform" for one in found) == 1


def test_an_import_with_an_unknown_label_records_nothing(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label,by\nA text,World,ann\nAnother,Wordl,ann\n")

    done = _review(store, "import", str(path))

    assert done.returncode == 2
    assert "label 'Wordl' is not one of World; add it with --labels [review-file]" in done.stderr
    assert not store.feedback("news")


def test_what_a_person_or_a_caller_sent_is_deleted(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label,by\nA text,World,ann\nAnother,World,bob\n")
    _review(store, "import", str(path))

    assert _review(store, "forget", "--by", "ann").stdout == "texts and statements deleted: 1\n"
    assert _review(store, "forget", "--caller", "a key").stdout == "texts and statements deleted: 3\n"
    assert [one.author for one in store.feedback("news")] == ["bob"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--store", "gone.sqlite", "queue"], "--store gone.sqlite: there is no such file"),
        (["--model", "spam", "queue"], "--model spam: is not there; there are news"),
        (["serve", "--by", " "], "--by: must be a name"),
        (["serve", "--by", "ann", "--port", "70000"], "--port 70000: must be between 0 and 65535"),
        (["import", "gone.csv"], "gone.csv: cannot be read (No such file or directory)"),
        (["forget"], "one of the arguments --by --caller is required"),
    ],
)
def test_a_mistake_is_one_line(store: Store, arguments: list[str], line: str) -> None:
    done = _review(store, *arguments)

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {line}")
    assert done.stderr.count("\n") == 1
