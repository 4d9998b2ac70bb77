"""Matrices split over real ranks compute what one process computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import get_total_norm
from transformers import DistilBertForSequenceClassification

from common.errors import UserError
from common.model_folder import SavedModel
from tests.processes import here
from tests.training.parallelism.small_models import FAMILIES, LABELS, small_batch, small_config, small_model
from tests.training.parallelism.small_runs import small_strategy
from training.config import TrainConfig
from training.model.classifier import NewsClassifier
from training.model.optimizer import build_optimizer
from training.parallelism.activation_checkpointing import apply_activation_checkpointing
from training.parallelism.blocks import apply_to_blocks
from training.parallelism.fsdp import apply_fsdp
from training.parallelism.gradients import global_norm, reduce_partial_gradients
from training.parallelism.stages import Stage, split_stages
from training.parallelism.tensor_parallel import apply_tensor_parallel

DROPOUT = 0.1
STEPS = 3
SEED, FIRST_ROW = 11, 4  # the rows' position in the dropout stream
# Llama's norms and rotations compute in fp32 whatever the type of the weights.
TOLERANCE = {"distilbert": 1e-8, "bert": 1e-8, "llama": 1e-6}
Found = dict[str, Any]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _backward(model: NewsClassifier, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask, labels = small_batch()
    model.seed_dropout(SEED, step, FIRST_ROW)
    logits = model(ids, mask)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    reduce_partial_gradients(model.parameters())
    return logits.detach(), loss.detach()


def _train(model: NewsClassifier) -> tuple[Found, list[float]]:
    """Logits, loss and gradients of the first step and the weights after the last, unsharded; each step's norm."""
    optimizer = build_optimizer(model, dict(model.named_parameters()), TrainConfig())
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    found: Found = {}
    norms = []
    for step in range(STEPS):
        logits, loss = _backward(model, step)
        norms.append(global_norm(model.parameters()).item())
        if step == 0:
            gradients = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}
            found = {"logits": logits, "loss": loss, "gradients": gradients}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found["evaluated"] = model(*small_batch()[:2])
    weights = {name: _whole(weight.detach()) for name, weight in model.named_parameters()}
    return {**found, "weights": weights}, norms


def _split(family: str, *, sequence_parallel: bool, mesh: DeviceMesh | None = None) -> NewsClassifier:
    model = small_model(family, DROPOUT, torch.float64)
    mesh = mesh or init_device_mesh("cpu", (here().world_size,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)
    return model


def _train_all() -> dict[tuple[str, bool], Any]:
    """For each family and layout: the results of one process, and of the ranks."""
    found = {}
    for family in FAMILIES:
        alone = _train(small_model(family, DROPOUT, torch.float64))
        for sequence_parallel in (False, True):
            together = _train(_split(family, sequence_parallel=sequence_parallel))
            found[family, sequence_parallel] = alone, together
    return found


@pytest.fixture(scope="module")
def trained_on(run_on_ranks: Callable[..., list[Any]]) -> Callable[[int], list[Any]]:
    """`trained_on(world_size)`: the results of each rank, computed once."""
    return cache(lambda world_size: run_on_ranks(world_size, _train_all))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_with_dropout_equals_one_process(
    trained_on: Callable[[int], list[Any]], world_size: int, family: str, sequence_parallel: bool
) -> None:
    for found in trained_on(world_size):
        (alone, norms_alone), (together, norms) = found[family, sequence_parallel]
        torch.testing.assert_close(together, alone, rtol=TOLERANCE[family], atol=TOLERANCE[family])
        torch.testing.assert_close(norms, norms_alone, rtol=1e-6, atol=0)


def _train_as_on_gpus() -> tuple[list[Any], int]:
    """One process and both layouts, with the dropout stream of GPUs; and the seed of attention."""
    found = []
    for sequence_parallel in (None, False, True):
        if sequence_parallel is None:
            model = small_model("distilbert", DROPOUT, torch.float64)
        else:
            model = _split("distilbert", sequence_parallel=sequence_parallel)
        model.dropout_stream.draws = model.dropout_stream.device_draws
        found.append(_train(model))
    strategy = small_strategy(strategy="tp")
    strategy.parts[0].seed_dropout(SEED, 1, FIRST_ROW)
    return found, torch.initial_seed()


@pytest.mark.slow
def test_on_gpus_ranks_drop_the_values_of_one_process_except_in_attention(
    run_on_ranks: Callable[..., list[Any]],
) -> None:
    ranks = run_on_ranks(2, _train_as_on_gpus)

    for (alone, *cut), _ in ranks:
        for together in cut:
            torch.testing.assert_close(together[0], alone[0], rtol=1e-8, atol=1e-8)
    # Fused attention kernels draw from torch's generator: ranks have different heads, so they need different masks.
    assert len({seed for _, seed in ranks}) == 2


def _calls_of_a_block() -> dict[tuple[str, bool], tuple[dict[str, int], dict[str, int]]]:
    """The number of collectives in the first block, forward and backward."""
    found = {}
    for family, sequence_parallel in itertools.product(FAMILIES, (False, True)):
        model = _split(family, sequence_parallel=sequence_parallel)
        length = 16 // here().world_size if sequence_parallel else 16
        hidden = torch.randn(4, length, 32, dtype=torch.float64, requires_grad=True)
        context = model.architecture.context(model.network, hidden, small_batch()[1])
        with CommDebugMode() as forward:
            total = model.blocks[0](hidden, **context).sum()
        with CommDebugMode() as backward:
            total.backward()
        found[family, sequence_parallel] = _by_name(forward), _by_name(backward)
    return found


def _by_name(calls: CommDebugMode) -> dict[str, int]:
    return {str(call).rpartition(".")[2]: count for call, count in calls.get_comm_counts().items()}


def test_a_block_has_two_collectives_forward_and_two_backward(
    run_on_ranks: Callable[..., list[Any]],
) -> None:
    (found, _) = run_on_ranks(2, _calls_of_a_block)

    for family in FAMILIES:
        assert found[family, False] == ({"all_reduce": 2}, {"all_reduce": 2})
        both = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
        assert found[family, True] == (both, both)


def _shares() -> dict[str, tuple[bool, float]]:
    """For each parameter: whether it is a DTensor, and the share of it that this rank has."""
    whole = dict(small_model("llama").named_parameters())
    cut = _split("llama", sequence_parallel=False).named_parameters()
    return {name: (isinstance(share, DTensor), share.to_local().numel() / whole[name].numel()) for name, share in cut}


def test_every_matrix_of_a_block_is_split_and_every_parameter_is_on_one_mesh(
    run_on_ranks: Callable[..., list[Any]],
) -> None:
    shares = run_on_ranks(4, _shares)[0]

    assert all(is_dtensor for is_dtensor, _ in shares.values())
    matrices = [share for name, (_, share) in shares.items() if ".layers." in name and "norm" not in name]
    assert matrices == [0.25] * (3 * 7)
    assert shares["network.model.embed_tokens.weight"][1] == pytest.approx(0.25, abs=0.01)


def _refusals() -> list[str]:
    refusals = []
    for family in (*FAMILIES, "roberta"):
        with pytest.raises(UserError) as refused:
            _split(family, sequence_parallel=False)
        refusals.append(str(refused.value))
    return refusals


def test_a_degree_that_does_not_fit_is_refused_with_those_that_do(run_on_ranks: Callable[..., list[Any]]) -> None:
    refusals = run_on_ranks(3, _refusals)[0]

    assert refusals == [
        "--tp 3: 4 attention heads cannot be split evenly; use one of 1, 2, 4",
        "--tp 3: 4 attention heads cannot be split evenly; use one of 1, 2, 4",
        "--tp 3: 8 attention heads cannot be split evenly; use one of 1, 2, 4",
        "--tp 3: RobertaForSequenceClassification cannot be split (only DistilBERT, BERT and Llama can); "
        "use --strategy zero3, which shards any network",
    ]


def _gradients_in_fp32(stages: Sequence[Stage]) -> dict[str, torch.Tensor]:
    ids, mask, labels = small_batch()
    states = ids
    for stage in stages:
        stage.positions = iter([(SEED, 0, FIRST_ROW)])
        states = stage(states, mask)
    F.cross_entropy(states, labels).backward()
    parameters = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    reduce_partial_gradients(parameters.values())
    return {name: _whole(parameter.grad) for name, parameter in parameters.items()}


def _errors_in_fp32() -> dict[str, float]:
    """The distance of all gradients from those of one process in fp64, relative to their norm."""
    mesh = init_device_mesh("cpu", (here().world_size,), mesh_dim_names=("tp",))
    errors = {}
    for family in FAMILIES:
        exact = small_model(family, DROPOUT, torch.float64)
        _backward(exact, step=0)
        alone = {name: parameter.grad for name, parameter in exact.named_parameters()}
        for num_stages, sequence_parallel in itertools.product((1, 2), (False, True)):
            stages = split_stages(small_model(family, DROPOUT), range(num_stages), num_stages, "")
            for stage in stages:
                apply_tensor_parallel(stage, mesh, sequence_parallel=sequence_parallel)
            together = _gradients_in_fp32(stages)
            difference = get_total_norm([together.pop(name) - gradient for name, gradient in alone.items()])
            assert not together
            name = f"{family} in {num_stages}{' along the sequence' * sequence_parallel}"
            errors[name] = (difference / get_total_norm(alone.values())).item()
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_fp32_gradients_are_within_a_millionth_also_with_pipeline_stages(
    run_on_ranks: Callable[..., list[Any]], world_size: int
) -> None:
    for errors in run_on_ranks(world_size, _errors_in_fp32):
        assert len(errors) == 12
        assert {name: error for name, error in errors.items() if not error < 1e-6} == {}


def _refusal_with_three_heads() -> str:
    config = small_config("distilbert")
    config.n_heads = 3
    config.dim, config.hidden_dim = 24, 48
    network = DistilBertForSequenceClassification(config)
    saved = SavedModel(Path(), config.to_dict(), network.state_dict(), "", LABELS, 40, {})
    with pytest.raises(UserError) as refused:
        apply_tensor_parallel(NewsClassifier.from_saved(saved), init_device_mesh("cpu", (3,)), sequence_parallel=True)
    return str(refused.value)


def test_sequence_parallel_ranks_that_do_not_divide_the_lengths_are_refused(
    run_on_ranks: Callable[..., list[Any]],
) -> None:
    assert run_on_ranks(3, _refusal_with_three_heads)[0] == (
        "--sequence_parallel with --tp 3: lengths are multiples of 16, which are not divisible by 3 ranks; "
        "leave it out, or use a power of 2"
    )


def _logits_compiled(family: str, sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Of one process, and of compiled blocks that are split over the ranks; and the number of graphs."""
    ids, mask, _ = small_batch()
    model = _split(family, sequence_parallel=sequence_parallel)
    compile_block = nn.Module.compile
    # Splitting could break tracing, not code generation, which would take minutes.
    nn.Module.compile = lambda block, **how: compile_block(block, **how, backend="aot_eager")
    apply_to_blocks(model, TrainConfig(compile=True), model.dropout_stream)
    alone, together = small_model(family, DROPOUT, torch.float64).eval()(ids, mask), model.eval()(ids, mask)
    together.sum().backward()
    return alone.detach(), together.detach(), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_compiled_after_tensor_parallelism_compute_the_same(
    run_on_ranks: Callable[..., list[Any]], family: str, sequence_parallel: bool
) -> None:
    for alone, together, num_graphs in run_on_ranks(2, _logits_compiled, family, sequence_parallel):
        torch.testing.assert_close(together, alone, rtol=TOLERANCE[family], atol=TOLERANCE[family])
        assert num_graphs > 0


def _train_wrapped(family: str, sequence_parallel: bool) -> list[tuple[Found, list[float]]]:
    """One process; and two tensor-parallel pairs, checkpointed and sharded, which see the same rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = _split(family, sequence_parallel=sequence_parallel, mesh=mesh["tp"])
    for block in model.blocks:
        apply_activation_checkpointing(block, "full", model.dropout_stream)
    apply_fsdp(model, model.blocks, mesh["dp_shard"], reshard_after_forward=True)
    return [_train(small_model(family, DROPOUT, torch.float64)), _train(model)]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_and_sharding_afterwards_change_nothing(
    run_on_ranks: Callable[..., list[Any]], family: str, sequence_parallel: bool
) -> None:
    for (alone, norms_alone), (together, norms) in run_on_ranks(4, _train_wrapped, family, sequence_parallel):
        # FSDP sums gradients in fp32, whatever their dtype.
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(norms, norms_alone, rtol=1e-6, atol=0)
