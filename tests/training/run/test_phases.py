"""Seconds of a run are charged to the innermost phase, and each who asks hears of all of them once."""

import time

import pytest

from training.monitoring.phases import Phases


def _pass_time() -> float:
    began = time.monotonic()
    while time.monotonic() - began < 0.002:
        pass
    return time.monotonic() - began


def test_a_phase_is_charged_only_with_its_own_time() -> None:
    phases = Phases()
    began = phases.since
    with phases("step"):
        outside = _pass_time()
        with phases("forward"):
            assert phases.now == "forward"
            inside = _pass_time()
        assert phases.now == "step"

    spent = phases.elapsed("anybody")

    assert spent["forward"] >= inside
    assert spent["step"] >= outside
    assert sum(spent.values()) == pytest.approx(phases.since - began)


def test_each_reader_gets_the_seconds_since_its_own_last_call() -> None:
    phases = Phases()
    with phases("data"):
        _pass_time()
    first = phases.elapsed("exporter")
    with phases("data"):
        _pass_time()
    second = phases.elapsed("exporter")

    assert first["data"] > 0
    assert phases.elapsed("status")["data"] == pytest.approx(first["data"] + second["data"])
    assert phases.elapsed("exporter")["data"] == 0
