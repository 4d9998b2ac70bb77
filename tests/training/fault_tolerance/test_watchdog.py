"""A rank that does not come is named, with where it stands; the run ends in time and leaves what explains it."""

import itertools
import json
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.errors import LostRank
from tests.training.fault_tolerance.started_ranks import StartedRanks
from training.monitoring.status import RankStatus, read_statuses
from training.run import step as step_module

LONG = ("--epochs", 500)
GO_ON = "The last checkpoint is safe: to resume, rerun the same command"


def _has_stepped(ranks: StartedRanks) -> Callable[[], bool]:
    return lambda: "step 1/" in ranks.out()


def _status(run_dir: Path, rank: int) -> RankStatus:
    [status] = [status for status in read_statuses(run_dir) if status.rank == rank]
    return status


def _loop_for_ever(rank: int, busy: int = 1, steps: int = 3) -> None:
    share, calls = step_module.micro_batches_of_rank, itertools.count(1)

    def loops(*arguments: Any, **options: Any) -> Any:
        while rank == busy and next(calls) > steps:
            time.sleep(0.01)
        return share(*arguments, **options)

    step_module.micro_batches_of_rank = loops


def _raise(rank: int) -> None:
    share, calls = step_module.micro_batches_of_rank, itertools.count(1)

    def raises(*arguments: Any, **options: Any) -> Any:
        if rank == 1 and next(calls) > 3:
            raise ValueError("row 7 has no text")
        return share(*arguments, **options)

    step_module.micro_batches_of_rank = raises


def test_a_stopped_process_is_named_and_the_run_ends_with_stacks_and_collectives(
    start_ranks: Callable[..., StartedRanks], tmp_path: Path
) -> None:
    ranks, run_dir = start_ranks(2, *LONG, "--collective_timeout", 4), tmp_path / "model.run"
    ranks.wait_until(_has_stepped(ranks))

    ranks.signal(1, signal.SIGSTOP)

    assert ranks.exit_code(0) == LostRank.exit_code
    [line] = ranks.errors
    named = rf"rank 1 \(host \S+, process {ranks.processes[1].pid}\) makes no progress: its process is stopped; last "
    assert re.match(rf"error: lost at step \d+: no progress for \d+ s \(--collective_timeout\); {named}", line)
    assert line.endswith(f"{GO_ON}. Stacks and last collectives of the ranks: {run_dir / 'hangs'} [no-progress]")
    status = _status(run_dir, 0)
    assert status.state == "failed"
    assert f"error: {status.message}" == line
    stacks = (run_dir / "hangs" / "rank_00000.txt").read_text()
    assert stacks.startswith(f"rank 0: in phase {status.phase} of step {status.step + 1} for ")
    assert "trainer.py" in stacks
    record = json.loads((run_dir / "hangs" / "rank_00000.json").read_text())
    assert record["waits"]
    [gloo] = record["flight_records"]
    assert gloo["entries"][-1]["profiling_name"].startswith("gloo:")


def test_a_process_without_a_group_that_hangs_ends_and_names_itself(
    start_ranks: Callable[..., StartedRanks], tmp_path: Path
) -> None:
    # After the first step, from which on the second counts: no other one may be too slow for it.
    ranks = start_ranks(1, *LONG, "--collective_timeout", 1, fault=partial(_loop_for_ever, busy=0, steps=1))

    assert ranks.exit_code(0) == 1

    [line] = ranks.errors
    named = rf"rank 0 \(host \S+, process {ranks.processes[0].pid}\) did not come for \d+ s; last seen in phase data of"
    assert re.match(rf"error: lost at step 2: .*; {named} step 2\. {GO_ON}", line), line
    assert "in loops" in (tmp_path / "model.run" / "hangs" / "rank_00000.txt").read_text()


@pytest.mark.slow
def test_a_rank_busy_with_something_else_is_named_by_the_one_that_waits(
    start_ranks: Callable[..., StartedRanks], tmp_path: Path
) -> None:
    ranks, run_dir = start_ranks(2, *LONG, "--collective_timeout", 6, fault=_loop_for_ever), tmp_path / "model.run"

    assert [ranks.exit_code(rank) for rank in (0, 1)] == [LostRank.exit_code, 1]

    [line] = ranks.errors
    named = rf"rank 1 \(host \S+, process {ranks.processes[1].pid}\) did not come for \d+ s; last seen in phase data of"
    assert re.match(rf"error: lost at step 4: .*; {named} step 4\. {GO_ON}", line), line
    assert "in loops" in (run_dir / "hangs" / "rank_00001.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        pytest.param(None, "is gone: its process has ended", id="killed"),
        pytest.param(_raise, "failed: ValueError: row 7 has no text", id="raises"),
    ],
)
def test_a_rank_that_ends_is_named_with_its_reason(
    start_ranks: Callable[..., StartedRanks], fault: Callable[[int], None] | None, why: str
) -> None:
    ranks = start_ranks(3, *LONG, "--batch_size", 2, fault=fault)
    ranks.wait_until(_has_stepped(ranks))

    if fault is None:
        ranks.signal(1, signal.SIGKILL)

    assert [ranks.exit_code(rank) for rank in (0, 2)] == [LostRank.exit_code] * 2
    [line] = [line for line in ranks.errors if line.startswith("error:")]
    named = rf"rank 1 \(host \S+, process {ranks.processes[1].pid}\) {why}; last seen "
    assert re.match(rf"error: lost at step \d+: a connection ended; {named}.*\. {GO_ON}", line), line


def test_a_rank_that_does_not_hear_of_a_dead_one_ends_soon_after_the_launcher_asks(
    start_ranks: Callable[..., StartedRanks], tmp_path: Path
) -> None:
    ranks = start_ranks(2, *LONG, fault=partial(_loop_for_ever, busy=0))
    ranks.wait_until(lambda: _has_stepped(ranks)() and _status(tmp_path / "model.run", 0).step == 3)
    ranks.signal(1, signal.SIGKILL)
    ranks.exit_code(1)

    ranks.signal(0, signal.SIGTERM)

    assert ranks.exit_code(0) == LostRank.exit_code  # 75 if it had tried to agree with the others on a stop
    [line] = ranks.errors
    named = rf"rank 1 \(host \S+, process {ranks.processes[1].pid}\) is gone: its process has ended; last seen "
    assert re.match(rf"error: lost at step 4: a connection is silent; {named}.*\. {GO_ON} \[rank-lost\]", line), line


@pytest.mark.slow
def test_a_rank_that_is_to_stop_does_not_wait_for_one_that_cannot(start_ranks: Callable[..., StartedRanks]) -> None:
    ranks = start_ranks(2, *LONG)
    ranks.wait_until(_has_stepped(ranks))
    ranks.signal(1, signal.SIGSTOP)

    ranks.signal(0, signal.SIGTERM)

    assert ranks.exit_code(0) == 75
    [line] = ranks.errors
    assert re.match(
        r"error: lost at step \d+: asked to stop, but the ranks could not agree on it; rank 1 .* is stopped", line
    )


@pytest.mark.slow
def test_a_run_that_is_stopped_and_continued_is_no_hang(
    start_ranks: Callable[..., StartedRanks], tmp_path: Path
) -> None:
    ranks, run_dir = start_ranks(2, *LONG, "--collective_timeout", 10), tmp_path / "model.run"
    ranks.wait_until(lambda: _has_stepped(ranks)() and _status(run_dir, 0).step > 1)

    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in (0, 1):
            ranks.signal(rank, number)
        if number == signal.SIGSTOP:
            time.sleep(14)  # it is longer stopped than it may hang
    before = _status(run_dir, 0).step

    ranks.wait_until(lambda: _status(run_dir, 0).step > before + 20)
    assert ranks.errors == []
