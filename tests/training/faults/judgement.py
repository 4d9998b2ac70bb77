"""What came of a fault: the run's story, the rows that its weights saw, and the weights themselves."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from training.monitoring.events import read_events, read_lines, read_metrics

if TYPE_CHECKING:
    from tests.training.faults.faults import Fault

LONGEST_QUOTE = 200


@dataclass(frozen=True)
class Reference:
    """The same run, never disturbed: its folder, what it ended with, and the rows of each of its steps."""

    folder: Path
    state: tuple[str, ...]
    rows: dict[int, list[int]]


@dataclass(frozen=True)
class Finding:
    """What came of a fault: a row of the table.

    ``recovery``: seconds from the fault to the next optimizer step, the median where it injected several times; None
    where no process had to start.
    ``difference``: of the finished model from the undisturbed run's, relative to its norm; 0 = weights and moments of
    all ranks are bit-identical.
    """

    fault: str
    promised: str
    happened: str
    recovery: float | None
    lost: int
    repeated: int
    difference: float


def judge(
    fault: Fault, folder: Path, codes: Sequence[int], printed: str, injected: Sequence[float], reference: Reference
) -> Finding:
    """Read what a finished run left, and hold what it said and logged to what was promised."""
    run_dir = folder / "model.run"
    logged = [record["step"] for record in read_metrics(run_dir) if record["kind"] == "step"]
    assert [step for step in logged if step not in fault.left_out] == list(reference.rows)
    _check_starts(fault, folder)
    if fault.all_saved:
        assert not [step for step, attempts in _attempts(folder).items() if len(attempts) > 1]
    said = re.search(fault.says, printed)
    assert said, f"{fault.says!r} was not said\n{printed}"
    quoted = shorten(said[0].replace(f"{folder}/", ""), LONGEST_QUOTE, placeholder=" …")
    mine = {step: rows for step, rows in lineage(folder).items() if step not in fault.left_out}
    seen, wanted = Counter(_all_rows(mine)), Counter(_all_rows(reference.rows))
    restarted = len(list(folder.glob("attempt_*"))) > 1
    steps = [event["time"] for event in _events(run_dir, "first_step")] if restarted else []
    recoveries = [min(later) - fell for fell in injected if (later := [step for step in steps if step > fell])]
    return Finding(
        fault.name,
        fault.promised,
        _story(folder, codes) + (f': "{quoted}"' if fault.says else ""),
        median(recoveries) if recoveries else None,
        (wanted - seen).total(),
        (seen - wanted).total(),
        0.0 if state_of(folder) == reference.state else _difference(folder, reference.folder),
    )


def _check_starts(fault: Fault, folder: Path) -> None:
    """Hold every attempt that did a step to the newest checkpoint that it found: there it is to have gone on."""
    attempts = {attempt for found in _attempts(folder).values() for attempt in found}
    for launch, restart, _, first_step in sorted(attempts):
        saved = json.loads((folder / f"attempt_{launch}_{restart}").read_text())["saved"]
        if fault.damages_newest and saved:
            saved.pop()
        newest = max(saved, default=0)
        assert first_step == newest + 1, f"start {launch}.{restart} found step {newest} and began with {first_step}"


def _story(folder: Path, codes: Sequence[int]) -> str:
    resumed = [f"step {event['step']}" for event in _events(folder / "model.run", "resumed")]
    parts = [f"ended with {code}, was started again" for code in codes[:-1]]
    if len(codes) == 1:
        times = len(list(folder.glob("attempt_0_*"))) - 1
        parts.append(f"restarted{f' {times} times' if times > 1 else ''}" if times else "continued")
    return ", ".join(parts) + (f" from {', '.join(resumed)}" if 0 < len(resumed) < 4 else "")


def _events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["kind"] == kind]


def _all_rows(rows: dict[int, list[int]]) -> list[int]:
    return [row for batch in rows.values() for row in batch]


def lineage(folder: Path) -> dict[int, list[int]]:
    """The rows of each step as the finished weights saw them: of a step done more than once, the last time."""
    last = {
        step: max(attempts.values(), key=lambda by_rank: max(note["time"] for note in by_rank.values()))
        for step, attempts in _attempts(folder).items()
    }
    return {
        step: sorted(row for note in by_rank.values() for row in note["rows"]) for step, by_rank in sorted(last.items())
    }


def _attempts(folder: Path) -> dict[int, dict[tuple[int, ...], dict[int, dict[str, Any]]]]:
    """Of each step, by attempt and rank, what was noted of it."""
    attempts: dict[int, dict[tuple[int, ...], dict[int, dict[str, Any]]]] = {}
    for rank, path in enumerate(sorted(folder.glob("rows_*.jsonl"))):
        for note in read_lines(path):
            attempt = (note["launch"], note["restart"], note["world_size"], note["first_step"])
            attempts.setdefault(note["step"], {}).setdefault(attempt, {})[rank] = note
    return attempts


def rows_of_rank(rank: int, steps: Sequence[int], folder: Path) -> list[int]:
    """The rows that a rank of a run that was not disturbed had in some steps."""
    notes = read_lines(folder / f"rows_{rank}.jsonl")
    return [row for note in notes if note["step"] in steps for row in note["rows"]]


def state_of(folder: Path) -> tuple[str, ...]:
    """Hashes of the finished model, which is that of the best epoch, and of each rank's last weights and moments."""
    model = hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
    return model, *(path.read_text() for path in sorted(folder.glob("state_*")))


def _difference(folder: Path, other: Path) -> float:
    mine, theirs = (load_file(place / "model" / "model.safetensors") for place in (folder, other))
    squares = sum(float((mine[name] - weight).double().square().sum()) for name, weight in theirs.items())
    return (squares / sum(float(weight.double().square().sum()) for weight in theirs.values())) ** 0.5
