"""A few optimizer steps of a strategy on this rank's rows, without a Trainer's seconds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.processes import here
from tests.training.parallelism.small_models import LABELS, VOCABULARY, small_model
from training.config import TrainConfig
from training.data.batching import micro_batches_of_rank
from training.data.tokenized import TokenizedRows
from training.distributed.ranks import Ranks
from training.parallelism.registry import STRATEGIES
from training.parallelism.strategy import Strategy
from training.run.step import optimizer_step

GLOBAL_BATCH = 12


def small_rows(count: int = 30) -> TokenizedRows:
    """Rows of 3 to 20 tokens: with batches of 12 the last one is smaller than the others."""
    generator = np.random.default_rng(5)
    offsets = np.concatenate([[0], np.cumsum(generator.integers(3, 21, count))])
    ids = generator.integers(1, VOCABULARY, offsets[-1]).astype(np.int32)
    return TokenizedRows(ids, offsets, np.arange(count) % len(LABELS), 0)


def small_strategy(precision: str = "fp32", **fields: Any) -> Strategy:
    """A small DistilBERT with dropout, laid over the ranks that are here."""
    config = TrainConfig(deterministic=True, **fields)
    return STRATEGIES[config.strategy](small_model("distilbert", dropout=0.1), config, here(), precision)


def take_steps(
    strategy: Strategy,
    numbers: Sequence[int],
    *,
    accumulation: int = 1,
    speeds: Sequence[float] | None = None,
    ranks: Ranks | None = None,
    norms: list[torch.Tensor] | None = None,
    rows: TokenizedRows | None = None,
) -> list[float]:
    """Optimizer steps by their numbers; returns the global loss of each, and adds each gradient norm to ``norms``."""
    rows, losses = rows or small_rows(), []
    ranks = ranks or here()
    for number in numbers:
        batch = np.roll(np.arange(len(rows)), -number * GLOBAL_BATCH)[: GLOBAL_BATCH - number % 3]
        share = micro_batches_of_rank(rows, batch, strategy.data_shard, accumulation, speeds=speeds)
        moved = [strategy.to_device(micro_batch) for micro_batch in share]
        result = optimizer_step(strategy, moved, number, learning_rate=1e-3)
        losses.append(ranks.sum_(result.loss.clone()).item())
        if norms is not None:
            norms.append(result.grad_norm)
    return losses


def whole_weights(strategy: Strategy) -> dict[str, torch.Tensor]:
    """A copy of the whole weights; None in their places on all ranks but 0."""
    return copy.deepcopy(strategy.full_weights())
