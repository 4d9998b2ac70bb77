"""A rank without a model: it counts steps with the others, saves each one, and stops and resumes as training does.

It runs until the shared volume has a file `finish`, and fails on the node whose index is in the file `broken`.
"""

import os
import sys
import time
from pathlib import Path

from common.errors import TrainingFailure, run_command
from training.distributed.group import join_ranks
from training.distributed.restarts import begin, finalize_exit_code, stop_with_launcher, stopped_exit_code
from training.fault_tolerance.interruption import Interruption, run_rank

VOLUME = Path("checkpoints")


def main() -> int:
    with finalize_exit_code(), join_ranks("cpu") as ranks, Interruption(75, is_first=ranks.is_first).saving() as stop:
        saved, broken = VOLUME / "step", VOLUME / "broken"
        step = ranks.broadcast(int(saved.read_text()) if saved.exists() else 0)
        begin()
        if ranks.is_first:
            with (VOLUME / "starts").open("a") as starts:
                print(f"{ranks.world_size} ranks from step {step}", file=starts)
        while True:
            heard = ranks.gather((stop.asked, (VOLUME / "finish").exists()))
            if any(finish for _, finish in heard):
                return 0
            if any(asked for asked, _ in heard):
                return stopped_exit_code(75)
            if broken.exists() and broken.read_text() == os.environ["JOB_COMPLETION_INDEX"]:
                raise TrainingFailure("out of memory", code="out-of-memory")
            step += 1
            if ranks.is_first:
                saved.write_text(str(step))
            time.sleep(0.02)


if __name__ == "__main__":
    stop_with_launcher()
    sys.exit(run_rank(lambda: run_command(main)))
