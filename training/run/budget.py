"""``--budget 10m``: a run that ends when it was asked to, having used the time as well as it could.

Nobody knows beforehand how many steps fit into ten minutes, so nothing is decided once and for all.
The first thing the run measures is how fast it answers rows, because at the end it has to answer
all test rows, and write everything: that time is set aside. The rest is for steps. After every step
rank 0 counts how many more of them fit, at the pace of the last ones, and tells the others; the
learning rate is a function of the step and that number, so it reaches zero at the deadline whether
the machine is fast or slow (budgeted training: Li et al., arXiv 1905.04753). Weights at a rate of
zero are the best ones, so epochs in between are not validated, only the end is.

The time of a run that was stopped and resumed is that of all its processes, not what passed between
them.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import UserError
from training.config import TrainConfig
from training.data.prepare import PreparedData
from training.data.tokenized import TokenizedRows
from training.distributed.ranks import Ranks
from training.evaluation.baseline import seconds_for_baseline
from training.evaluation.evaluator import ModelOnRanks, evaluate
from training.facts import STRATEGY_FACTS, TINY
from training.model.classifier import NewsClassifier, to_fp32
from training.model.layers import FAMILY_OF, freeze_layers
from training.model.precision import autocast
from training.monitoring.events import process_started
from training.monitoring.records import format_percent, format_time
from training.parallelism.strategy import Strategy
from training.run.recipe import rate_for
from training.run.suspects import ask_words

# Set aside for the end, beside the answers to the test rows and the linear baseline: the plots of
# the report and the end of the processes; the files, each weight being written about five times
# (checkpoint with moments, folder, one file); and what may go wrong.
CLOSING_SECONDS = 2.5
BYTES_PER_WEIGHT, BYTES_PER_SECOND = 20, 2e8
MARGIN = 0.01
# The pace of a step is that of the last so many of them.
STEPS_REMEMBERED = 200
# Times the work of the forward pass; a guess until the first steps are done.
FORWARD_AND_BACKWARD = 3
ROWS_TIMED = 512  # per rank, in the first seconds
# Of the time of a step, when nothing but these two has been timed; the rest is the optimizer and
# the exchange of gradients.
SHARE_OF_FORWARD_AND_BACKWARD = 0.85
# Where so few rows fit, half of the blocks are frozen, of encoders that have so many.
FEW_ROWS, LEAST_BLOCKS = 5_000, 4
FEW_PASSES = 1.5  # with fewer over the rows, there is no dropout
# From so many on, the rate is multiplied by the second, and by the third from each block to the one
# below.
SEVERAL_PASSES, GENTLER_RATE, GENTLER_DECAY = 2.0, 0.5, 0.9
# The flags that `settle_learning` chooses.
_LEARNING = ("learning_rate", "layer_decay", "dropout", "freeze")
# Texts are cut where so many of their tokens are before the cut.
TOKENS_KEPT = 0.95
SHORTEST = 32
MOST_TOKENS_CUT = 2**27  # more are left in their file, in which they were cut at --max_length
# The words of so many rows tell how hard the labels are; that takes a second.
ROWS_READ = 10_000


class Budget:
    """The clock of a run with ``--budget``.

    Args:
        seconds: that the run may take in all.
        since_start: seconds that this process and its launcher have taken so far.
        saved: what :meth:`to_plain` said when the run was saved, if it is resumed.
    """

    def __init__(self, seconds: float, since_start: float, saved: Mapping[str, float]) -> None:
        self.seconds = seconds
        self.spent_before = saved.get("spent", 0.0)
        self.seconds_per_token = saved.get("seconds_per_token", 0.0)
        self.tokens_timed = 0.0  # up to which the pace is a mean
        self.closing = 0.0
        self.began = time.monotonic() - since_start

    @property
    def spent(self) -> float:
        return self.spent_before + time.monotonic() - self.began

    @property
    def left_for_steps(self) -> float:
        return self.seconds - self.spent - self.closing

    def to_plain(self) -> dict[str, float]:
        return {"spent": self.spent, "seconds_per_token": self.seconds_per_token}

    def observe(self, tokens: float, seconds: float, tokens_per_step: float) -> None:
        """Take what the last steps took. At first the pace is the mean of all steps, then that of the last ones."""
        if not tokens:
            return
        self.tokens_timed = min(self.tokens_timed + tokens, STEPS_REMEMBERED * tokens_per_step)
        share = tokens / self.tokens_timed
        self.seconds_per_token += min(1.0, share) * (seconds / tokens - self.seconds_per_token)

    def steps_left(self, tokens_per_step: float) -> int:
        """How many more steps fit."""
        return max(0, math.floor(self.left_for_steps / (self.seconds_per_token * tokens_per_step)))


def _seconds_since_start(ranks: Ranks) -> float:
    """Of a command, since its launcher began, or since this process began if the launcher repeats
    an attempt; of :func:`training.train`, which a notebook may call an hour after its start, since
    the call.
    """
    command = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
    launcher = os.getppid() if ranks.is_distributed and not ranks.restart else "self"
    began = process_started(launcher) if command in ("train_ddp", "train_single") else math.nan
    return time.time() - (began if math.isfinite(began) else ranks.milestones["imported"])


def settle_flags(
    config: TrainConfig, data: PreparedData, earlier: Mapping[str, Any]
) -> tuple[TrainConfig, PreparedData]:
    """Choose what ``--budget`` leaves open about the rows: where texts are cut. The same on every rank."""
    if (
        not config.budget
        or "max_length" in config.model_fields_set
        or not _can_be_cut(config, data)
    ):
        return config, data
    length = (
        earlier["config"]["max_length"]
        if earlier
        else _length_that_holds(data.tokens.train, config.max_length)
    )
    if length >= config.max_length:
        return config, data
    if data.tokenizer is not None:
        data.tokenizer.model_max_length = length
    return config.model_copy(update={"max_length": length}), data.cut(length)


def _can_be_cut(config: TrainConfig, data: PreparedData) -> bool:
    plain = not (config.columns.pair or config.is_language_model or config.long == "windows")
    return plain and len(data.tokens.train.ids) <= MOST_TOKENS_CUT


def _length_that_holds(rows: TokenizedRows, longest: int) -> int:
    lengths = rows.lengths
    for length in range(SHORTEST, longest, 16):
        if np.minimum(lengths, length).sum() >= TOKENS_KEPT * lengths.sum():
            return length
    return longest


def settle_learning(
    config: TrainConfig,
    model: NewsClassifier,
    ranks: Ranks,
    data: PreparedData,
    precision: str,
    earlier: Mapping[str, Any],
) -> TrainConfig:
    """Choose what ``--budget`` leaves open about how rows are learned; a collective call.

    Few steps want a higher learning rate than the default, and narrow encoders higher ones still.
    The rest goes by how many rows fit, where that can be timed before the model is distributed:

    - About one pass over the rows cannot learn them by heart, and needs no dropout.
    - In several passes a pre-trained encoder loses less of what it knows at half of that rate, with
      lower blocks
      slower than upper ones: MiniLM had 93.5 and 93.7% right after three passes, not 93.25%, and no
          more after one.
    - If only few rows fit, the lower half of the encoder is frozen: steps then take little more
      than half the time, and
      lower layers learn little from few rows anyway. In a minute and a half MiniLM became as good
      by 7,500 rows with half of it frozen as by 4,500 without, or a little better.

    ``benchmarks/budget.py`` compares such choices.
    """
    if not config.budget:
        return config
    # The windows of a text are several inputs, whose number and length one mean does not tell.
    is_plain = not (config.is_language_model or config.lora or config.long == "windows")
    can_be_timed = (
        is_plain and STRATEGY_FACTS[config.strategy].copies and ranks.device.type == "cpu"
    )
    if earlier:
        # A checkpoint of an older version does not know all flags; that run did as the default
        # does.
        chosen = {name: earlier["config"].get(name, getattr(config, name)) for name in _LEARNING}
    else:
        chosen = {"learning_rate": rate_for(config, model)}
        if can_be_timed:
            per_row = (
                _seconds_per_row(model, data.tokens.train, precision, ranks) / ranks.world_size
            )
            testing = per_row * len(data.tokens.test) / FORWARD_AND_BACKWARD
            left = config.budget_seconds - _seconds_since_start(ranks) - CLOSING_SECONDS - testing
            rows = SHARE_OF_FORWARD_AND_BACKWARD * left / per_row
            chosen |= _learning_of(rows, len(data.train_index), model, chosen["learning_rate"])
        # Each rank has timed itself while the others did the same, but frozen blocks and rates must
        # be those of all: rank 0's count.
        chosen = ranks.broadcast(chosen)
    chosen = {name: value for name, value in chosen.items() if not config.gives(name)}
    config = config.model_copy(update=chosen)
    if not config.lora:
        freeze_layers(model.network, config)
    if chosen.get("dropout") is not None:
        model.set_dropout(chosen["dropout"])
    return config


def _learning_of(rows: float, of_rows: int, model: NewsClassifier, rate: float) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    has_known_layers = type(model.network).__name__ in FAMILY_OF
    if rows < FEW_PASSES * of_rows:
        chosen["dropout"] = 0.0
    if rows >= SEVERAL_PASSES * of_rows and has_known_layers:
        chosen |= {"learning_rate": GENTLER_RATE * rate, "layer_decay": GENTLER_DECAY}
    if (
        has_known_layers
        and rows < FEW_ROWS
        and (blocks := model.network.config.num_hidden_layers) >= LEAST_BLOCKS
    ):
        chosen["freeze"] = str(blocks // 2)
    return chosen


def _seconds_per_row(
    model: NewsClassifier, rows: TokenizedRows, precision: str, ranks: Ranks
) -> float:
    """Of a forward and a backward pass on this rank, while the others do the same."""
    length = max(8, round(float(rows.lengths.mean())))
    some = rows.ids[: min(16, len(rows.ids) // length) * length].astype(np.int64)
    ids = torch.from_numpy(some).view(-1, length)  # any tokens take as long
    seconds = math.inf
    to_fp32(model)  # as ddp and zero1 would
    with torch.random.fork_rng([]):
        # The faster of two: the first pass also starts threads and allocates memory. Any loss will
        # do, since nothing is learned from it.
        for _ in range(2):
            began = time.perf_counter()
            with autocast(precision, ranks.device):
                scores = model(ids, None)
            scores.float().square().mean().backward()
            seconds = min(seconds, time.perf_counter() - began)
    model.zero_grad(set_to_none=True)
    return seconds / len(ids)


def start_budget(
    config: TrainConfig,
    strategy: Strategy,
    ranks: Ranks,
    data: PreparedData,
    earlier: Mapping[str, Any],
) -> Budget | None:
    """Measure how long the end will take; a collective call. None without ``--budget``.

    Raises:
        UserError: nothing would be left for a single step.
    """
    if not config.budget:
        return None
    budget = Budget(config.budget_seconds, _seconds_since_start(ranks), earlier.get("budget") or {})
    per_token = _seconds_per_token(strategy, data)
    validation = data.validation_rows.lengths[data.validation_index]
    weights = sum(parameter.numel() for parameter in strategy.parameters.values())
    budget.closing = (
        CLOSING_SECONDS
        + weights * BYTES_PER_WEIGHT / BYTES_PER_SECOND
        + per_token * float(data.tokens.test.lengths.sum() + validation.sum())
        + MARGIN * budget.seconds
        + (seconds_for_baseline(config, data) if strategy.task.has_labels else 0.0)
    )
    budget.seconds_per_token = budget.seconds_per_token or FORWARD_AND_BACKWARD * per_token
    # Rank 0's clock decides, so that either all ranks raise or none does. A resumed run without any
    # time left is no error: it tests and writes what it has.
    left = ranks.broadcast(budget.left_for_steps)
    if left <= 0 and not earlier:
        needed = budget.spent + budget.closing
        raise UserError(
            f"--budget {config.budget}: the start took {format_time(budget.spent)} and the test "
            "rows need "
            f"{format_time(budget.closing)}, so nothing is left to train in; give at least "
            f"{math.ceil(1.5 * needed)}s",
            quiet=not ranks.is_first,
            code="budget-too-short",
        )
    return budget


def _seconds_per_token(strategy: Strategy, data: PreparedData) -> float:
    """That all ranks together need for a token of the test rows. What they answer is thrown away."""
    rows, size = data.tokens.test, strategy.data_shard.size
    # Every so many of the batches that the test will have: rows drawn one by one would share
    # batches with longer ones.
    batch = np.arange(len(rows)) // strategy.task.rows_at_once
    every = max(1, len(rows) // (ROWS_TIMED * size))
    some = np.argsort(rows.lengths, kind="stable")[batch % every == every // 2]
    answer = partial(evaluate, ModelOnRanks.of_run(strategy, strategy.test_precision), rows)
    answer(np.sort(some[: len(some) // 8 + 1]))  # threads start, memory is allocated
    began = time.perf_counter()
    answer(np.sort(some))
    return (time.perf_counter() - began) / float(rows.lengths[some].sum())


@dataclass(frozen=True)
class Expectation:
    """What accuracy a run of so many rows can be expected to reach, a range that 9 of 10 runs should end in."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{format_percent(self.low)} to {format_percent(self.high)}"


# Times the errors of the words: the range of fine-tuned encoders, from a small one after part of an
# epoch to a good one after several. With ten times the rows the words make a fifth fewer errors.
BEST, WORST = 0.65, 1.05
PER_ROWS = -0.1


def expect_accuracy(config: TrainConfig, data: PreparedData, rows_seen: int) -> Expectation | None:
    """Guess from the words of the training rows; None if that cannot be told, as for a network from
    scratch.

    Naive Bayes needs no training and knows how hard the labels are to tell apart. How many of its
    errors remain is what a fine-tuned encoder is good for, and that differs less between data sets
    than the errors do.
    """
    if (
        not config.task_facts.has_one_label
        or config.columns.pair
        or config.model == TINY
        or config.network
        or not rows_seen
    ):
        return None
    index = data.labelled_index
    some = np.sort(
        np.random.default_rng(config.seed).permutation(index)[: min(ROWS_READ, rows_seen)]
    )
    rows = data.tokens.train
    wrong = (
        ask_words(rows, some, len(data.tokens.label_names)).argmax(axis=1) != rows.labels[some]
    ).mean()
    expected = float(wrong) * (min(rows_seen, len(index)) / len(some)) ** PER_ROWS
    # Of the test rows.
    chance = 1.3 * math.sqrt(max(expected * (1 - expected), 1e-6) / len(data.tokens.test))
    return Expectation(
        max(0.0, 1 - WORST * expected - chance), min(1.0, 1 - BEST * expected + chance)
    )
