"""Failures of a step that a person can act on, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from training.distributed import Ranks
from training.errors import TrainingFailure

# What gloo and NCCL say when a connection ends.
LOST_RANK = ("Connection closed by peer", "Connection reset", "gloo", "NCCL")


@contextmanager
def explained(ranks: Ranks, step: int, shape: torch.Size | None = None) -> Iterator[None]:
    """Turn what a step can run into into a :class:`TrainingFailure`.

    Args:
        ranks: this process's place.
        step: the optimizer step under way.
        shape: of its micro-batches, (rows, tokens).
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(ranks, step, shape) from error
    except RuntimeError as error:
        text = str(error)
        if "can't allocate memory" in text:
            raise _out_of_memory(ranks, step, shape) from error
        if any(sign in text for sign in LOST_RANK):
            raise TrainingFailure(
                f"rank {ranks.rank}: another rank went away at step {step}; its own error says why. "
                "The last checkpoint stays: start the same command again to go on"
            ) from error
        raise


def _out_of_memory(ranks: Ranks, step: int, shape: torch.Size | None) -> TrainingFailure:
    size = f" with a micro-batch of {shape[0]} rows of {shape[1]} tokens" if shape else ""
    return TrainingFailure(
        f"rank {ranks.rank}: out of memory at step {step}{size}; lower --batch_size and raise "
        "--gradient_accumulation by the same factor, or use --activation_checkpointing full or --strategy zero3"
    )
