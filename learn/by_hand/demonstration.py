"""What the demonstrations share: joining the ranks, and a hint if torchrun is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from common.errors import UserError, run_command
from training.distributed.group import join_ranks
from training.distributed.ranks import Ranks

MAX_RANKS = 16  # a wider table is unreadable


def demonstrate(script: str, show: Callable[[Ranks], None]) -> None:
    """Call ``show`` on every rank that torchrun started, on the CPU, and exit with its code."""

    def main() -> None:
        with join_ranks("cpu") as ranks:
            # One rank has nobody to communicate with, and would show nothing.
            if not 2 <= ranks.world_size <= MAX_RANKS:
                here = f"{script} on {ranks.world_size} rank{'s' * (ranks.world_size > 1)}"
                raise UserError(
                    f"{here}: it shows 2 to {MAX_RANKS}; "
                    f"start it with torchrun --standalone --nproc_per_node=4 {script}",
                    quiet=not ranks.is_first,
                    code="torchrun-needed",
                )
            show(ranks)

    run_command(main)


def largest_gap(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> float:
    """The largest difference between corresponding numbers."""
    return max((one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True))
