"""Status files: whole at any moment, true of their rank, and no reason for a run to fail."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from training.distributed.ranks import Ranks
from training.monitoring import StepMetrics
from training.monitoring.events import RolledBack, RunEnded, RunStarted, StepsAgreed
from training.monitoring.phases import Phases
from training.monitoring.records import SavedCheckpoint
from training.monitoring.run_folder import RunSnapshot
from training.monitoring.status import STEPS_AVERAGED, StatusFile, read_statuses, status_path, writing_period


def _ranks(rank: int = 0, world_size: int = 2) -> Ranks:
    return Ranks(rank, world_size, rank, world_size, torch.device("cpu"), "gloo", restart=1)


def _metrics(step: int) -> StepMetrics:
    return StepMetrics(step, 2, 0.5, 1e-3, 1.0, 100.0, 4000.0, 60.0, rows=8)


def test_a_status_shows_what_its_rank_does(tmp_path: Path) -> None:
    phases = Phases()
    with StatusFile(tmp_path, _ranks(), phases) as file:
        file.receive(RunStarted(0, 40, []))
        for step in range(1, STEPS_AVERAGED + 1):
            with phases("forward"):
                phases.step = step
            file.receive(StepsAgreed([_metrics(step)]))
        file.receive(SavedCheckpoint(step, 0.1, 0.2, 1000))
        with phases("data"):
            file.write()
            [status] = read_statuses(tmp_path)

    assert (status.rank, status.world_size, status.restart, status.pid) == (0, 2, 1, os.getpid())
    assert (status.state, status.phase, status.step, status.total_steps, status.epoch) == ("running", "data", 10, 40, 2)
    assert (status.loss, status.samples_per_second, status.tokens_per_second) == (0.5, 100.0, 4000.0)
    assert status.phases.keys() >= {"start", "forward"}
    assert status.last_checkpoint_step == 10
    assert status.phase_since <= status.written
    assert status.phase_seconds >= 0
    assert status.cpu_seconds > 0
    assert status.memory_bytes > 2**20


@pytest.mark.parametrize("ending", ["finished", "stopped", "failed"])
def test_the_last_status_shows_how_the_run_ended(tmp_path: Path, ending: str) -> None:
    def run() -> None:
        with StatusFile(tmp_path, _ranks(), Phases()) as file:
            if ending == "stopped":
                file.receive(RunEnded(finished=False))
            if ending == "failed":
                raise ValueError("the disk is full\nand more")

    if ending == "failed":
        with pytest.raises(ValueError, match="disk"):
            run()
    else:
        run()

    [status] = read_statuses(tmp_path)
    assert status.state == ending
    assert status.message == ("ValueError: the disk is full and more" if ending == "failed" else "")


def test_it_is_rewritten_while_the_main_thread_does_something_else(tmp_path: Path) -> None:
    written, deadline = set(), time.monotonic() + 60
    with StatusFile(tmp_path, _ranks(), Phases()):
        while len(written) < 2 and time.monotonic() < deadline:
            written.add(read_statuses(tmp_path)[0].written)
    assert len(written) == 2


def test_after_a_rollback_the_phases_are_averaged_from_its_step(tmp_path: Path) -> None:
    phases = Phases()
    file = StatusFile(tmp_path, _ranks(), phases)
    file.receive(RunStarted(0, 400, []))
    file.receive(StepsAgreed([_metrics(200)]))
    with phases("evaluate"):
        pass
    file.receive(RolledBack(100, 200, []))

    with phases("forward"):
        pass
    file.receive(StepsAgreed([_metrics(100 + STEPS_AVERAGED)]))

    assert "forward" in file.status.phases
    assert "evaluate" not in {phase for phase, seconds in file.status.phases.items() if seconds}


def test_readers_see_whole_statuses_while_they_are_rewritten(tmp_path: Path) -> None:
    with StatusFile(tmp_path, _ranks(), Phases()) as file:
        enough = threading.Event()
        writer = threading.Thread(target=lambda: [file.write() for _ in iter(enough.is_set, True)])
        writer.start()
        try:
            for _ in range(300):
                json.loads(status_path(tmp_path, 0).read_text())
        finally:
            enough.set()
            writer.join()


def test_a_folder_that_cannot_be_written_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("a file in its place")

    with StatusFile(tmp_path, _ranks(), Phases()) as file:
        file.write()
        (tmp_path / "ranks").unlink()
        (tmp_path / "ranks").mkdir()

    assert [status.state for status in read_statuses(tmp_path)] == ["finished"]


def test_statuses_of_ranks_that_the_run_no_longer_has_are_removed(tmp_path: Path) -> None:
    for rank in (2, 3):
        with StatusFile(tmp_path, _ranks(rank, world_size=4), Phases()):
            pass

    with StatusFile(tmp_path, _ranks(0, world_size=3), Phases()):
        assert [status.rank for status in read_statuses(tmp_path)] == [0, 2]


def test_truncated_files_are_skipped_and_unknown_fields_ignored(tmp_path: Path) -> None:
    with StatusFile(tmp_path, _ranks(), Phases()):
        pass
    whole = json.loads(status_path(tmp_path, 0).read_text())
    status_path(tmp_path, 1).write_text('{"rank": 1, "ho')
    status_path(tmp_path, 2).write_text("{}")
    status_path(tmp_path, 3).write_text(json.dumps(whole | {"rank": 3, "of a later version": True}))

    assert [status.rank for status in read_statuses(tmp_path)] == [0, 3]
    shutil.rmtree(tmp_path / "ranks")
    assert read_statuses(tmp_path) == []


@pytest.mark.parametrize("world_size", [1, 8, 250, 1000, 10_000])
def test_however_many_ranks_there_are_they_rewrite_at_most_250_files_per_second(world_size: int) -> None:
    assert world_size / writing_period(world_size) <= 250
    assert writing_period(world_size) >= 1


def test_a_rank_of_many_is_silent_only_after_several_writings_that_did_not_come(tmp_path: Path) -> None:
    with StatusFile(tmp_path, _ranks(world_size=1000), Phases()):
        pass
    [status] = read_statuses(tmp_path)
    status.state = "running"

    assert not RunSnapshot("run", statuses=[status], silent={0: 2 * writing_period(1000)}).is_silent(status)
    assert RunSnapshot("run", statuses=[status], silent={0: 6 * writing_period(1000)}).is_silent(status)
