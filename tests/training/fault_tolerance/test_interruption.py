"""Signals ask a run to stop and do nothing else; before there is anything to save they end it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import StopAsked, TrainingFailure
from training.fault_tolerance.interruption import STOP_SIGNALS, Interruption

REPOSITORY = Path(__file__).resolve().parents[3]

# Waits in the C library, where Python runs no handler, with a second thread that must not be ended either.
WAITS_FOR_EVER = """
import ctypes
from training.fault_tolerance.interruption import Interruption

with Interruption(75, is_first=True).saving():
    print("waits", flush=True)
    ctypes.CDLL(None).pause()
    while True:
        ctypes.CDLL(None).sleep(1000)
"""

# A handler that raised where nothing can be raised, in a finalizer: the run begins as if nobody had asked.
BEGINS_WHILE_ASKED = """
import signal, sys, threading, time
from common.errors import StopAsked
from training.fault_tolerance import interruption

interruption.STOP_SECONDS = 0.5
with interruption.Interruption(75, is_first=True) as asked:
    try:
        signal.raise_signal(signal.SIGTERM)
    except StopAsked:
        asked.asked = False
    [listener] = [thread.ident for thread in threading.enumerate() if thread.name == "signals"]
    while sys._current_frames()[listener].f_code.co_name != "wait":
        time.sleep(0.01)
    with asked.saving():
        while not asked.asked:
            time.sleep(0.01)
        print("saved")
"""

# Its main thread writes into a pipe that is full, and nobody reads.
IS_NOT_READ = """
import contextlib, os, threading
from training.fault_tolerance import interruption

interruption.FINAL_MESSAGE_SECONDS = 0.1
os.set_blocking(1, False)
with contextlib.suppress(BlockingIOError):
    while True:
        os.write(1, bytes(4096))
os.set_blocking(1, True)
print("waits in the buffer")
threading.Thread(target=interruption.leave, args=(7,)).start()
print("x" * 100_000)
"""


@pytest.fixture(autouse=True)
def in_a_shell() -> Iterator[None]:
    """The tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def _flags(batch_size: int, output: Path) -> tuple[str | Path | int, ...]:
    return ("--batch_size", batch_size, "--save_every", 2, "--keep_last", 3, "--output_dir", output)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_signal_asks_and_afterwards_does_what_it_did_before(number: signal.Signals) -> None:
    before, wakeup_before = signal.getsignal(number), signal.set_wakeup_fd(-1)

    with Interruption(75, is_first=True).saving() as interruption:
        assert not interruption.asked
        signal.raise_signal(number)
        assert interruption.asked

    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(wakeup_before) == -1


def test_a_closed_terminal_does_not_ask_a_run_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with Interruption(75, is_first=True).saving() as interruption:
        signal.raise_signal(signal.SIGHUP)
        assert not interruption.asked

    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_before_there_is_anything_to_save_a_signal_ends_the_process(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StopAsked) as stopped, Interruption(75, is_first=True):
        signal.raise_signal(number)

    stopped.value.say()
    assert stopped.value.exit_code == (130 if number == signal.SIGINT else 75)
    assert capfd.readouterr().out.startswith("Stopped before the first step, nothing to save.")


def test_what_slurm_sends_long_before_the_end_is_remembered_until_something_can_be_saved() -> None:
    with Interruption(75, is_first=True) as interruption:
        signal.raise_signal(signal.SIGUSR1)
        with interruption.saving():
            assert interruption.asked


def test_a_stop_after_what_slurm_sent_ends_the_process_while_there_is_nothing_to_save() -> None:
    with Interruption(75, is_first=True):
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(StopAsked):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_run_unwinds_leaves_its_error_in_place(number: signal.Signals) -> None:
    def fail() -> None:
        with Interruption(75, is_first=True) as interruption, contextlib.ExitStack() as stack:
            stack.callback(signal.raise_signal, number)
            stack.enter_context(interruption.saving())
            raise TrainingFailure("the disk is full")

    with pytest.raises(TrainingFailure, match="the disk is full"):
        fail()


def test_a_run_that_begins_after_all_while_a_stop_is_due_is_not_ended(start: Callable[..., Any]) -> None:
    run = start([sys.executable, "-c", BEGINS_WHILE_ASKED], warm=True)

    assert (run.wait(), run.out, run.err) == (0, "saved\n", "")


def test_a_process_whose_output_nobody_reads_leaves_all_the_same() -> None:
    command = [sys.executable, "-E", "-c", IS_NOT_READ]  # buffered, whatever the environment says
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        try:
            assert process.wait(30) == 7
        finally:
            process.kill()


def test_outside_the_main_thread_no_signal_is_touched() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    seen: list[object] = []

    def enter() -> None:
        with Interruption(75, is_first=True).saving() as interruption:
            seen.extend(signal.getsignal(number) for number in STOP_SIGNALS)
            seen.append(interruption.asked)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert seen == [*before, False]


def test_a_second_ctrl_c_ends_at_once_whatever_the_process_waits_for(start: Callable[..., Any]) -> None:
    run = start([sys.executable, "-c", WAITS_FOR_EVER], wait=False)
    run.wait_until(lambda: "waits" in run.out)

    while run.process.poll() is None:
        run.process.send_signal(signal.SIGINT)
        try:
            run.process.wait(0.3)
        except subprocess.TimeoutExpired:
            continue

    assert run.process.returncode == 130
    assert run.err == "interrupted\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_launcher_script_passes_a_stop_on_and_ends_with_0(
    start: Callable[..., Any], base_flags: tuple[str, ...], tmp_path: Path, number: signal.Signals
) -> None:
    script = REPOSITORY / "training" / "run_ddp.sh"
    output = tmp_path / "model"
    environment = {"PYTHON": sys.executable}
    run = start(["bash", script, 2, *base_flags, *_flags(4, output)], wait=False, env=environment)
    run.wait_until(lambda: "step 2/" in run.out)

    os.kill(run.process.pid, number)

    assert run.wait() == 0, run.err
    assert "everything is saved. To resume, rerun the same command." in run.out
    assert "Traceback" not in run.err
