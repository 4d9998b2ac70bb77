"""The process of each trial: an ordinary run, on its share of the machine, that ends with the
search.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from common.errors import UserError
from common.files import lock_run_folder
from common.hardware import threads_asked_for, usable_cpus
from common.processes import receive_when_parent_dies
from training.search.space import SearchSpace

TRAINING = Path(__file__).resolve().parents[1]
# That a run of an earlier search, which was killed, has for its last checkpoint.
STOP_SECONDS = 60.0


class Process(Protocol):
    """A run that was started; ``subprocess.Popen`` is one."""

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...


# Starts a run: its slot among those that run at once, its command, the file for what it prints.
Start = Callable[[int, Sequence[str], Path], Process]


def share_machine(space: SearchSpace) -> Start:
    """Start trials on this machine, each with its share of the cores, and of the GPUs if there are
    any.
    """
    gpus = _gpus() if space.config.get("device") != "cpu" else []
    if gpus and len(gpus) < space.at_once * space.processes:
        raise UserError(
            f"at_once {space.at_once} and processes {space.processes}: take "
            f"{space.at_once * space.processes} GPUs, "
            f"and this machine has {len(gpus)}; lower one, or set device: cpu in config",
            code="gpus-too-few",
        )
    # Slots have cores side by side that no other slot has, as long as there are enough: two trials
    # on the same cores would slow each other down, and their seconds would say nothing.
    threads = max(1, usable_cpus() // space.at_once)
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []

    def start(slot: int, command: Sequence[str], log: Path) -> Process:
        environment = {
            "OMP_NUM_THREADS": str(threads_asked_for() or max(1, threads // space.processes))
        }
        if gpus:
            own_gpus = gpus[slot * space.processes : (slot + 1) * space.processes]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus)
        # The trainer uses all cores that its process may run on.
        first = slot * threads % max(1, len(cores))
        own_cores = cores[first : first + threads] if space.at_once > 1 else []
        return start_process(command, log, environment, own_cores)

    return start


def start_process(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    cores: Sequence[int] = (),
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a run that is asked to save and stop if this process dies; it may use these ``cores``,
    or all.
    """
    parent = os.getpid()

    def prepare() -> None:
        # This runs in the child between fork and exec. What is set here stays for the command and
        # for all processes that it starts, such as the ranks of a launcher.
        receive_when_parent_dies(signal.SIGTERM)
        if sys.platform == "linux":
            if os.getppid() != parent:  # it died before the line above
                os._exit(os.EX_TEMPFAIL)
            if cores:
                os.sched_setaffinity(0, cores)

    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            # Ctrl-C in the terminal is for the search, which then stops its trials.
            start_new_session=True,
            preexec_fn=prepare,
        )


def _gpus() -> list[str]:
    # Names and not numbers: the variable may hold any of CUDA's, such as UUIDs, and a trial gets
    # its part of them as they are.
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name]
    import torch  # which takes seconds to import

    return [str(index) for index in range(torch.cuda.device_count())]


def command_of(space: SearchSpace, config_file: Path) -> list[str]:
    if space.processes == 1:
        return [sys.executable, str(TRAINING / "train_single.py"), "--config", str(config_file)]
    launch = [
        sys.executable,
        str(TRAINING / "launch.py"),
        "--standalone",
        f"--nproc_per_node={space.processes}",
    ]
    return [*launch, str(TRAINING / "train_ddp.py"), "--config", str(config_file)]


def wait_for_earlier_process(run_dir: Path, number: int) -> None:
    """Wait until a process that an earlier search has left behind has saved its last checkpoint."""
    end, is_announced = time.monotonic() + STOP_SECONDS, False
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock_run_folder(run_dir, "output_dir"))
            except UserError as error:
                if error.code != "folder-in-use" or time.monotonic() > end:
                    raise
            else:
                return
        if not is_announced:
            print(
                f"trial {number}: waiting for a process of the earlier search to save and stop ...",
                flush=True,
            )
            is_announced = True
        time.sleep(0.1)
