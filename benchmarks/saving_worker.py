"""One rank that saves, blocking and asynchronously by turns: python -m benchmarks.saving_worker FOLDER JSON.

``benchmarks.async_saving`` starts it. The model is DistilBERT with random weights, in training with AdamW under ddp.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, DistilBertConfig

from benchmarks.workload import SEED
from common.model_folder import SavedModel
from training.checkpointing import open_location
from training.checkpointing.saver import Saver
from training.config import TrainConfig
from training.data.batching import MicroBatch, rank_share
from training.data.tokenized import TokenizedRows
from training.model.classifier import NewsClassifier
from training.monitoring import SavedCheckpoint
from training.parallelism.distributed import Ranks, ranks
from training.parallelism.registry import STRATEGIES
from training.parallelism.strategy import Strategy
from training.run.quiet import quiet_libraries
from training.run.step import optimizer_step

LABELS = ["World", "Sports", "Business", "Science"]


def main() -> None:
    """Measure and print the result as one line of JSON."""
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    quiet_libraries()
    config = TrainConfig(seed=SEED, device="cpu", keep_last=1)
    with ranks(config.device) as mine:
        strategy = STRATEGIES[config.strategy](_model(), config, mine, "fp32")
        saver = Saver(config, mine, open_location(str(folder)), print)
        result = measure(strategy, saver, mine, **options)
        saver.close()
    print(json.dumps(result), flush=True)


def measure(
    strategy: Strategy, saver: Saver, mine: Ranks, rounds: int, quiet_steps: int, rows: int, tokens: int
) -> dict[str, Any]:
    """Save both ways in each round, the order changing; returns this rank's seconds."""
    batch = _batch(strategy, rows * mine.world_size, tokens)
    run = _Run(strategy, saver, mine, batch)
    run.step()
    run.save_blocking()  # makes the room for the copies
    kinds: list[Callable[[], None]] = [run.save_blocking, run.save_beside_steps]
    for number in range(rounds):
        for save in kinds[:: 1 if number % 2 == 0 else -1]:
            run.quiet += [run.step() for _ in range(quiet_steps)]
            save()
    blocking = run.blocking[1:]
    return {
        "blocking": [saved.seconds for saved in blocking],
        "blocked": [saved.blocked_seconds for saved in run.beside],
        "seconds": [saved.seconds for saved in run.beside],
        "bytes": blocking[0].num_bytes,
        "quiet": run.quiet,
        "disturbed": run.disturbed,
    }


class _Run:
    """Steps and saves, with how long each took."""

    def __init__(self, strategy: Strategy, saver: Saver, mine: Ranks, batch: list[MicroBatch]) -> None:
        self.strategy, self.saver, self.mine, self.batch = strategy, saver, mine, batch
        self.steps = 0
        self.blocking: list[SavedCheckpoint] = []
        self.beside: list[SavedCheckpoint] = []
        self.quiet: list[float] = []
        self.disturbed: list[float] = []

    def step(self) -> float:
        """One optimizer step; returns its seconds."""
        began = time.perf_counter()
        self.steps += 1
        optimizer_step(self.strategy, self.batch, self.steps, 1e-5)
        self.mine.barrier()
        return time.perf_counter() - began

    def save_blocking(self) -> None:
        """Save, and do nothing until it stands."""
        self._save()
        self.blocking += self.saver.wait()

    def save_beside_steps(self) -> None:
        """Save, and train on until every rank knows that it stands."""
        self._save()
        while self.mine.sum_(torch.tensor(float(self.saver.done))) < self.mine.world_size:
            self.disturbed.append(self.step())
        self.beside += self.saver.collect()

    def _save(self) -> None:
        self.mine.barrier()
        self.saver.save(self.steps, self.strategy.state_dict, {"step": self.steps}, None)


def _model() -> NewsClassifier:
    torch.manual_seed(SEED)
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
    network = AutoModelForSequenceClassification.from_config(DistilBertConfig(**names))
    saved = SavedModel(Path(), network.config.to_dict(), network.state_dict(), "", LABELS, 128, {})
    return NewsClassifier.from_saved(saved)


def _batch(strategy: Strategy, rows: int, tokens: int) -> list[MicroBatch]:
    generator = np.random.default_rng(SEED)
    ids = generator.integers(1000, 30_000, rows * tokens).astype(np.int32)
    everything = TokenizedRows(ids, np.arange(rows + 1) * tokens, np.arange(rows) % len(LABELS), 0)
    return rank_share(everything, np.arange(rows), strategy.place, 1)


if __name__ == "__main__":
    main()
