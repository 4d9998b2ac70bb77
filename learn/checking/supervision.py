"""Start the ranks of a check, collect their reports, locate those that hang, end them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.errors import TrainingFailure
from learn.checking.rank import READY, Report, run_rank
from learn.ranks import Ended, RankPool

START_SECONDS = 120.0  # for all processes to start and to form a group
ANSWER_SECONDS = 5.0  # for a rank to report where it is
OTHERS_SECONDS = 1.0  # for the other ranks to fail too, once one has
SHOW_SECONDS = 1.0  # between two lines on how long the check has waited


def call_on_ranks(
    world_size: int, path: Path, name: str, seconds: float, show: Callable[[str], None]
) -> list[Report]:
    """Call a learner's function on new gloo ranks; returns one report per rank, in order.

    Soon after one has failed, the others are asked where they are, because they may wait for it
    forever. ``seconds`` limits the call, without the start of the processes; meanwhile ``show`` is
    told which ranks have not returned.

    Raises:
        TrainingFailure: the ranks did not form a group.
    """
    with RankPool(world_size, run_rank, path, name) as ranks:
        _wait_for_group(ranks, world_size)
        reports = _reports(ranks, world_size, seconds, show)
    return [reports[rank] for rank in range(world_size)]


def _wait_for_group(ranks: RankPool, world_size: int) -> None:
    end = time.monotonic() + START_SECONDS
    pending = set(range(world_size))
    while pending:
        found = ranks.messages(pending, max(0.0, end - time.monotonic()))
        # If the time is up, none has sent anything, and the first one that is missing is named.
        for rank, message in (found or dict.fromkeys(pending)).items():
            if message != READY:
                why = message if isinstance(message, str) else "is the machine out of memory?"
                problem = f"rank {rank} of {world_size} did not start"
                raise TrainingFailure(f"{problem}; {why}", code="rank-lost")
        pending -= found.keys()


def _reports(
    ranks: RankPool, world_size: int, seconds: float, show: Callable[[str], None]
) -> dict[int, Report]:
    end = time.monotonic() + seconds
    reports: dict[int, Report] = {}
    pending = set(range(world_size))
    while pending and (left := end - time.monotonic()) > 0:
        found = ranks.messages(pending, min(left, SHOW_SECONDS))
        if not found:
            names = ", ".join(map(str, sorted(pending)))
            waited = f"{seconds - end + time.monotonic():.0f} of {seconds:.0f} s"
            show(f"waiting for rank{'s' * (len(pending) > 1)} {names} ({waited})")
        reports |= _as_reports(found)
        pending -= found.keys()
        # The others may wait for the one that failed, forever. They get a moment to fail as well,
        # because the first to fail need not be the one that made the mistake.
        if any(report.outcome != "returned" for report in reports.values()):
            end = min(end, time.monotonic() + OTHERS_SECONDS)
    # A rank that has not reported by now hangs, and is asked where.
    for rank in pending:
        ranks.send(rank, "where?")
        silent = {rank: Report("waits")}
        reports |= silent | _as_reports(ranks.messages([rank], ANSWER_SECONDS))
    return reports


def _as_reports(messages: Mapping[int, Any]) -> dict[int, Report]:
    return {
        rank: Report("gone", value=message.exit_code) if isinstance(message, Ended) else message
        for rank, message in messages.items()
    }
