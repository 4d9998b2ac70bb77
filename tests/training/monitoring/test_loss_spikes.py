"""A loss far above those before is flagged once; noise, a plateau and a loss near zero are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.training.parallelism.cases import ALONE
from training.config import TrainConfig
from training.monitoring import EventStream, Exporter, StepMetrics
from training.monitoring.events import RolledBack, StepsAgreed, read_events
from training.monitoring.loss_spikes import LossSpikes
from training.monitoring.phases import Phases

NOISE = np.random.default_rng(3).normal(size=400)


class Watched:
    """What is said, counted and written of the losses of a run."""

    def __init__(self, run_dir: Path, step_metrics: Callable[..., StepMetrics]) -> None:
        self.run_dir, self.step_metrics = run_dir, step_metrics
        self.said: list[str] = []
        phases, config = Phases(), TrainConfig(output_dir=run_dir.with_suffix(""))
        self.exporter, self.events = Exporter(config, ALONE, phases), EventStream(run_dir, ALONE, phases)
        self.spikes = LossSpikes(self.events, self.exporter, self.said.append)

    def see(self, losses: list[float], **fields: bool) -> None:
        """Let these be the losses of the first steps."""
        with self.events.recording():
            for step, loss in enumerate(losses, start=1):
                # A device is looked at every few steps; what is found does not depend on how many.
                self.spikes.receive(StepsAgreed([replace(self.step_metrics(step, loss), **fields)]))

    @property
    def counted(self) -> float:
        """The value on the rank's page."""
        return self.exporter.registry.get_sample_value("distrinews_training_loss_spikes_total")

    @property
    def written(self) -> list[int]:
        """The steps of the events."""
        return [event["step"] for event in read_events(self.run_dir) if event["kind"] == "loss_spike"]


@pytest.fixture
def watched(tmp_path: Path, step_metrics: Callable[..., StepMetrics]) -> Watched:
    (tmp_path / "model.run").mkdir()
    return Watched(tmp_path / "model.run", step_metrics)


def falling() -> list[float]:
    """A loss that falls from 1.4 to 0.2, with the noise of batches."""
    return [0.2 + 1.2 * math.exp(-step / 60) + 0.08 * abs(NOISE[step]) for step in range(200)]


def test_a_spike_is_printed_counted_and_recorded(watched: Watched) -> None:
    losses = falling()
    losses[150] = 2.5

    watched.see(losses)

    assert watched.written == [151]
    assert watched.counted == 1
    [line] = watched.said
    assert line.startswith("Loss spike at step 151: 2.5000; the median of the 100 steps before is 0.")


def test_consecutive_spikes_are_all_counted_and_printed_once(watched: Watched) -> None:
    losses = falling()
    losses[150:153] = [2.5, 3.0, 2.8]
    losses[180] = 2.2

    watched.see(losses)

    assert watched.written == [151, 152, 153, 181]
    assert watched.counted == 4
    assert [line.split(":")[0] for line in watched.said] == ["Loss spike at step 151", "Loss spike at step 181"]


@pytest.mark.parametrize(
    "losses",
    [
        falling(),
        [*([1.386 + 0.002 * noise for noise in NOISE[:80]]), 1.7, *([1.386] * 20)],
        [*([0.001 + 0.0001 * abs(noise) for noise in NOISE[:80]]), 0.3, *([0.001] * 20)],
        [1.4] * 10 + [9.0] + [1.4] * 30,
    ],
    ids=["batches", "nothing is learnt yet", "all is learnt", "too early to say"],
)
def test_normal_losses_are_no_spikes(watched: Watched, losses: list[float]) -> None:
    watched.see(losses)

    assert watched.said == []
    assert watched.counted == 0


def test_skipped_steps_are_no_spikes_and_do_not_count_as_steps_before(watched: Watched) -> None:
    watched.see([1.4] * 60 + [math.nan], skipped=True)
    watched.see([1.4] * 49 + [9.0])

    assert watched.said == []


def test_after_a_rollback_losses_are_not_compared_with_discarded_steps(watched: Watched) -> None:
    watched.see([0.2] * 100)
    watched.spikes.receive(RolledBack(20, 100, []))

    watched.see([1.4] * 30)

    assert watched.said == []


def test_a_spike_after_a_rollback_is_printed_again(watched: Watched) -> None:
    spike = [0.2] * 60 + [2.5]
    watched.see(spike)
    watched.spikes.receive(RolledBack(0, 61, []))

    watched.see(spike)

    assert [line.split(":")[0] for line in watched.said] == ["Loss spike at step 61"] * 2
