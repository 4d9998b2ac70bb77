"""A slow rank is named with the phase in which it is slow, though all ranks' steps take the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.processes import here, run_on_ranks
from tests.training.parallelism.cases import ALONE
from tests.training.parallelism.small_runs import small_rows, small_strategy
from training.config import TrainConfig
from training.data.batching import rank_share
from training.model.architectures import find_blocks
from training.monitoring import Exporter
from training.monitoring.collectives import Collectives
from training.monitoring.events import EventLog, read_events
from training.monitoring.observer import Observers
from training.monitoring.status import StatusFile
from training.monitoring.stragglers import LOOKS_IN_A_ROW, Stragglers, at_even_shares, compare
from training.parallelism.strategy import Strategy
from training.run.phases import Phases

SECONDS = 0.5  # by which a rank is held up in a step, far more than a busy machine holds up the other
EVERY = 1


def _wait(*arguments: Any) -> None:
    time.sleep(SECONDS)


def _hold_up(strategy: Strategy, phase: str) -> Callable[[], None]:
    """Make this rank slow within a phase of its passes; returns what ends that."""
    block = find_blocks(strategy.parts[0])[0]
    if phase == "backward":
        return block.register_full_backward_hook(_wait).remove
    return block.register_forward_pre_hook(_wait).remove


def _watched_run(folder: Path, phase: str, fields: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """Steps in which the second rank is held up, then some without; what is said, and this rank's gauges in between."""
    ranks, phases, said, config = here(), Phases(), [], TrainConfig(**fields)
    strategy, events = small_strategy(**(fields | {"balance": "none"})), EventLog(folder, ranks, phases)
    strategy.phases = phases
    with closing(Exporter(config, ranks, phases)) as exporter, events.writing():
        trainer = SimpleNamespace(config=config, ranks=ranks, strategy=strategy, phases=phases, exporter=exporter)
        trainer.events, trainer.say, trainer.status = events, said.append, StatusFile(folder, ranks, phases)
        collectives = Collectives(exporter, "gloo", EVERY)
        with closing(Observers([collectives, Stragglers(trainer, collectives, EVERY)])) as observers:
            observers.run_starts(0, 100, [])
            let_go = _hold_up(strategy, phase) if ranks.rank == 1 and phase != "data" else lambda: None
            _take_steps(observers, trainer, range(1, 1 + (LOOKS_IN_A_ROW + 1) * EVERY), slow_data=phase == "data")
            read = exporter.registry.get_sample_value
            gauges = [read(f"distrinews_training_{name}", {"phase": phase}) for name in ("straggler", "slowness")]
            gauges.append(trainer.status.status.slow_phases)
            let_go()
            _take_steps(observers, trainer, range(10, 20), slow_data=False)
    return said, gauges


def _take_steps(observers: Observers, trainer: SimpleNamespace, steps: range, *, slow_data: bool) -> None:
    """As the Trainer's, on a few rows."""
    rows, strategy = small_rows(), trainer.strategy
    for step in steps:
        observers.step_begins(step)
        with trainer.phases("data"):
            share = rank_share(rows, np.arange(12), strategy.place, strategy.config.gradient_accumulation)
            if slow_data and here().rank == 1:
                _wait()
        with trainer.phases("step"):
            result = strategy.step(share, step, 1e-3)
        observers.step_ends(step, share, result)
        here().barrier()  # as the agreement on the losses
        observers.steps_agreed([])


@pytest.mark.parametrize(
    ("phase", "fields"),
    [
        ("backward", {"strategy": "ddp"}),
        ("compute", {"strategy": "zero3"}),
        pytest.param("data", {"strategy": "tp"}, marks=pytest.mark.slow),
        pytest.param("forward", {"strategy": "zero1", "gradient_accumulation": 2}, marks=pytest.mark.slow),
        pytest.param("forward", {"strategy": "ddp", "balance": "auto"}, marks=pytest.mark.slow),
        pytest.param("compute", {"strategy": "tp"}, marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_named_with_its_phase(phase: str, fields: dict[str, Any], tmp_path: Path) -> None:
    (said, first), (_, second) = run_on_ranks(2, _watched_run, tmp_path, phase, fields)

    told = [event for event in read_events(tmp_path) if event["kind"] == "straggler"]
    begun, ended, *_ = [event for event in told if (event["slow_rank"], event["phase"]) == (1, phase)]
    assert begun["slow"]
    assert begun["seconds"] - begun["median"] > SECONDS / 2
    assert not ended["slow"]
    assert any(line.startswith("Straggler: rank 1 on ") and f"is slow: {phase} " in line for line in said)
    assert second[0] == 1
    assert second[1] > 1.2
    assert first[0] == 0
    assert first[2] == []
    assert phase in second[2]


def test_a_rank_that_is_slow_in_two_phases_and_recovers_in_one_is_still_slow(tmp_path: Path) -> None:
    phases = Phases()
    with closing(Exporter(TrainConfig(), ALONE, phases)) as exporter:
        status, events = StatusFile(tmp_path, ALONE, phases), EventLog(tmp_path, ALONE, phases)
        trainer = SimpleNamespace(config=TrainConfig(), ranks=ALONE, phases=phases, exporter=exporter, status=status)
        trainer.events, trainer.say, trainer.strategy = events, lambda line: None, SimpleNamespace(pass_model=None)
        stragglers = Stragglers(trainer, Collectives(exporter, "gloo", EVERY), EVERY)
        stragglers.hosts = ["here"]
        for _ in range(LOOKS_IN_A_ROW):
            stragglers._judge({(0, "data"): (2.0, 1.0), (0, "forward"): (2.0, 1.0)})
        assert status.status.slow_phases == ["data", "forward"]

        stragglers._judge({(0, "data"): (1.0, 1.0), (0, "forward"): (2.0, 1.0)})

    assert status.status.slow_phases == ["forward"]


def test_ranks_are_compared_with_those_that_do_the_same_work() -> None:
    everyone = [{"data": 1.0, "forward": 2.0}, {"data": 1.0}, {"data": 3.0, "forward": 9.0}, {"data": 1.5}]

    found = compare(everyone, stages=[0, 1, 0, 1])

    assert found[2, "data"] == (3.0, 1.0)  # of two, the faster one is the measure
    assert found[3, "data"] == (1.5, 1.0)
    assert found[2, "forward"] == (9.0, 2.0)
    assert not any(phase == "forward" and rank in (1, 3) for rank, phase in found)
    assert compare(everyone[:1], stages=[0]) == {}


def test_balanced_ranks_are_compared_by_their_tokens() -> None:
    slow, fast = at_even_shares([(100, {"forward": 1.0}), (300, {"forward": 1.0})])

    assert slow[1]["forward"] == pytest.approx(2.0)
    assert fast[1]["forward"] == pytest.approx(2 / 3)
