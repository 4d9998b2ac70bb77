"""Stages on real ranks, in every schedule, compute what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError
from tests.processes import here
from tests.training.parallelism.small_models import LABELS, VOCABULARY, small_batch, small_model
from training.config import TrainConfig
from training.data.batching import MicroBatch
from training.parallelism import pipeline
from training.parallelism.pipeline import Pipeline, check_pipeline
from training.parallelism.schedules import SCHEDULES, order_of_actions, stages_of
from training.parallelism.stages import split_stages
from training.tasks import Classification

SEED = 11
# Padded lengths of the steps: one comes twice in a row, and one again after another.
LENGTHS = (16, 24, 24, 16)
ROWS = 3
Found = dict[str, Any]


def _micro_batches(step: int, count: int) -> list[MicroBatch]:
    """Rows of all lengths; the last is a stand-in of weight 0."""
    generator = torch.Generator().manual_seed(step)
    length, batches = LENGTHS[step], []
    for number in range(count):
        lengths = torch.randint(3, length + 1, (ROWS, 1), generator=generator)
        mask = (torch.arange(length) < lengths).long()
        ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
        labels = torch.randint(len(LABELS), (ROWS,), generator=generator)
        weights = torch.full((ROWS,), 1 / (ROWS * count - 1))
        if number == count - 1:
            weights[-1] = 0
        batches.append(MicroBatch(ids, mask, labels, weights, np.arange(ROWS), number * ROWS, int(mask.sum())))
    return batches


def _loss(logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    task = Classification(LABELS)
    losses = task.row_losses(logits, batch.labels, label_smoothing=0.1)
    return (losses * batch.weights).sum(), losses, task.label_logprobs(logits.detach(), batch.labels)


def _collect(parts: list[nn.Module], losses: list[list[torch.Tensor]], logits: torch.Tensor) -> Found:
    gradients = {name: parameter.grad for part in parts for name, parameter in part.named_parameters()}
    return {"losses": torch.stack([torch.cat(rows) for rows in losses]), "gradients": gradients, "logits": logits}


def _alone(family: str, count: int) -> Found:
    model = small_model(family, dropout=0.1, layers=count)
    losses = []
    for step in range(len(LENGTHS)):
        losses.append([])
        for batch in _micro_batches(step, count):
            model.seed_dropout(SEED, step, batch.first_row)
            share, rows, _ = _loss(model(batch.input_ids, batch.attention_mask), batch)
            share.backward()
            losses[-1].append(rows.detach())
    model.eval()
    with torch.no_grad():
        return _collect([model], losses, model(*small_batch()[:2]))


def _piped(family: str, count: int, schedule: str) -> Found:
    """Gradients of several steps add up, so that each counts; an evaluation lies between the first two."""
    ranks = here()
    indices = stages_of(schedule, ranks.rank, ranks.world_size)
    model = small_model(family, dropout=0.1, layers=count)
    stages = split_stages(model, indices, len(indices) * ranks.world_size, "--pp")
    pipe = Pipeline(stages, dist.group.WORLD, schedule, _loss)
    losses, built = [], []
    make = pipeline.get_schedule_class
    pipeline.get_schedule_class = lambda name: built.append(name) or make(name)
    for step in range(len(LENGTHS)):
        losses.append(pipe.run(_micro_batches(step, count), SEED, step, "fp32")[0])
        for stage in stages:
            stage.eval()
        with torch.no_grad():
            logits = pipe.logits(*small_batch()[:2], "fp32", lambda scores: scores, num_scores=3)
        for stage in stages:
            stage.train()
    pipeline.get_schedule_class = make
    sizes = {buffer.numel() for buffer in pipe._buffers.values()}
    return {**_collect(stages, losses, logits), "built": len(built), "sizes": sizes}


def _all_schedules(family: str, count: int) -> dict[str, Found]:
    return {schedule: _piped(family, count, schedule) for schedule in SCHEDULES}


def _distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    difference = nn.utils.get_total_norm([found[name] - expected[name] for name in expected])
    return (difference / nn.utils.get_total_norm(expected.values())).item()


@pytest.mark.parametrize(
    ("world_size", "family"),
    [
        (2, "distilbert"),
        pytest.param(2, "llama", marks=pytest.mark.slow),
        pytest.param(4, "distilbert", marks=pytest.mark.slow),
        pytest.param(4, "bert", marks=pytest.mark.slow),
        pytest.param(4, "llama", marks=pytest.mark.slow),
    ],
)
def test_every_schedule_gives_the_losses_and_gradients_of_one_process(
    run_on_ranks: Callable[..., list[Any]], world_size: int, family: str
) -> None:
    count = 2 * world_size  # micro-batches, and blocks
    expected = _alone(family, count)

    on_ranks = run_on_ranks(world_size, _all_schedules, family, count, seconds=300.0)

    for schedule in SCHEDULES:
        found = [of_rank[schedule] for of_rank in on_ranks]
        speaks = [bool(rank["losses"].any()) for rank in found]
        last = SCHEDULES[schedule].stages_per_rank * world_size - 1
        assert speaks == [last in stages_of(schedule, rank, world_size) for rank in range(world_size)]
        torch.testing.assert_close(sum(rank["losses"] for rank in found), expected["losses"], rtol=1e-6, atol=1e-6)
        gradients = {name: gradient for rank in found for name, gradient in rank["gradients"].items()}
        assert gradients.keys() == expected["gradients"].keys()
        assert _distance(gradients, expected["gradients"]) < 1e-6
        for rank in found:
            assert rank["built"] == len(set(LENGTHS))
            assert rank["sizes"] == {ROWS * max(LENGTHS) * 32}  # shared by all lengths
            torch.testing.assert_close(rank["logits"], expected["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_takes_its_micro_batches_in_their_order(schedule: str) -> None:
    # What a Stage relies on to know the dropout of the micro-batch that comes.
    for actions in order_of_actions(schedule, 4, 8):
        for stage in {action.stage for action in actions}:
            forward = [a.micro_batch for a in actions if a.stage == stage and a.kind == "F"]
            assert forward == list(range(8))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"gradient_accumulation": 3}, r"^--gradient_accumulation 3: the 1f1b schedule over 4 ranks needs at least 4"),
        ({"gradient_accumulation": 9, "pp_schedule": "interleaved"}, r"^--gradient_accumulation 9: .* a multiple of 4"),
        ({"gradient_accumulation": 8, "pp_schedule": "zbv", "compile": True}, r"^--compile and --pp_schedule zbv: "),
        (
            {"gradient_accumulation": 8, "pp_schedule": "zero_bubble", "activation_checkpointing": "selective"},
            r"^--activation_checkpointing selective and --pp_schedule zero_bubble: .*use full",
        ),
    ],
)
def test_flags_that_do_not_go_with_the_schedule_are_refused_in_one_line(fields: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        check_pipeline(TrainConfig(strategy="pp", **fields), num_ranks=4)
