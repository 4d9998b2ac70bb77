"""What ranks send each other is counted by operation, whether Python or C++ calls it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from tests.processes import here, run_on_ranks
from tests.training.parallelism.small_runs import small_strategy, take_steps
from training.config import TrainConfig
from training.monitoring import Exporter
from training.monitoring.collectives import Collective, Collectives, covered_seconds
from training.parallelism.distributed import Ranks
from training.run.phases import Phases

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")  # whose losses are not summed: that would be counted too
Page = dict[tuple[str, str], float]


def _looked_at(fields: dict[str, Any]) -> tuple[Page, int, float | None]:
    """The counters after four steps of which each second one is looked at; bytes of the weights; seconds waited."""
    strategy = small_strategy(**fields)
    with closing(Exporter(TrainConfig(), here(), Phases())) as exporter:
        collectives = Collectives(exporter, "gloo", every=2)
        for step in range(1, 5):
            collectives.step_begins(step)
            take_steps(strategy, [step], ranks=ALONE)
            collectives.step_ends(step, [], None)
        samples = [sample for family in exporter.registry.collect() for sample in family.samples]
    page = {
        (sample.name.removeprefix("distrinews_training_collective_"), sample.labels.get("operation", "")): sample.value
        for sample in samples
        if "_collective_" in sample.name and "le" not in sample.labels
    }
    num_bytes = sum(4 * parameter.numel() for parameter in strategy.parameters.values())
    return page, num_bytes, collectives.waited


def test_the_bytes_that_ddp_reduces_are_those_of_the_gradients() -> None:
    for page, num_bytes, waited in run_on_ranks(2, _looked_at, {"strategy": "ddp"}):
        assert page["steps_total", ""] == 2
        assert page["bytes_total", "all_reduce"] == 2 * num_bytes
        assert page["calls_total", "all_reduce"] == page["seconds_count", "all_reduce"] >= 2
        assert 0 < waited <= page["seconds_sum", "all_reduce"]


def test_what_fsdp_gathers_and_scatters_is_counted_too() -> None:
    for page, num_bytes, _ in run_on_ranks(2, _looked_at, {"strategy": "zero3"}):
        # A rank hands over its half of the weights, of the blocks once more for the backward pass.
        assert num_bytes / 2 <= page["bytes_total", "all_gather"] / 2 <= 2 * num_bytes
        assert page["calls_total", "all_gather"] > page["calls_total", "all_reduce"]


def test_time_in_which_several_run_counts_once() -> None:
    found = [Collective("all_reduce", 1, *times) for times in ((5.0, 6.0), (1.0, 3.0), (2.0, 2.5), (2.0, 4.0))]

    assert covered_seconds(found) == pytest.approx(4.0)
    assert covered_seconds([]) == 0


def test_no_look_while_somebody_else_profiles_and_none_left_open() -> None:
    with (
        closing(Exporter(TrainConfig(), ALONE, Phases())) as exporter,
        closing(Collectives(exporter, "gloo", 1)) as one,
    ):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            one.step_begins(1)
        assert not torch.autograd._profiler_enabled()
        one.step_ends(1, [], None)
        assert exporter.registry.get_sample_value("distrinews_training_collective_steps_total") == 0
        one.step_begins(2)
        assert torch.autograd._profiler_enabled()
    assert not torch.autograd._profiler_enabled()


def test_the_recording_can_be_turned_off_for_the_sake_of_another_profiler() -> None:
    with (
        closing(Exporter(TrainConfig(), ALONE, Phases())) as exporter,
        closing(Collectives(exporter, "gloo", TrainConfig(record_collectives_every=0).record_collectives_every)) as one,
    ):
        one.step_begins(20)
        assert not torch.autograd._profiler_enabled()
        one.step_ends(20, [], None)
