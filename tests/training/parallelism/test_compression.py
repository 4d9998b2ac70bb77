"""Compressed gradients: close to the mean, counted to the byte, and with nothing lost on the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.processes import here, run_on_ranks
from tests.training.parallelism.saved_states import WholeState, whole_state
from tests.training.parallelism.small_runs import small_strategy, take_steps, whole_weights
from training.parallelism.compression import PLAIN_STEPS, Compression, PowerSGD, build_compression
from training.parallelism.state import StrategyState

Gradients = dict[str, torch.Tensor]


def _replica(bucket_mb: float = 25.0) -> DistributedDataParallel:
    """Three layers, the same weights on all ranks, with the buckets in their final order."""
    torch.manual_seed(0)
    layers = [nn.Linear(96, 80), nn.Tanh(), nn.Linear(80, 96), nn.Tanh(), nn.Linear(96, 4)]
    replica = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    replica(torch.zeros(1, 96)).sum().backward()
    return replica


def _rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(1000 * step + rank))


def _gradients(replica: DistributedDataParallel, step: int, scale: float = 1.0) -> Gradients:
    """The averaged gradients of a step, in the units of an unscaled loss."""
    replica.zero_grad()
    (replica(_rows(step, dist.get_rank())).square().mean() * scale).backward()
    return {name: p.grad / scale for name, p in replica.module.named_parameters()}


def _attached(asked: str, **options: Any) -> tuple[DistributedDataParallel, Compression]:
    compression = build_compression(asked)
    replica = _replica(**options)
    compression.attach(replica)
    compression.begin_step(None)
    return replica, compression


def _past_plain_steps(replica: DistributedDataParallel, first: int = 0) -> None:
    for step in range(first, PLAIN_STEPS):
        _gradients(replica, step)


def _both(asked: str) -> tuple[Gradients, Gradients]:
    plain = _gradients(_replica(), 1)
    return plain, _gradients(_attached(asked)[0], 1)


@pytest.mark.parametrize(("asked", "bits"), [("fp16", 10), ("bf16", 7)])
def test_a_cast_gradient_is_the_mean_to_the_precision_of_its_dtype(asked: str, bits: int) -> None:
    for plain, compressed in run_on_ranks(2, _both, asked):
        for name, gradient in plain.items():
            error = (compressed[name] - gradient).abs().max()
            assert 0 < error < gradient.abs().max() * 2.0**-bits


def _beside_torchs(steps: int) -> list[tuple[Gradients, Gradients]]:
    ours, theirs = PowerSGD(2), PowerSGDState(None, 2, start_powerSGD_iter=PLAIN_STEPS, orthogonalization_epsilon=1e-9)
    replica, other = _replica(), _replica()
    ours.attach(replica)
    other.register_comm_hook(theirs, powerSGD_hook)
    _past_plain_steps(replica)
    _past_plain_steps(other)
    queries = [torch.randn(96, 2), torch.randn(80, 2)]
    ours.queries = {"0.weight": queries[0], "2.weight": queries[1]}
    # Its one bucket holds the parameters in the order in which their gradients come.
    theirs.q_memory_dict[0] = torch.cat([queries[1].flatten(), queries[0].flatten()])
    theirs.p_memory_dict[0] = torch.empty(2 * (80 + 96))
    return [(_gradients(replica, step), _gradients(other, step)) for step in range(PLAIN_STEPS, PLAIN_STEPS + steps)]


def test_powersgd_from_the_same_start_is_that_of_torch() -> None:
    for steps in run_on_ranks(2, _beside_torchs, 4):
        for ours, theirs in steps:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-7)


def _applied_and_owed(steps: int) -> tuple[Gradients, Gradients, Gradients]:
    replica, compression = _attached("powersgd:2")
    _past_plain_steps(replica)
    numbers = range(PLAIN_STEPS, PLAIN_STEPS + steps)
    applied = [_gradients(replica, step) for step in numbers]
    plain = _replica()
    meant = [_gradients(plain, step) for step in numbers]
    owed = {name: error.clone() for name, error in compression.errors.items()}
    for error in owed.values():
        dist.all_reduce(error.div_(dist.get_world_size()))
    return _total(applied), owed, _total(meant)


def _total(steps: list[Gradients]) -> Gradients:
    return {name: sum(gradients[name] for gradients in steps) for name in steps[0]}


def test_what_powersgd_leaves_out_is_kept_for_later() -> None:
    for applied, owed, meant in run_on_ranks(2, _applied_and_owed, 5):
        assert owed.keys() == {"0.weight", "2.weight"}
        for name, gradient in meant.items():
            torch.testing.assert_close(applied[name] + owed.get(name, 0), gradient, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(applied["0.weight"], meant["0.weight"], rtol=1e-2)


def _on_many_buckets(steps: int) -> tuple[int, Gradients]:
    replica, _ = _attached("powersgd:2", bucket_mb=0.01)
    for step in range(PLAIN_STEPS + steps):
        gradients = _gradients(replica, step)
    return len(replica.reducer._get_zeros_like_grad_buckets()), gradients


def test_ranks_with_many_buckets_agree_to_the_bit() -> None:
    (buckets, first), *others = run_on_ranks(3, _on_many_buckets, 10)

    assert buckets > 1
    for _, gradients in others:
        assert all(torch.equal(gradients[name], first[name]) for name in first)


def _sent_and_counted(asked: str) -> tuple[int, int, int]:
    replica, compression = _attached(asked)
    _past_plain_steps(replica)
    sent, all_reduce = [], dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counting
    _gradients(replica, PLAIN_STEPS)
    dist.all_reduce = all_reduce
    return sum(sent), compression.traffic.sent, compression.traffic.uncompressed


@pytest.mark.parametrize("asked", ["fp16", pytest.param("bf16", marks=pytest.mark.slow), "powersgd"])
def test_bytes_are_counted_as_they_are_sent(asked: str) -> None:
    numbers = 2 * 80 * 96 + 80 + 96 + 4 * 96 + 4
    for sent, counted, plain in run_on_ranks(2, _sent_and_counted, asked):
        assert counted == sent
        assert plain == 4 * numbers
        assert sent == {"powersgd": 4 * (numbers - 2 * 80 * 96 + 2 * 4 * (80 + 96))}.get(asked, 2 * numbers)


def _in_two_halves(asked: str) -> tuple[Gradients, Gradients]:
    at_once, _ = _attached(asked)
    halved, _ = _attached(asked)
    for step in range(PLAIN_STEPS + 3):
        whole = _gradients(at_once, step)
        halved.zero_grad()
        rows = _rows(step, dist.get_rank())
        with halved.no_sync():
            (halved(rows[:3]).square().sum() / 32).backward()
        (halved(rows[3:]).square().sum() / 32).backward()
    return whole, {name: p.grad for name, p in halved.module.named_parameters()}


@pytest.mark.parametrize("asked", ["fp16", pytest.param("bf16", marks=pytest.mark.slow), "powersgd"])
def test_accumulated_gradients_are_compressed_once_and_whole(asked: str) -> None:
    tolerance = {"powersgd": 1e-3, "fp16": 2e-3, "bf16": 2e-2}[asked]
    for whole, halved in run_on_ranks(2, _in_two_halves, asked):
        torch.testing.assert_close(halved, whole, rtol=tolerance, atol=1e-6)


def _under_a_changing_scale() -> tuple[Gradients, Gradients]:
    plain, _ = _attached("powersgd:2")
    scaled, compression = _attached("powersgd:2")
    for step in range(PLAIN_STEPS + 4):
        expected = _gradients(plain, step)
        if step == PLAIN_STEPS + 2:
            compression.begin_step(2.0**14)
            _gradients(scaled, 999, scale=float("inf"))
            compression.end_step(torch.tensor(False))
        scale = 2.0 ** (14 if step < PLAIN_STEPS + 2 else 13)
        compression.begin_step(scale)
        found = _gradients(scaled, step, scale)
    return expected, found


def test_powersgd_does_not_feel_the_loss_scale_nor_a_step_that_the_scaler_skips() -> None:
    for expected, found in run_on_ranks(2, _under_a_changing_scale):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)


def _state_after(steps: int) -> StrategyState:
    replica, compression = _attached("powersgd:2")
    for step in range(steps):
        _gradients(replica, step)
    return compression.state_dict(here())


def _after_resuming(state: WholeState, steps: int) -> tuple[Gradients, Gradients]:
    resumed, compression = _attached("powersgd:2")
    compression.load_state_dict(state, here())
    errors = dict(compression.errors)
    for step in range(PLAIN_STEPS + 2, PLAIN_STEPS + 2 + steps):
        gradients = _gradients(resumed, step)
    return errors, gradients


def _uninterrupted(steps: int) -> Gradients:
    replica, _ = _attached("powersgd:2")
    for step in range(PLAIN_STEPS + 2 + steps):
        gradients = _gradients(replica, step)
    return gradients


def test_state_resumes_bitwise_on_as_many_ranks_and_as_the_mean_on_fewer() -> None:
    states = run_on_ranks(2, _state_after, PLAIN_STEPS + 2)
    state = WholeState(states[0].tensors | states[1].tensors, states[0].plain)

    straight = run_on_ranks(2, _uninterrupted, 2)[0]
    _, gradients = run_on_ranks(2, _after_resuming, state, 2)[0]
    [(errors, _)] = run_on_ranks(1, _after_resuming, state, 1)

    assert state.plain["powersgd"]["steps"] == PLAIN_STEPS + 2
    assert errors
    assert all(torch.equal(gradients[name], straight[name]) for name in straight)
    both = [state.part(f"compression/errors/{rank}/") for rank in range(2)]
    torch.testing.assert_close(errors, {name: (both[0][name] + both[1][name]) / 2 for name in both[0]})


def _run_in_parts(name: str, compress: str, parts: list[range]) -> tuple[list[float], Gradients | None]:
    """Each part of the steps in a strategy of its own, which goes on from the state of the one before."""
    losses, state = [], None
    for numbers in parts:
        strategy = small_strategy(strategy=name, compress=compress)
        if state:
            strategy.load_state_dict(state)
        losses += take_steps(strategy, numbers)
        state = whole_state(strategy, here())
    return losses, whole_weights(strategy)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compress"), [("ddp", "powersgd:2"), ("zero1", "powersgd:2"), ("ddp", "bf16")])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(name: str, compress: str) -> None:
    last = PLAIN_STEPS + 6
    whole = run_on_ranks(2, _run_in_parts, name, compress, [range(1, last)])
    for cut in (5, PLAIN_STEPS + 3):
        parts = run_on_ranks(2, _run_in_parts, name, compress, [range(1, cut), range(cut, last)])

        assert [losses for losses, _ in parts] == [losses for losses, _ in whole]
        assert all(torch.equal(parts[0][1][name], weights) for name, weights in whole[0][1].items())


def _with_an_overflow() -> tuple[bool, bool, float, float]:
    strategy = small_strategy("fp16", compress="powersgd:2")
    take_steps(strategy, range(1, PLAIN_STEPS + 3))
    before = dict(strategy.compression.errors)
    strategy.loss_scale.scale = 2.0**120
    take_steps(strategy, [PLAIN_STEPS + 3])
    skipped = strategy.loss_scale.scale == 2.0**119
    kept = all(torch.equal(error, before[name]) for name, error in strategy.compression.errors.items())
    largest = max(error.abs().max().item() for error in before.values())
    strategy.loss_scale.scale = 2.0**10
    take_steps(strategy, [PLAIN_STEPS + 4])
    return skipped, kept, largest, max(error.abs().max().item() for error in strategy.compression.errors.values())


def test_under_fp16_a_skipped_step_leaves_the_errors_and_a_new_scale_does_not_change_their_size() -> None:
    for skipped, kept, before, after in run_on_ranks(2, _with_an_overflow):
        assert skipped
        assert kept
        assert before / 10 < after < before * 10


@pytest.mark.slow
def test_a_killed_run_with_powersgd_ends_with_the_weights_of_one_never_killed(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    flags = ("--batch_size", 4, "--save_every", 2, "--compress", "powersgd:2", "--output_dir")
    killed = launch(2, *flags, tmp_path / "killed", wait=False)
    killed.wait_until(lambda: list((tmp_path / "killed.run" / "checkpoints").glob("step_0000001[24]")))
    killed.kill()

    again, straight = launch(2, *flags, tmp_path / "killed"), launch(2, *flags, tmp_path / "straight")

    assert "Resuming from" in again.out, again.err
    assert "x less" in straight.out, straight.err
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "straight")]
    assert weights[0] == weights[1]
