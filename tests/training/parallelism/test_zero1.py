"""ZeRO stage 1: the same training as with the whole optimizer on every rank, in a part of its memory."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.processes import here, run_on_ranks
from tests.training.parallelism.saved_states import WholeState, whole_state
from tests.training.parallelism.small_models import small_model
from tests.training.parallelism.small_runs import small_strategy, take_steps, whole_weights
from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.parallelism.registry import STRATEGIES

Weights = dict[str, torch.Tensor]


def _trained(name: str, accumulation: int) -> tuple[list[float], Weights]:
    strategy = small_strategy(strategy=name)
    return take_steps(strategy, range(1, 6), accumulation=accumulation), whole_weights(strategy)


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_losses_and_weights_are_those_of_ddp(world_size: int, accumulation: int) -> None:
    expected, weights = run_on_ranks(world_size, _trained, "ddp", accumulation)[0]

    losses, found = run_on_ranks(world_size, _trained, "zero1", accumulation)[0]

    assert losses == expected
    torch.testing.assert_close(found, weights, rtol=0, atol=0)


def _two_steps() -> tuple[int, list[int], int]:
    """Numbers in this rank's moments, in those of each parameter, and the broadcasts that a step makes."""
    strategy = small_strategy(strategy="zero1")
    take_steps(strategy, [1])
    with CommDebugMode() as calls:
        take_steps(strategy, [2])
    held = sum(state["exp_avg"].numel() * 2 for state in strategy.local_optimizer.state.values())
    sizes = [2 * parameter.numel() for parameter in strategy.parameters.values()]
    return held, sizes, calls.get_comm_counts()[torch.ops.c10d.broadcast_]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_keeps_its_share_of_the_moments_and_sends_what_it_updated_in_one_broadcast(world_size: int) -> None:
    found = run_on_ranks(world_size, _two_steps)

    assert sum(held for held, _, _ in found) == sum(found[0][1])
    for held, sizes, broadcasts in found:
        assert len(sizes) > 20
        assert held <= sum(sizes) / world_size + max(sizes) / 2
        assert broadcasts == world_size  # one for each rank


def _first_half() -> WholeState:
    strategy = small_strategy(strategy="zero1")
    take_steps(strategy, range(1, 4))
    return whole_state(strategy, here())


def _second_half(state: WholeState) -> tuple[list[float], Weights]:
    strategy = small_strategy(strategy="zero1")
    strategy.load_state_dict(state)
    return take_steps(strategy, range(4, 6)), whole_weights(strategy)


@pytest.mark.slow
def test_a_checkpoint_resumes_on_another_number_of_ranks() -> None:
    losses, weights = run_on_ranks(2, _trained, "zero1", 1)[0]

    state = run_on_ranks(2, _first_half)[0]
    rest, found = run_on_ranks(3, _second_half, state)[0]

    assert rest == pytest.approx(losses[3:], rel=1e-5)
    # A key's bias has no gradient but rounding, which AdamW makes steps of.
    same = [name for name in weights if not name.endswith("k_lin.bias")]
    torch.testing.assert_close([found[name] for name in same], [weights[name] for name in same], rtol=1e-4, atol=1e-6)


def test_one_process_without_a_group_keeps_everything() -> None:
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
    states = {}
    for name in ("zero1", "ddp"):
        strategy = STRATEGIES[name](small_model("distilbert"), TrainConfig(strategy=name), alone, "fp32")
        take_steps(strategy, [1, 2], ranks=alone)
        states[name] = strategy.state_dict().tensors

    torch.testing.assert_close(states["zero1"], states["ddp"], rtol=0, atol=0)
