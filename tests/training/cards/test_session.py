"""A session starts over at any moment, and what is told of it belongs together."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.cards.small_runs import small_pipeline
from training.cards import runner
from training.cards.session import Session

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
        session.reset(pipeline)

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

    monkeypatch.setattr(runner, "Workers", Unreachable)
    session.run()
    assert starting.wait(WAIT_SECONDS)
    reset = threading.Thread(target=session.reset, args=(session.pipeline,))
    reset.start()
    go_on.set()
    reset.join(WAIT_SECONDS / 2)

    assert not reset.is_alive()
    assert session.number == 2
