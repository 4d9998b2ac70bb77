"""Real training processes for tests: started, watched, killed, and read afterwards."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from common.errors import run_command
from tests.processes import PythonProcess, run_on_ranks, save_blank, wait_until
from tests.training.checkpointing.small_saves import read_whole
from tests.training.parallelism.saved_states import WholeState
from training import train_single

REPOSITORY = Path(__file__).resolve().parents[2]
TRAINING = REPOSITORY / "training"
DEADLINE = 240.0  # seconds after which a run counts as hanging

# 57 training rows: with 8 rows a global batch an epoch has 8 steps, and its last batch has a single row.
BASE = (
    *("--model", "tiny", "--dataset", "sample", "--max_train_rows", "63", "--max_length", "48"),
    *("--precision", "fp32", "--deterministic", "--device", "cpu", "--epochs", "2", "--log_every", "1"),
)


def _descendants(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for child, parent in (map(int, line.split()) for line in listed.splitlines()):
        children.setdefault(parent, []).append(child)
    found, look = [], [pid]
    while look:
        look = [child for parent in look for child in children.get(parent, [])]
        found += look
    return found


class Run:
    """A command that runs, or has run, with what it printed.

    Args:
        command: what to start.
        folder: a new folder for its output.
        env: the whole environment.
        cwd: where it starts.
        warm: whether it is a Python program that may start with PyTorch imported.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str], cwd: Path, warm: bool = False
    ) -> None:
        self._files = folder / "stdout.txt", folder / "stderr.txt"
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            if warm:
                self.process = PythonProcess(command[1:], env, cwd, self._files)
                return
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True)

    @property
    def out(self) -> str:
        """Its stdout so far."""
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        """Its stderr so far."""
        return self._files[1].read_text()

    @property
    def error_lines(self) -> list[str]:
        """The lines of stderr that state an error."""
        return [line for line in self.err.splitlines() if line.startswith("error:")]

    @property
    def descendants(self) -> list[int]:
        """The process ids of all that it has started."""
        return _descendants(self.process.pid)

    @property
    def ranks(self) -> list[int]:
        """The process ids of the ranks that torchrun started, in their order."""
        ranks = {}
        for pid in self.descendants:
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks |= {int(entry[5:]): pid for entry in environment if entry.startswith(b"RANK=")}
                ranks |= {int(rank): pid for rank in re.findall(r"rank (\d+)", Path(f"/proc/{pid}/comm").read_text())}
        return [ranks[rank] for rank in sorted(ranks)]

    def wait(self, seconds: float = DEADLINE) -> int:
        """Its exit code, or a failed test if it does not end in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still runs after {seconds} s\n{self.out}\n{self.err}")

    def wait_until(self, what: Callable[[], Any]) -> None:
        """Look until `what` holds; a failed test if the command ends before."""

        def holds() -> bool:
            if not (found := bool(what())) and self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode} before it was to\n{self.out}\n{self.err}")
            return found

        wait_until(holds, DEADLINE, lambda: f"{self.out}\n{self.err}")

    def kill(self) -> None:
        """SIGKILL it and all that it started, the ranks first: they have no time to save or to complain."""
        for pid in [*reversed(self.descendants), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def _starting(folder: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(
        command: Sequence[str | Path],
        *,
        wait: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        warm: bool = False,
    ) -> Run:
        place = folder / f"run_{len(runs)}"
        (place / "cwd").mkdir(parents=True)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", **(env or {})}
        runs.append(Run([str(part) for part in command], place, environment, cwd or place / "cwd", warm))
        if wait:
            runs[-1].wait()
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.kill()


def _torchrun(world_size: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]


def _launcher(start: Callable[..., Run], base_flags: Sequence[str]) -> Callable[..., Run]:
    def launch(
        world_size: int,
        *flags: str | Path,
        wait: bool = True,
        env: Mapping[str, str] | None = None,
        script: Path | None = None,
        cwd: Path | None = None,
        warm: bool = True,
    ) -> Run:
        alone = [sys.executable, script or TRAINING / "train_single.py"]
        together = [*_torchrun(world_size), script or TRAINING / "train_ddp.py"]
        command = alone if world_size == 1 else together
        return start([*command, *base_flags, *flags], wait=wait, env=env, cwd=cwd, warm=warm)

    return launch


@pytest.fixture(scope="session")
def base_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a run of 16 steps that takes seconds; a flag given after them wins."""
    return (*BASE, "--cache_dir", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """`start(command, wait=True, env=None, cwd=None, warm=False)`: any command, in an empty folder, killed at the end.

    A warm one is a Python program that starts with PyTorch imported, which saves five seconds.
    """
    with _starting(tmp_path / "started") as started:
        yield started


@pytest.fixture
def launch(start: Callable[..., Run], base_flags: tuple[str, ...]) -> Callable[..., Run]:
    """`launch(world_size, *flags, wait=True, env=None, script=None, cwd=None, warm=True)`: base flags, then these.

    One process runs train_single.py, more run train_ddp.py under torchrun; see `start` for what is warm.
    """
    return _launcher(start, base_flags)


@pytest.fixture(scope="session")
def launch_shared(
    tmp_path_factory: pytest.TempPathFactory, base_flags: tuple[str, ...]
) -> Iterator[Callable[..., Run]]:
    """`launch` for fixtures that many tests read."""
    with _starting(tmp_path_factory.mktemp("shared")) as started:
        yield _launcher(started, base_flags)


@pytest.fixture
def train_here(
    base_flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., int]]:
    """`train_here(*flags, with_plots=False)`: train_single.py's main in this process, in an empty folder.

    Returns its exit code. The same code without the seconds of a start; what it prints is in capfd. Without plots
    those of its report are blank images.
    """
    threads = torch.get_num_threads()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def train(*flags: str | Path, with_plots: bool = False) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train_single.py", *base_flags, *map(str, flags)])
            if not with_plots:
                patch.setattr(Figure, "savefig", save_blank)
            with pytest.raises(SystemExit) as ended:
                run_command(train_single.main)
        return int(ended.value.code or 0)

    yield train
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint_state() -> Callable[..., WholeState]:
    """`checkpoint_state(run_dir, step)`: what a checkpoint holds, whole and on the CPU."""

    def read(run_dir: Path, step: int) -> WholeState:
        return read_whole(str(run_dir / "checkpoints" / f"step_{step:08d}"))

    return read


@pytest.fixture(scope="session")
def metrics_of() -> Callable[..., list[dict[str, Any]]]:
    """`metrics_of(run_dir, kind="step")`: the records of a kind in metrics.jsonl."""

    def read(run_dir: Path, kind: str = "step") -> list[dict[str, Any]]:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    return read


@pytest.fixture(name="run_on_ranks", scope="session")
def fixture_run_on_ranks() -> Callable[..., list[Any]]:
    """`run_on_ranks(world_size, function, *arguments, seconds=120)`: a function on real gloo ranks, cheaply."""
    return run_on_ranks
