"""Hangs: which ranks are missing, as far as others can tell, and what each leaves to debug.

What is known about a rank: its status file, its process if that is on this machine, and its record
of collectives. Clocks of different machines are never compared; a status counts as silent if it is
not rewritten while this rank watches.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.files import write_whole
from common.processes import process_fields
from training.distributed.ranks import Ranks
from training.monitoring.phases import Phases
from training.monitoring.status import LOST, RankStatus, read_statuses, writing_period

# Seconds that a network file system may hold back a file, in addition to three status intervals.
MARGIN_SECONDS = 1.0
_LOOK_AGAIN = 0.25
# The beginning of the last message of a rank that others wait for, but that waits for nobody.
BUSY = "did not come for"
GONE = "is gone: its process has ended"


@dataclass(frozen=True)
class Missing:
    """A rank that others wait for, where it was last seen, and why it is considered missing."""

    status: RankStatus
    why: str

    def __str__(self) -> str:
        status = self.status
        where = f"host {status.host}, process {status.pid}"
        seen = describe_position(status.phase, status.step)
        return f"rank {status.rank} ({where}) {self.why}; last seen {seen}"


def describe_position(phase: str, step: int) -> str:
    if phase == "start":
        return f"between steps, after step {step}"
    return f"in phase {phase} of step {step + 1}"


def find_missing(run_dir: Path, ranks: Ranks) -> tuple[list[Missing], list[int]]:
    """Find out which ranks are lost, watching for at most three status intervals who still writes.

    Returns:
        The ranks that are gone, stopped, silent, failed, or busy while others wait; and the
        numbers of those that wait.
    """
    patience = 3 * writing_period(ranks.world_size) + MARGIN_SECONDS
    others, silent = _watch(run_dir, ranks, patience)
    # The surest reason first. Once a rank is known to be gone, the others wait for it, and a rank
    # that is silent or busy beside it would only distract.
    lost = (
        _known_problems(others)
        or dict.fromkeys(silent, f"has written nothing for {patience:.0f} s")
        or _busy(run_dir, others)
    )
    missing = [Missing(others[rank], why) for rank, why in sorted(lost.items())]
    return missing, sorted(others.keys() - lost.keys())


def _watch(run_dir: Path, ranks: Ranks, patience: float) -> tuple[dict[int, RankStatus], list[int]]:
    """The last status of each other rank, and which of them wrote none while this rank watched.

    Ends early once all have written, or one is known to be lost.
    """
    first = others = _others(run_dir, ranks)
    end = time.monotonic() + patience
    while True:
        # A file that cannot be read at this moment, because it is being replaced, does not make
        # its rank disappear: what it held before stays.
        latest = _others(run_dir, ranks)
        others = {rank: latest.get(rank, before) for rank, before in others.items()}
        silent = [
            rank
            for rank, status in others.items()
            if status.state == "running" and status.written == first[rank].written
        ]
        if not silent or _known_problems(others) or time.monotonic() > end:
            return others, silent
        time.sleep(_LOOK_AGAIN)


def is_any_gone(run_dir: Path, ranks: Ranks) -> bool:
    """Whether the process of a rank that runs on this machine has ended."""
    return GONE in _known_problems(_others(run_dir, ranks)).values()


def _others(run_dir: Path, ranks: Ranks) -> dict[int, RankStatus]:
    # An earlier start may have had more ranks, and left their files.
    return {
        status.rank: status
        for status in read_statuses(run_dir)
        if ranks.rank != status.rank < ranks.world_size
    }


def _known_problems(statuses: Mapping[int, RankStatus]) -> dict[int, str]:
    return {rank: why for rank, status in statuses.items() if (why := _known_problem(status))}


def _known_problem(status: RankStatus) -> str | None:
    """What is wrong with a rank according to its own file, or to this machine's process table."""
    if status.state == "failed" and not status.message.startswith(LOST):
        return status.message if status.message.startswith(BUSY) else f"failed: {status.message}"
    if status.state != "running" or status.host != platform.node() or not process_fields("self"):
        return None  # of another machine, or without Linux, nothing is known
    state, *_ = process_fields(status.pid) or ["X"]
    if state in "ZX":
        return GONE
    return "makes no progress: its process is stopped" if state in "Tt" else None


def _busy(run_dir: Path, others: Mapping[int, RankStatus]) -> dict[int, str]:
    """The ranks that recorded this hang and wait for nobody."""
    busy = {}
    for rank, status in others.items():
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads(record_path(run_dir, rank).read_text())
            # Not that of an earlier hang or start, which lies in the same file.
            is_now = (record["pid"], record["step"]) == (status.pid, status.step)
            if is_now and not record["waits"]:
                busy[rank] = f"{BUSY} {record['seconds']:.0f} s"
    return busy


def record_path(run_dir: Path, rank: int) -> Path:
    """The file of a rank's record of a hang; its stacks are next to it, as ``.txt``."""
    return run_dir / "hangs" / f"rank_{rank:05d}.json"


def write_hang_record(run_dir: Path, status: RankStatus, phases: Phases, seconds: float) -> bool:
    """Write all threads' stacks and the last collectives of this rank, still for ``seconds``.

    Returns whether it waits in a collective.
    """
    # Without a record nobody can be blamed, except a process that is alone.
    records, waits = [], status.world_size > 1
    with contextlib.suppress(Exception):  # no public part of torch
        if records := _flight_records():
            waits = any(_is_under_way(record["entries"]) for record in records)
    path = record_path(run_dir, status.rank)
    process = {
        "rank": status.rank,
        "host": status.host,
        "pid": status.pid,
        "restart": status.restart,
    }
    process |= {"phase": phases.now, "step": phases.step}
    process |= {"seconds": round(seconds, 1), "waits": waits}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".txt").open("w", encoding="utf-8") as file:
            position = describe_position(phases.now, phases.step)
            file.write(f"rank {status.rank}: {position} for {seconds:.0f} s\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        record = json.dumps(process | {"flight_records": records}, indent=1)
        write_whole(path, record.encode(), sync=False)
    return waits


def _flight_records() -> list[dict[str, Any]]:
    """The flight records of gloo and NCCL, of those that this build of torch has and that ran."""
    recorders = torch._C._distributed_c10d
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    records = [json.loads(getattr(recorders, name)()) for name in names if hasattr(recorders, name)]
    return [record for record in records if record.get("entries")]


def _is_under_way(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a collective has not ended."""
    # Of sends and receives in a batch, only the batch as a whole is marked as ended, so what counts
    # is whether any entry of a launch is.
    launched = {_launch(entry) for entry in entries}
    return launched != {_launch(entry) for entry in entries if entry["retired"]}


def _launch(entry: Mapping[str, Any]) -> tuple[int, int, int]:
    return entry["pg_id"], entry["collective_seq_id"], entry["p2p_seq_id"]
