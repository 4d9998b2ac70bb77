"""A fault as data, and a run into which it is injected."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.training.faults.judgement import Finding, Reference, judge

FAULT_INJECTION = Path(__file__).with_name("fault_injection.py")
FLAGS = ("--batch_size", "4", "--save_every", "2", "--keep_last", "3")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SECONDS_TO_END, SECONDS_TO_BE_GONE = 600.0, 60.0


@dataclass(frozen=True)
class Injection:
    """What is done to a rank, and when.

    Args:
        on: the moment: ``phase NAME``, ``writes``, ``reads``, ``renames`` or ``removes`` with the file's pattern (of a
            renaming: its new name), ``imports MODULE``, ``starts ``.
        do: a shell command that the rank waits for ($PID, $LAUNCHER, $PYTHON, $CHECKPOINTS), or an act
            of fault_injection.py.
        rank: the one it is done to.
        after: optimizer steps done at that moment; None = any.
        count: which occurrence of that moment in the process.
        turn: how many faults were injected before the launcher's attempt; None = any number.
    """

    on: str
    do: str = "kill -9 $PID"
    rank: int = 0
    after: int | None = None
    count: int = 1
    turn: int | None = None


@dataclass(frozen=True)
class Fault:
    """A fault and what is promised of it; of each it is promised, too, that the run ends with the right weights.

    Args:
        name: what happens to the run.
        promised: what the run does.
        injections: how it is brought about.
        flags: of the run, beside the usual ones; ``{port}`` is a port that another process holds at the first start.
        code: the first start ends with it before the run is finished, -1 = any but 0; the run is then started again.
            None: the first start finishes.
        repair: a shell command between the two starts.
        says: a pattern of the line that names the fault.
        launcher: flags of torchrun.
        disk: MB of a disk of its own that checkpoints go to; 0 = the one of the run.
        epochs: of 8 steps.
        all_saved: no step is to be done again.
        damages_newest: the checkpoint before the newest is to be gone on from.
        left_out: optimizer steps that are to be left out.
        without: steps of which the rows of rank 1 are to be left out for good.
    """

    name: str
    promised: str
    injections: tuple[Injection, ...] = ()
    flags: tuple[str, ...] = ()
    code: int | None = None
    repair: str = "true"
    says: str = ""
    launcher: tuple[str, ...] = ("--standalone", "--nproc_per_node=2", "--max_restarts=3")
    disk: int = 0
    epochs: int = 2
    all_saved: bool = False
    damages_newest: bool = False
    left_out: tuple[int, ...] = ()
    without: tuple[int, ...] = ()


class FaultedRun:
    """A run in a folder of its own, started once or more, and what it left.

    Args:
        fault: what is injected into it.
        folder: new.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault = fault
        self.folder = folder
        self.checkpoints = folder / "disk" / "checkpoints" if fault.disk else folder / "model.run" / "checkpoints"
        self.codes: list[int] = []
        self.printed = ""
        self.port = 0
        folder.mkdir(exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """What fault_injection.py and its injections read."""
        return {
            "FAULT_INJECTIONS": json.dumps([asdict(injection) for injection in self.fault.injections]),
            "FAULT_FOLDER": str(self.folder),
            "FAULT_LAUNCH": str(len(self.codes)),
            "CHECKPOINTS": str(self.checkpoints),
        }

    def command(self, base_flags: Sequence[str]) -> list[str | Path]:
        """Torchrun, and the run below it."""
        launcher = [*TORCHRUN, *self.fault.launcher, FAULT_INJECTION]
        # An empty cache, so that each run prepares its data itself.
        places = ["--output_dir", self.folder / "model", "--checkpoint_dir", self.checkpoints]
        places += ["--cache_dir", self.folder / "cache"]
        flags = [*base_flags, *FLAGS, *places, "--epochs", self.fault.epochs, *self.fault.flags]
        return [str(part).format(port=self.port) for part in (*launcher, *flags)]

    def take(self, *started: Any, seconds: float = SECONDS_TO_END) -> None:
        """Keep what a start ended with, once none of its processes is left."""
        self.codes.append(max((run.wait(seconds) for run in started), key=abs))
        self.printed += "".join(run.out + run.err for run in started)
        wait_for_end_of(self.folder)

    def finding(self, reference: Reference) -> Finding:
        """Hold the run to what was promised; what it did is a row of the table."""
        assert self.codes[-1] == 0, self.printed
        injected = sorted(json.loads(path.read_text())["time"] for path in self.folder.glob("injection_*.json"))
        assert len(injected) == len(self.fault.injections), f"not injected\n{self.printed}"
        return judge(self.fault, self.folder, self.codes, self.printed, injected, reference)


def run_and_judge(
    fault: Fault, start: Callable[..., Any], base_flags: Sequence[str], folder: Path, reference: Reference
) -> Finding:
    """Inject ``fault`` into a run; if the fault ends it, repair and start it again; judge the run."""
    run = FaultedRun(fault, folder)
    with ExitStack() as stack:
        if fault.disk:
            stack.enter_context(disk_of(fault.disk, folder / "disk"))
        with socket.create_server(("", 0)) as held:
            run.port = held.getsockname()[1]
            run.take(start(run.command(base_flags), env=run.environment, wait=False))
        if fault.code is not None:
            code = run.codes[0]
            assert code == fault.code if fault.code >= 0 else code != 0, f"ended with {code}\n{run.printed}"
            assert not (folder / "model" / "model.safetensors").exists()
            subprocess.run(["bash", "-c", fault.repair], env=os.environ | run.environment, check=True)
            run.take(start(run.command(base_flags), env=run.environment, wait=False))
        return run.finding(reference)


def wait_for_end_of(folder: Path) -> None:
    """Wait until no process of the run in ``folder`` is left: ranks outlive a launcher that was killed, not by long."""
    mine, end = f"FAULT_FOLDER={folder}".encode(), time.monotonic() + SECONDS_TO_BE_GONE
    while alive := [path for path in Path("/proc").glob("[0-9]*") if mine in _environment(path)]:
        if time.monotonic() > end:
            for path in alive:
                os.kill(int(path.name), 9)
            pytest.fail(f"processes {[path.name for path in alive]} were left running")
        time.sleep(0.05)


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


@contextmanager
def disk_of(megabytes: int, folder: Path) -> Iterator[None]:
    """A disk of its own at ``folder``, in memory."""
    folder.mkdir(parents=True)
    size = f"size={megabytes}m"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here: that takes root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
