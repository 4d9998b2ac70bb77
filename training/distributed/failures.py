"""Failures during a step that a user can act on, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.errors import LostRank, TrainingFailure, in_one_line
from training.distributed.ranks import Ranks, is_lost_rank


@contextmanager
def translate_errors(ranks: Ranks, step: int, shape: torch.Size | None = None) -> Iterator[None]:
    """Turn known errors of a step into a :class:`TrainingFailure`.

    ``shape``: of its micro-batches, (rows, tokens).
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(ranks, step, shape) from error
    except ValueError as error:
        # Like the allocation error below, this one has no class of its own, so its words decide.
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise TrainingFailure(
            f"step {step}: BatchNorm cannot train on a single row, which is all that rank "
            f"{ranks.rank} has in a micro-batch; raise --batch_size, or use a norm that does not "
            "look across rows, such as LayerNorm",
            code="own-code",
        ) from error
    except RuntimeError as error:
        # What the allocator of the CPU raises; torch.OutOfMemoryError is that of an accelerator.
        if "can't allocate memory" in str(error):
            raise _out_of_memory(ranks, step, shape) from error
        if is_lost_rank(error):
            raise LostRank(
                f"rank {ranks.rank}: another rank went away at step {step}. The last checkpoint is "
                f"safe: to resume, rerun the same command. PyTorch's own error: "
                f"{in_one_line(error)}"
            ) from error
        raise


def _out_of_memory(ranks: Ranks, step: int, shape: torch.Size | None) -> TrainingFailure:
    size = f" with a micro-batch of {shape[0]} rows of {shape[1]} tokens" if shape else ""
    return TrainingFailure(
        f"rank {ranks.rank}: out of memory at step {step}{size}; lower --batch_size and raise "
        "--gradient_accumulation by the same factor, or use --activation_checkpointing full or "
        "--strategy zero3",
        code="out-of-memory",
    )
