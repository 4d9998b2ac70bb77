"""A session starts over at any moment, and what is told of it belongs together."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from learn.cards import runner
from learn.cards.runner import num_workers
from learn.cards.session import Session
from tests.learn.cards.small_runs import small_pipeline

WAIT_SECONDS = 10


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(small_pipeline(tmp_path), tmp_path / "runs") as session:
        yield session


def test_a_session_without_a_step_leaves_the_run_before_it(tmp_path: Path) -> None:
    pipeline = small_pipeline(tmp_path)
    with runner.Runner(pipeline, tmp_path / "runs") as earlier:
        earlier.step()
    kept = earlier.storage.folder / "load" / "dataset.safetensors"

    with Session(pipeline, tmp_path / "runs") as session:
        session.reset()

    assert kept.exists()


def test_a_reset_while_the_ranks_are_being_started_ends_them(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    starting, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Unreachable:
        """Ranks that take a while to start, and then wait for each other until they are ended."""

        def __init__(self, *_: Any) -> None:
            starting.set()
            go_on.wait(WAIT_SECONDS)

        def run(self, jobs: Any) -> Any:
            assert closed.wait(WAIT_SECONDS)
            raise ConnectionError

        def close(self) -> None:
            closed.set()

    monkeypatch.setattr(runner, "LocalWorkers", Unreachable)
    session.run()
    assert starting.wait(WAIT_SECONDS)
    reset = threading.Thread(target=session.reset)
    reset.start()
    go_on.set()
    reset.join(WAIT_SECONDS / 2)

    assert not reset.is_alive()
    assert session.number == 2


def test_a_reset_keeps_what_another_page_has_just_set(session: Session) -> None:
    with session._lock:
        reset = threading.Thread(target=session.reset, args=(3,))
        reset.start()
        session._start_over(session.pipeline.configured("prepare", batch_size=60))
    reset.join(WAIT_SECONDS)

    assert num_workers(session.pipeline) == 3
    assert session.pipeline.node("prepare").config.batch_size == 60


def test_the_losses_of_a_run_are_not_counted_on_by_those_of_the_next(session: Session) -> None:
    def lose(*losses: float) -> None:
        for loss in losses:
            session.history.record(runner.Event("allreduce", "done", 1, 1, metrics={"loss": loss}))

    lose(3.0, 2.0)
    assert session.state(run=1, losses_from=1)["losses"] == [2.0]
    session.reset()
    lose(1.5)

    state = session.state(run=1, losses_from=2)
    assert (state["run"], state["losses_from"], state["losses"]) == (2, 0, [1.5])


def test_a_folder_of_something_else_fails_the_step_until_it_is_gone(session: Session) -> None:
    folder = session.runner.storage.folder
    folder.mkdir(parents=True)
    (folder / "letter.txt").write_text("dear")
    session.step()
    session._thread.join(WAIT_SECONDS)
    assert "already exists and is not a run of cards" in session.state()["failure"]
    session.reset()
    assert (folder / "letter.txt").exists()

    (folder / "letter.txt").unlink()
    folder.rmdir()
    session.step()
    session._thread.join(WAIT_SECONDS)
    assert session.state()["cards"]["load"]["state"] == "done"
