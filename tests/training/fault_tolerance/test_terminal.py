"""A terminal that is closed stops a run with all saved, however much the run still has to say."""

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from training.monitoring.status import read_statuses

TRAINING = Path(__file__).resolve().parents[3] / "training"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")

# A command in a terminal of its own, the first there, as the shell of a connection is. SIGUSR1 closes the terminal.
TERMINAL = """
import contextlib, os, pty, signal, sys

pid, ours = pty.fork()
if not pid:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    os.execvp(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGUSR1, lambda number, frame: os.close(ours))
with contextlib.suppress(OSError):  # closed by us, or left by the command
    while True:
        os.write(1, os.read(ours, 4096))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""

SPEAKS_ON = """
import os, signal, sys, time
from training.fault_tolerance.interruption import Interruption

if sys.argv[1] == "under nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with Interruption(75, is_first=True).saving() as interruption:
    print("waits")
    while os.isatty(1) or not (interruption.asked or sys.argv[1] == "under nohup"):
        time.sleep(0.01)
    print("more than a buffer holds " * 1000)
    print("and on", file=sys.stderr)
print("up to the end", end="")
"""


@pytest.fixture
def start_in_terminal(start: Callable[..., Any]) -> Callable[..., Any]:
    """`start_in_terminal(command)`: as `start`, in a terminal that SIGUSR1 closes."""

    def start_there(command: Sequence[str | Path]) -> Any:
        environment = {"TERM": "xterm", "PYTHON": sys.executable}
        return start([sys.executable, "-c", TERMINAL, *command], wait=False, env=environment)

    return start_there


@pytest.mark.parametrize("place", ["in a shell", "under nohup"])
def test_a_process_may_print_after_its_terminal_is_closed(start_in_terminal: Callable[..., Any], place: str) -> None:
    run = start_in_terminal([sys.executable, "-c", SPEAKS_ON, place])
    run.wait_until(lambda: "waits" in run.out)

    run.process.send_signal(signal.SIGUSR1)

    assert run.wait() == 0, run.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "num_ranks", "exit_code"),
    [
        ([sys.executable, TRAINING / "train_single.py"], 1, 0),
        ([*TORCHRUN, TRAINING / "train_ddp.py"], 2, 1),  # 1: of torchrun
        (["bash", TRAINING / "run_ddp.sh", "2"], 2, 0),
    ],
    ids=["train_single.py", "torchrun", "run_ddp.sh"],
)
def test_a_run_whose_terminal_was_closed_resumes_after_its_last_step(
    start_in_terminal: Callable[..., Any],
    base_flags: tuple[str, ...],
    metrics_of: Callable[..., Any],
    tmp_path: Path,
    command: Sequence[str | Path],
    num_ranks: int,
    exit_code: int,
) -> None:
    flags = ("--epochs", "500", "--batch_size", "4", "--save_every", "0", "--output_dir", tmp_path / "model")
    run = start_in_terminal([*command, *base_flags, *flags])
    run.wait_until(lambda: "epoch 1" in run.out)

    run.process.send_signal(signal.SIGUSR1)

    assert run.wait() == exit_code
    run_dir = tmp_path / "model.run"
    assert [status.state for status in read_statuses(run_dir)] == ["stopped"] * num_ranks
    last = metrics_of(run_dir)[-1]["step"]

    again = start_in_terminal([*command, *base_flags, *flags])

    again.wait_until(lambda: f"Resuming after step {last:,} of" in again.out)
