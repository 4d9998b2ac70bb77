"""A slow rank is named with the phase in which it is slow, and what ranks send each other is counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.processes import here, run_on_ranks
from tests.training.parallelism.cases import ALONE
from tests.training.parallelism.small_runs import small_rows, small_strategy, take_steps
from training.config import TrainConfig
from training.data.batching import micro_batches_of_rank
from training.model.architectures import find_blocks
from training.monitoring import Exporter
from training.monitoring.events import (
    EventStream,
    MetricsFile,
    RunStarted,
    StepDone,
    StepsAgreed,
    StepStarted,
    read_events,
    read_metrics,
)
from training.monitoring.phases import Phases
from training.monitoring.records import CollectiveUse
from training.monitoring.report import collective_table
from training.monitoring.status import StatusFile
from training.monitoring.stragglers import (
    CHECKS_IN_A_ROW,
    Collective,
    CollectiveRecorder,
    Stragglers,
    at_equal_tokens,
    by_operation,
    compare,
    operation_of_kernel,
    scaling_efficiency,
)
from training.parallelism.strategy import Strategy
from training.run.step import optimizer_step

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
    strategy, events = small_strategy(**(fields | {"balance": "none"})), EventStream(folder, ranks, phases)
    strategy.phases = phases
    with closing(Exporter(config, ranks, phases)) as exporter, events.recording():
        context = SimpleNamespace(config=config, ranks=ranks, strategy=strategy, phases=phases, exporter=exporter)
        context.events, context.say, context.status = events, said.append, StatusFile(folder, ranks, phases)
        collectives = CollectiveRecorder(events, "gloo", EVERY)
        events.subscribers += [
            collectives,
            Stragglers(context, config, collectives, EVERY, strategy.unsynchronized_model, []),
        ]
        with closing(events):
            events.publish(RunStarted(0, 100, []))
            let_go = _hold_up(strategy, phase) if ranks.rank == 1 and phase != "data" else lambda: None
            _take_steps(context, range(1, 1 + (CHECKS_IN_A_ROW + 1) * EVERY), slow_data=phase == "data")
            read = exporter.registry.get_sample_value
            gauges = [read(f"distrinews_training_{name}", {"phase": phase}) for name in ("straggler", "slowness")]
            gauges.append(context.status.status.slow_phases)
            let_go()
            _take_steps(context, range(10, 20), slow_data=False)
    return said, gauges


def _take_steps(context: SimpleNamespace, steps: range, *, slow_data: bool) -> None:
    """As the Trainer's, on a few rows."""
    rows, strategy = small_rows(), context.strategy
    for step in steps:
        context.events.publish(StepStarted(step))
        with context.phases("data"):
            share = micro_batches_of_rank(
                rows, np.arange(12), strategy.data_shard, strategy.config.gradient_accumulation
            )
            if slow_data and here().rank == 1:
                _wait()
        with context.phases("step"):
            optimizer_step(strategy, share, step, 1e-3)
        context.events.publish(StepDone(step, share))
        here().barrier()  # as the agreement on the losses
        context.events.publish(StepsAgreed([]))


@pytest.mark.parametrize(
    ("phase", "fields"),
    [
        ("backward", {"strategy": "ddp"}),
        pytest.param("compute", {"strategy": "zero3"}, marks=pytest.mark.slow),
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
        status, events = StatusFile(tmp_path, ALONE, phases), EventStream(tmp_path, ALONE, phases)
        context = SimpleNamespace(ranks=ALONE, phases=phases, exporter=exporter, status=status)
        context.events, context.say = events, lambda line: None
        collectives = CollectiveRecorder(events, "gloo", EVERY)
        stragglers = Stragglers(context, TrainConfig(), collectives, EVERY, None, [])
        stragglers.hosts = ["here"]
        for _ in range(CHECKS_IN_A_ROW):
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
    slow, fast = at_equal_tokens([(100, {"forward": 1.0}), (300, {"forward": 1.0})])

    assert slow[1]["forward"] == pytest.approx(2.0)
    assert fast[1]["forward"] == pytest.approx(2 / 3)


Page = dict[tuple[str, str], float]


def _recorded(folder: Path, fields: dict[str, Any]) -> tuple[Page, int, float | None]:
    """The counters after four steps, every second one recorded; bytes of the weights; seconds waited."""
    strategy = small_strategy(**fields)
    with closing(Exporter(TrainConfig(), here(), Phases())) as exporter:
        events = EventStream(folder, here(), Phases())
        collectives = CollectiveRecorder(events, "gloo", every=2)
        events.subscribers += [exporter, collectives]
        if here().is_first:
            events.subscribers.append(MetricsFile(folder, 0))
        for step in range(1, 5):
            events.publish(StepStarted(step))
            take_steps(strategy, [step], ranks=ALONE)
            events.publish(StepDone(step, []))
        samples = [sample for family in exporter.registry.collect() for sample in family.samples]
    page = {
        (sample.name.removeprefix("distrinews_training_collective_"), sample.labels.get("operation", "")): sample.value
        for sample in samples
        if "_collective_" in sample.name and "le" not in sample.labels
    }
    num_bytes = sum(4 * parameter.numel() for parameter in strategy.parameters.values())
    return page, num_bytes, collectives.waited


def test_the_bytes_that_ddp_reduces_are_those_of_the_gradients(tmp_path: Path) -> None:
    for page, num_bytes, waited in run_on_ranks(2, _recorded, tmp_path, {"strategy": "ddp"}):
        assert page["steps_total", ""] == 2
        assert page["bytes_total", "all_reduce"] == 2 * num_bytes
        assert page["calls_total", "all_reduce"] == page["seconds_count", "all_reduce"] >= 2
        assert 0 < waited <= page["seconds_sum", "all_reduce"]


def test_the_seconds_of_each_operation_are_in_prometheus_metrics_and_the_reports_table(tmp_path: Path) -> None:
    (page, _, _), _ = run_on_ranks(2, _recorded, tmp_path, {"strategy": "zero3"})

    records = [record for record in read_metrics(tmp_path) if record["kind"] == "collectives"]
    assert [record["step"] for record in records] == [2, 4]
    for name in ("all_gather", "all_reduce"):
        used = [record["operations"][name] for record in records]
        assert sum(use["seconds"] for use in used) == pytest.approx(page["seconds_sum", name])
        assert page["seconds_sum", name] > 0
        assert sum(use["calls"] for use in used) == page["calls_total", name] == page["seconds_count", name]
        assert sum(use["bytes"] for use in used) == page["bytes_total", name] > 0
    headings, rows = collective_table([record["operations"] for record in records])
    assert headings == ["Operation", "Calls per step", "Bytes per step", "Time per step"]
    [of_all_gather] = [row for row in rows if row[0] == "all_gather"]
    assert of_all_gather[1:] == [
        f"{page['calls_total', 'all_gather'] / 2:,.1f}",
        f"{page['bytes_total', 'all_gather'] / 2e6:,.2f} MB",
        f"{1000 * page['seconds_sum', 'all_gather'] / 2:,.2f} ms",
    ]


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "all_gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("nccl:all_reduce", None),  # a range, which the GPU's timeline repeats
        ("ampere_sgemm_128x64_tn", None),
    ],
)
def test_kernels_of_nccl_are_counted_for_their_operation(kernel: str, operation: str | None) -> None:
    assert operation_of_kernel(kernel) == operation


def test_with_nccl_the_seconds_are_those_of_the_kernels_and_not_of_the_calls() -> None:
    calls = [Collective("all_reduce", 400, 0.0, 0.001), Collective("broadcast", 8, 0.1, 0.101)]
    kernels = [Collective("all_reduce", 0, 0.5, 0.75), Collective("send_recv", 0, 1.0, 1.5)]

    found = by_operation(calls, kernels)

    assert found["all_reduce"] == CollectiveUse(calls=1, num_bytes=400, seconds=(0.25,))
    assert found["broadcast"] == CollectiveUse(calls=1, num_bytes=8, seconds=())
    assert found["send_recv"] == CollectiveUse(calls=0, num_bytes=0, seconds=(0.5,))
    assert by_operation(calls, None)["all_reduce"].seconds == (0.001,)


def _efficiency(folder: Path, slow_ranks: tuple[int, ...], strategy_name: str) -> float | None:
    """The scaling efficiency of steps in which some ranks are held up in their backward pass."""
    ranks, phases, config = here(), Phases(), TrainConfig(strategy=strategy_name)
    strategy, events = small_strategy(strategy=strategy_name), EventStream(folder, ranks, phases)
    strategy.phases = phases
    with closing(Exporter(config, ranks, phases)) as exporter:
        context = SimpleNamespace(config=config, ranks=ranks, strategy=strategy, phases=phases, exporter=exporter)
        context.events, context.say, context.status = events, print, StatusFile(folder, ranks, phases)
        collectives = CollectiveRecorder(events, "gloo", EVERY)
        events.subscribers += [
            exporter,
            collectives,
            Stragglers(context, config, collectives, 3, strategy.unsynchronized_model, []),
        ]
        events.publish(RunStarted(0, 100, []))
        if ranks.rank in slow_ranks:
            _hold_up(strategy, "backward")
        _take_steps(context, range(1, 4), slow_data=False)
        return exporter.registry.get_sample_value("distrinews_training_scaling_efficiency")


def test_a_rank_that_others_wait_for_lowers_the_scaling_efficiency_and_equal_ranks_do_not(tmp_path: Path) -> None:
    waiting, equal = (run_on_ranks(2, _efficiency, tmp_path, slow_ranks, "ddp") for slow_ranks in ((1,), (0, 1)))

    assert waiting[0] == waiting[1]  # both know the same figure
    assert waiting[0] < equal[0] <= 1
    assert waiting[0] < 0.8


def test_without_seconds_of_their_own_the_ranks_tell_no_scaling_efficiency(tmp_path: Path) -> None:
    assert all(math.isnan(found) for found in run_on_ranks(2, _efficiency, tmp_path, (), "zero3"))


def test_the_efficiency_is_what_the_ranks_achieve_of_what_each_could_at_its_own_pace() -> None:
    # 100 tokens each. Alone they take 1 s and 2 s, 150 tokens per second together; the steps take 2.5 s.
    assert scaling_efficiency([(100, 1.0, 2.5), (100, 2.0, 2.5)]) == pytest.approx(200 / 2.5 / 150)
    # Balanced ranks that never wait lose nothing.
    assert scaling_efficiency([(100, 2.0, 2.0), (300, 2.0, 2.0)]) == pytest.approx(1.0)


def test_what_fsdp_gathers_and_scatters_is_counted_too(tmp_path: Path) -> None:
    for page, num_bytes, _ in run_on_ranks(2, _recorded, tmp_path, {"strategy": "zero3"}):
        # A rank hands over its half of the weights, of the blocks once more for the backward pass.
        assert num_bytes / 2 <= page["bytes_total", "all_gather"] / 2 <= 2 * num_bytes
        assert page["calls_total", "all_gather"] > page["calls_total", "all_reduce"]


def test_nothing_is_recorded_while_another_profiler_is_at_work_and_no_recording_stays_open(tmp_path: Path) -> None:
    events = EventStream(tmp_path, ALONE, Phases())
    with (
        closing(Exporter(TrainConfig(), ALONE, Phases())) as exporter,
        closing(CollectiveRecorder(events, "gloo", 1)) as one,
    ):
        events.subscribers.append(exporter)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            one.receive(StepStarted(1))
        assert not torch.autograd._profiler_enabled()
        one.receive(StepDone(1, []))
        assert exporter.registry.get_sample_value("distrinews_training_collective_steps_total") == 0
        one.receive(StepStarted(2))
        assert torch.autograd._profiler_enabled()
    assert not torch.autograd._profiler_enabled()
