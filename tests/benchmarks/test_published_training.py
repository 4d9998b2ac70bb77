"""The planner beside real steps of this machine, and beside runs that others published."""

import json
from statistics import median

import pytest

from benchmarks.planner_accuracy import RESULTS, plan_of
from benchmarks.published_training import Comparison, compare, published_section, states_section, trends


def test_memory_is_within_a_tenth_and_most_times_within_a_quarter_of_the_recorded_real_steps() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    assert len(rows) == 20
    errors = []
    for row in rows:
        plan, real = plan_of(row), row["real"]
        # On CPUs, DDP's buckets lack the word embeddings, which the planner counts as on GPUs.
        counts_more = plan.layout.strategy in ("ddp", "zero1") and plan.layout.dp > 1
        assert -0.1 <= plan.memory.total / real["peak"] - 1 <= (0.15 if counts_more else 0.1), plan.layout
        if "step" in real:
            errors.append(abs(plan.time.total / real["step"]["seconds"] - 1))
    # A single step may meet whatever else the machine does.
    assert sum(error <= 0.25 for error in errors) >= 14
    assert median(errors) <= 0.15


@pytest.fixture(scope="module")
def runs() -> list[Comparison]:
    """Every published run."""
    return [run for _, of_source in compare().values() for run in of_source]


def test_predictions_hold_on_runs_that_the_constants_were_set_without(runs: list[Comparison]) -> None:
    errors = [abs(run.error) for run in runs if run.held_out]

    assert len(errors) > 30
    assert median(errors) < 0.1
    assert sum(error <= 0.25 for error in errors) > 0.8 * len(errors)
    assert max(errors) < 0.4


def test_a_run_that_fits_nowhere_is_the_smallest_and_says_so(runs: list[Comparison]) -> None:
    misfits = [run for run in runs if not run.plan.fits]

    assert f"according to the formulas {len(misfits)} do not" in published_section()
    assert published_section().count(" | no |") == len(misfits)
    for run in misfits:
        if run.row["activation_checkpointing"] is None:
            assert run.plan.layout.activation_checkpointing == "selective"


def test_runs_with_a_choice_of_ours_are_those_whose_source_is_silent(runs: list[Comparison]) -> None:
    chosen = {run.row["name"] for run in runs if run.is_chosen}

    assert {"GPT 1.7B", "GPT 462B"} < chosen
    assert not any(name.startswith(("MPT", "llama")) for name in chosen)


def test_the_speed_of_each_gpu_falls_with_scale_as_it_does_in_published_runs(runs: list[Comparison]) -> None:
    from_128_to_512 = [pair for pair in trends(runs) if pair[1].plan.layout.ranks == 512]

    assert len(from_128_to_512) == 6
    changes = {
        large.row["name"]: (large.measured / small.measured - 1, large.predicted / small.predicted - 1)
        for small, large in from_128_to_512
    }
    # The latency of longer rings explains a fifth of the fall; the page says what is not modelled.
    assert all(measured < simulated < 0 for measured, simulated in changes.values())
    assert changes["MPT-1b"][1] < -0.015


def test_the_states_of_zero_are_those_of_its_figure() -> None:
    rows = [line.split(" | ") for line in states_section().splitlines() if line.startswith("| stage")]

    assert [row[1] for row in rows] == [row[2].removesuffix(".0") for row in rows] == ["120", "31.4", "16.6", "1.9"]
