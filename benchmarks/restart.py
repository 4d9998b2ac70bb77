"""How long a killed rank costs: from SIGKILL to the next optimizer step, and what the time goes into."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.processes import ROOT, end_with_children
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, spread, write_table
from common.errors import TrainingFailure, positive, run_command
from training.monitoring.events import read_events
from training.monitoring.run_folder import restart_split
from training.monitoring.status import read_statuses

MODULE = "benchmarks.restart"
FLAGS = "--dataset sample --model tiny --epochs 1000 --save_every 50"
LONGEST = 300.0  # seconds that one recovery may take
STAGES = {
    "detection": "detection: torchrun sees that a rank is gone",
    "rendezvous": "rendezvous: it ends the others, and starts all anew",
    "import": "import: Python reads the program and its libraries",
    "group": "group: the ranks find one another",
    "load": "load: data, model, checkpoint",
    "first_step": "first step",
    "total": "**from the kill to the next optimizer step**",
}
INTRODUCTION = f"""# Restart

Written by `python -m {MODULE}`. One run under `training/run_ddp.sh` with restarts; its ranks are killed by SIGKILL
in turn, each after a checkpoint. Seconds; the median over kills, with the smallest and the largest. The moments are
those that the run writes into `events.jsonl`, and torchrun's own line about the rank that failed.

"""


def main() -> None:
    """Measure what was asked for, and write the page."""
    parser = Parser(MODULE, __doc__ or "")
    parser.add_argument("--kills", type=positive, default=5)
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "restart.md")
    options = parser.parse_args()
    end_with_children()
    splits = measure(options.kills, options.processes)
    facts = circumstances(MODULE, ("torch", "transformers")) | {
        "Run": f"`MAX_RESTARTS={options.kills} training/run_ddp.sh {options.processes} {FLAGS}`",
        "Kills": f"{options.kills}, all of them recovered from",
    }
    rows = [
        [text, f"{median(values):.1f} ({spread(values)})"]
        for stage, text in STAGES.items()
        for values in [[split[stage] for split in splits]]
    ]
    write_table(options.output, INTRODUCTION + fact_list(facts) + "\n" + markdown_table(["what", "seconds"], rows))
    print(f"Written: {options.output}")


def measure(kills: int, processes: int) -> list[dict[str, float]]:
    """Seconds of each stage of each recovery.

    Raises:
        TrainingFailure: the run did not recover.
    """
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        folder = Path(name)
        log, run_dir = folder / "log.txt", folder / "model.run"
        command = ["bash", str(ROOT / "training" / "run_ddp.sh"), str(processes), *FLAGS.split()]
        command += ["--output_dir", str(folder / "model"), "--cache_dir", str(folder / "cache")]
        environment = os.environ | {"PYTHON": sys.executable, "MAX_RESTARTS": str(kills)}
        with log.open("w") as file:
            run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            killed = [_kill_and_recover(number, processes, run, run_dir, log) for number in range(kills)]
        finally:
            run.terminate()  # the ranks finish their step, save and leave
            run.wait()
        splits = restart_split(run_dir, log.read_text())
    return [replace(split, lost=when).seconds() for split, when in zip(splits, killed, strict=True)]


def _kill_and_recover(number: int, processes: int, run: subprocess.Popen[bytes], run_dir: Path, log: Path) -> float:
    """Wait for a checkpoint of this attempt, kill a rank, wait for the next step; returns when it was killed."""
    _wait(lambda: _kinds_since_start(run_dir, number).get("checkpoint"), run, log)
    victim = read_statuses(run_dir)[number % processes]
    killed = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    _wait(lambda: _kinds_since_start(run_dir, number + 1).get("first_step"), run, log)
    print(f"kill {number + 1}, rank {victim.rank}: {time.time() - killed:.1f} s", flush=True)
    return killed


def _kinds_since_start(run_dir: Path, restart: int) -> dict[str, Any]:
    return {event["kind"]: event for event in read_events(run_dir) if event["restart"] == restart}


def _wait(holds: Callable[[], Any], run: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + LONGEST
    while not holds():
        if run.poll() is not None or time.monotonic() > end:
            last = ([line for line in log.read_text().splitlines() if line.strip()] or ["no output"])[-1]
            raise TrainingFailure(
                f"the run ended or did not recover within {LONGEST:.0f} s ({last})", code="benchmark-failed"
            )
        time.sleep(0.1)  # each look reads the run's events, on the cores that are timed


if __name__ == "__main__":
    run_command(main)
