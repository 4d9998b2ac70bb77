"""The optimizer's state is there before the first step, so that what does not fit into memory fails at once."""

from __future__ import annotations

from typing import Any

from benchmarks.scaling import bytes_of_state
from tests.processes import run_on_ranks
from tests.training.parallelism.small_runs import small_strategy, take_steps

LAYOUTS: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "zero1"},
    {"strategy": "zero2"},
    {"strategy": "zero3", "cpu_offload": True},
    {"strategy": "tp"},
    {"strategy": "pp", "gradient_accumulation": 2},
]


def _optimizer_bytes_before_and_after_the_first_step() -> list[tuple[int, int]]:
    found = []
    for fields in LAYOUTS:
        strategy = small_strategy(**fields)
        before = bytes_of_state(strategy)["optimizer"]
        take_steps(strategy, [1], accumulation=fields.get("gradient_accumulation", 1))
        found.append((before, bytes_of_state(strategy)["optimizer"]))
    return found


def test_the_first_step_finds_the_optimizers_state_made() -> None:
    for of_rank in run_on_ranks(2, _optimizer_bytes_before_and_after_the_first_step):
        for fields, (before, after) in zip(LAYOUTS, of_rank, strict=True):
            assert before == after > 0, fields
