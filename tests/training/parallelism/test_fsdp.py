"""What a rank holds when the state is shared out."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.scaling import bytes_of_state
from tests.processes import here, run_on_ranks
from tests.training.parallelism.cases import Case
from tests.training.parallelism.small_runs import take_steps


def _held(case: Case, accumulation: int) -> tuple[dict[str, int], int]:
    """Bytes of state as the optimizer steps, and the most bytes of gradients as a micro-batch ends."""
    strategy = case.strategy(here(), **case.fields)
    held: dict[str, int] = {}
    between: list[int] = []
    strategy.optimizer.register_step_pre_hook(lambda *_: held.update(bytes_of_state(strategy)))
    part = strategy.parts[0]  # its forward pass begins when the gradients of the micro-batch before are done
    part.register_forward_pre_hook(lambda *_: between.append(bytes_of_state(strategy)["gradients"]))
    take_steps(strategy, [1, 2], accumulation=accumulation)
    return held, max(between)


def _both(fields: dict[str, Any], accumulation: int) -> tuple[float, float]:
    """The share of DDP's bytes that a rank holds: of all state, and of gradients between micro-batches."""
    shared, between = _held(Case(4, fields), accumulation)
    whole, _ = _held(Case(4, {}), accumulation)
    return sum(shared.values()) / sum(whole.values()), between / whole["gradients"]


@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_on_four_ranks_each_holds_less_than_30_percent_of_the_state(strategy: str) -> None:
    for share, between in run_on_ranks(4, _both, {"strategy": strategy}, 2):
        assert share < 0.3
        # In their shards already: whole ones would be where no parameter's gradient is looked for.
        assert 0.2 < between < 0.3
