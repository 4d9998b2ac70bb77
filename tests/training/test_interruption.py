"""Signals ask a run to stop and do nothing else; outside the main thread they are left alone."""

import signal
import threading

import pytest

from training.interruption import STOP_SIGNALS, Interruption


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
