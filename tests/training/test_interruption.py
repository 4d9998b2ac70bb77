"""Signals ask a run to stop and do nothing else; outside the main thread they are left alone."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.interruption import STOP_SIGNALS, Interruption

REPOSITORY = Path(__file__).resolve().parents[2]


def _flags(batch_size: int, output: Path) -> tuple[str | Path | int, ...]:
    return ("--batch_size", batch_size, "--save_every", 2, "--keep_last", 3, "--output_dir", output)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_signal_asks_and_afterwards_does_what_it_did_before(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    with Interruption() as interruption:
        assert not interruption.asked
        signal.raise_signal(number)
        assert interruption.asked

    assert interruption.asked
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_no_signal_is_touched() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    seen: list[object] = []

    def enter() -> None:
        with Interruption() as interruption:
            seen.extend(signal.getsignal(number) for number in STOP_SIGNALS)
            seen.append(interruption.asked)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert seen == [*before, False]


def test_a_stopped_run_ends_with_the_exit_code_that_its_scheduler_wants(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    run = launch(1, *_flags(8, tmp_path / "model"), "--stopped_exit_code", 75, wait=False)
    run.wait_until(lambda: "step 2/" in run.out)

    run.process.terminate()

    assert run.wait() == 75
    assert run.err == ""


def test_the_launcher_script_passes_sigterm_on_and_ends_with_0(
    start: Callable[..., Any], base_flags: tuple[str, ...], tmp_path: Path
) -> None:
    script = REPOSITORY / "training" / "run_ddp.sh"
    output = tmp_path / "model"
    environment = {"PYTHON": sys.executable}
    run = start(["bash", script, 2, *base_flags, *_flags(4, output)], wait=False, env=environment)
    run.wait_until(lambda: "step 2/" in run.out)

    os.kill(run.process.pid, signal.SIGTERM)

    assert run.wait() == 0, run.err
    assert "all saved. To go on, start the same command again." in run.out
    assert "Traceback" not in run.err
