"""One rank of a whole training run: python -m benchmarks.training_rank SLOWDOWN FLAGS; run by ``benchmarks.processes``.

The last rank is made SLOWDOWN times slower by real work: it computes each of its rows so many times, forward and
backward, and trains on the first.
"""

from __future__ import annotations

import json
import resource
import sys

import torch
from torch import nn

from training.config import parse_config
from training.monitoring.events import read_metrics
from training.parallelism.distributed import ranks
from training.run.trainer import Trainer


def main() -> None:
    """Train, and print what came of it as one line of JSON."""
    slowdown, config = int(sys.argv[1]), parse_config(sys.argv[2:])
    with ranks(config.device) as mine:
        trainer = Trainer(config, mine)
        if mine.rank == mine.world_size - 1 and slowdown > 1:
            compute_repeatedly(trainer.context.strategy.parts[0], slowdown)
        trainer.fit()
        traffic = trainer.context.strategy.compression.traffic if trainer.context.strategy.compression else None
        gradients = sum(parameter.numel() * 4 for parameter in trainer.context.strategy.parameters.values())
        result = {
            "global_batch": trainer.context.plan.global_batch_size,
            "steps_per_epoch": len(trainer.sampler),
            "rows_per_epoch": len(trainer.context.news.train_index),
            "speeds": trainer.balance.speeds,
            "plain": traffic.uncompressed if traffic else gradients,
            "sent": traffic.sent if traffic else gradients,
            "records": read_metrics(config.run_dir) if mine.is_first else [],
        }
    result["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result["device_bytes"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(json.dumps(result), flush=True)


def compute_repeatedly(model: nn.Module, times: int) -> None:
    """Make a model compute each row of a training batch so many times."""

    def repeat(module: nn.Module, inputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        # There is no attention mask if nothing is padded.
        repeated = tuple(None if tensor is None else tensor.repeat(times, 1) for tensor in inputs)
        return repeated if module.training else inputs

    def keep_first(module: nn.Module, inputs: tuple[torch.Tensor, ...], logits: torch.Tensor) -> torch.Tensor:
        return logits[: len(logits) // times] if module.training else logits

    model.register_forward_pre_hook(repeat)
    model.register_forward_hook(keep_first)


if __name__ == "__main__":
    main()
