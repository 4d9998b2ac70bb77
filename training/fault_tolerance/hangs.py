"""Hangs: who did not come, as far as the ranks that did can tell, and what each leaves for whoever looks into it.

What is known of a rank: its status file, its process where that is on this machine, and its record of collectives.
No clock of one machine is compared with that of another: a status counts as silent when it is not rewritten while
this rank looks on.
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

from training.monitoring.status import LOST, RankStatus, read_statuses, writing_period
from training.parallelism.distributed import Ranks
from training.run.phases import Phases

# For what a network file system may hold back, beside three writings of a status.
MARGIN_SECONDS = 1.0
_LOOK_AGAIN = 0.25
# How the last message of a rank begins that others wait for, while it waits for nobody.
BUSY = "did not come for"


@dataclass(frozen=True)
class Missing:
    """A rank that others wait for, where it stands and why that is thought."""

    status: RankStatus
    why: str

    def __str__(self) -> str:
        status = self.status
        where = f"host {status.host}, process {status.pid}"
        return f"rank {status.rank} ({where}) {self.why}; last seen {place_of(status.phase, status.step)}"


def place_of(phase: str, step: int) -> str:
    """Where a rank stands, in words; ``step`` steps are done."""
    return f"in phase {phase} of step {step + 1}" if phase != "start" else f"between steps, after step {step}"


def find_missing(run_dir: Path, ranks: Ranks) -> tuple[list[Missing], list[int]]:
    """Find out which ranks are lost, looking for at most three writings of a status at who still writes.

    Returns:
        The ranks that are gone, stopped, silent, failed or busy while others wait; and the numbers of those that wait.
    """
    others = {status.rank: status for status in read_statuses(run_dir) if status.rank < ranks.world_size}
    written = {rank: status.written for rank, status in others.items()}
    patience = 3 * writing_period(ranks.world_size) + MARGIN_SECONDS
    end = time.monotonic() + patience
    while True:
        others |= {status.rank: status for status in read_statuses(run_dir) if status.rank in others}
        others.pop(ranks.rank, None)
        silent = [rank for rank, s in others.items() if s.state == "running" and s.written == written[rank]]
        evident = {rank: why for rank, status in others.items() if (why := _evident(status))}
        if evident or not silent or time.monotonic() > end:
            break
        time.sleep(_LOOK_AGAIN)
    if not evident and time.monotonic() > end:
        evident = dict.fromkeys(silent, f"has written nothing for {patience:.0f} s")
    lost = evident or _busy(run_dir, others)
    return [Missing(others[rank], why) for rank, why in sorted(lost.items())], sorted(others.keys() - lost.keys())


def _evident(status: RankStatus) -> str | None:
    """What is wrong with a rank, as its own file or this machine's processes say it."""
    if status.state == "failed" and not status.message.startswith(LOST):
        return status.message if status.message.startswith(BUSY) else f"failed: {status.message}"
    if status.state != "running" or status.host != platform.node():
        return None
    state = _process_state(status.pid)
    if state in (None, "Z", "X"):
        return "is gone: its process has ended"
    return "does not move: its process is stopped" if state in ("T", "t") else None


def _process_state(pid: int) -> str | None:
    if not Path("/proc/self/stat").exists():
        return "?"  # no Linux: nothing is known
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def _busy(run_dir: Path, others: Mapping[int, RankStatus]) -> dict[int, str]:
    """The ranks that left a record of this hang, and wait for nobody."""
    busy = {}
    for rank, status in others.items():
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads(record_path(run_dir, rank).read_text())
            if record["pid"] == status.pid and record["step"] == status.step and not record["waits"]:
                busy[rank] = f"{BUSY} {record['seconds']:.0f} s"
    return busy


def record_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's record of a hang lies; its stacks beside it, as ``.txt``."""
    return run_dir / "hangs" / f"rank_{rank:05d}.json"


def leave_record(run_dir: Path, status: RankStatus, phases: Phases, seconds: float) -> bool:
    """Write all threads' stacks and the last collectives of this rank; returns whether it waits in a collective.

    Args:
        run_dir: the run folder.
        status: this rank's.
        phases: where it stands.
        seconds: for how long.
    """
    # Where nothing is recorded nobody is to blame, but a process that is alone.
    records, waits = [], status.world_size > 1
    with contextlib.suppress(Exception):  # no public part of torch
        if records := _flight_records():
            waits = any(_is_under_way(record["entries"]) for record in records)
    path = record_path(run_dir, status.rank)
    place = {"rank": status.rank, "host": status.host, "pid": status.pid, "restart": status.restart}
    place |= {"phase": phases.now, "step": phases.step, "seconds": round(seconds, 1), "waits": waits}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".txt").open("w", encoding="utf-8") as file:
            file.write(f"rank {status.rank}: {place_of(phases.now, phases.step)} for {seconds:.0f} s\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(place | {"flight_records": records}, indent=1), encoding="utf-8")
        aside.replace(path)
    return waits


def _flight_records() -> list[dict[str, Any]]:
    """What gloo's flight recorder holds, and NCCL's own, which builds without CUDA lack; none that is empty."""
    recorders = torch._C._distributed_c10d
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    records = [json.loads(getattr(recorders, name)()) for name in names if hasattr(recorders, name)]
    return [record for record in records if record.get("entries")]


def _is_under_way(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a collective has not ended. Of sends and receives in one batch only the batch as a whole ever does."""
    launched = {_launch(entry) for entry in entries}
    return launched != {_launch(entry) for entry in entries if entry["retired"]}


def _launch(entry: Mapping[str, Any]) -> tuple[int, int, int]:
    return entry["pg_id"], entry["collective_seq_id"], entry["p2p_seq_id"]
