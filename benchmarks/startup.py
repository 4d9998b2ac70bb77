"""Start-up: the wall time from the launcher's start to the first optimizer step."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.processes import ROOT
from common.errors import TrainingFailure
from training.monitoring.events import METRICS_FILE

COMMAND = "torchrun --standalone --nproc_per_node=2 training/train_ddp.py --model tiny --dataset sample"
LONGEST = 600  # seconds that a start may take


def measure_startup(rounds: int, say: Callable[[str], None]) -> list[float]:
    """Seconds of each round, with a warm cache of tokens.

    Raises:
        TrainingFailure: the run ended before its first step.
    """
    folder = Path(tempfile.mkdtemp(prefix="startup-"))
    try:
        _first_step(folder, "warm-up")
        seconds = []
        for number in range(1, rounds + 1):
            seconds.append(_first_step(folder, str(number)))
            say(f"start-up {number}/{rounds}: {seconds[-1]:.1f} s")
        return seconds
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first_step(folder: Path, name: str) -> float:
    launcher, *flags = COMMAND.split()
    assert launcher == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *flags]
    command += ["--cache_dir", str(folder / "cache"), "--output_dir", str(folder / name)]
    metrics = folder / f"{name}.run" / METRICS_FILE
    with (folder / f"{name}.log").open("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None or time.perf_counter() - started > LONGEST:
                    log.seek(0)
                    last = ([line for line in log.read().splitlines() if line.strip()] or ["no output"])[-1]
                    raise TrainingFailure(f"{COMMAND}: ended before its first step ({last})", code="benchmark-failed")
                time.sleep(0.005)
            return time.perf_counter() - started
        finally:
            # The ranks finish their step, save and leave.
            process.send_signal(signal.SIGTERM)
            process.wait()
