"""Balance: slower ranks get fewer rows of each global batch, so that all finish a step together.

A step takes as long as its slowest rank. With equal shares, N ranks of speeds s (rows per second)
take batch / (N x min s); with shares proportional to speed, batch / sum s. Each row keeps its
weight in the global mean, so the gradient is the same whichever rank computes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from training.data.batching import DataShard, MicroBatch
from training.distributed.ranks import Ranks

# The first step pays for one-time work. After a few steps the ranks compare speeds, then again now
# and then.
SKIPPED_STEPS = 1
FIRST_LOOK = 4
STEPS_BETWEEN_LOOKS = 20
# A smaller gain is not worth changing shares for: measurements differ by as much.
LEAST_GAIN = 0.05


class Balance:
    """The relative speeds of the data-parallel ranks, the same on all of them.

    ``model`` None keeps all shares equal; ``least_share`` is the slowest rank's, of a global batch.
    """

    def __init__(
        self,
        model: nn.Module | None,
        ranks: Ranks,
        data_shard: DataShard,
        least_share: float,
        say: Callable[[str], None],
    ) -> None:
        self.ranks = ranks
        self.least_share = least_share
        self.say = say
        self.speeds: list[float] | None = None
        self.steps = 0
        self.cells = 0
        # Forward passes are timed instead of steps, because the all-reduce in the backward pass
        # makes all ranks as slow as the slowest.
        self.stopwatch = (
            Stopwatch(model, ranks.device) if model is not None and data_shard.size > 1 else None
        )

    def step_done(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Record what this rank computed; now and then, compute new shares with the other ranks."""
        if self.stopwatch is None:
            return
        self.steps += 1
        self.cells += sum(batch.input_ids.numel() for batch in micro_batches)
        if self.steps == SKIPPED_STEPS:
            self._restart_measurement()
        elif self.steps == FIRST_LOOK or self.steps % STEPS_BETWEEN_LOOKS == 0:
            self.agree(self.cells, self.stopwatch.seconds())
            self._restart_measurement()

    def _restart_measurement(self) -> None:
        self.cells = 0
        self.stopwatch.reset()

    def agree(self, cells: float, seconds: float) -> None:
        """Set ``speeds`` from what each rank has measured since the last comparison.

        New shares are based on each rank's pace at its current share. Once they settle, all ranks
        take the same time, including work that does not depend on rows.

        Args:
            cells: rows times padded length, which is the same on all ranks; of this rank.
            seconds: time in its forward passes.
        """
        # Every rank measures itself; all of them compute the new shares from the same numbers.
        measured = self.ranks.gather((cells, seconds))
        paces = [cells / max(seconds, 1e-9) for cells, seconds in measured]
        # If the work were divided by pace, all ranks would take this long. Only a clear gain is
        # worth a change, because new shares mean new shapes.
        even_time = sum(cells for cells, _ in measured) / sum(paces)
        if max(seconds for _, seconds in measured) * (1 - LEAST_GAIN) <= even_time:
            return
        # A rank gets at least one row per micro-batch, however slow it is: the dummy row that it
        # would compute instead, to take part in the all-reduce, costs as much. What that adds is
        # taken from all in proportion.
        shares = [max(pace / sum(paces), self.least_share) for pace in paces]
        self.speeds = [share / sum(shares) for share in shares]
        self.say(
            f"Balance: the ranks take {', '.join(f'{speed:.0%}' for speed in self.speeds)} of "
            "each global batch."
        )


class Stopwatch:
    """Seconds in a model's forward passes in training; on a GPU by events, without waiting."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.laps: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []
        self._began: float | torch.cuda.Event = 0.0
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def _now(self) -> float | torch.cuda.Event:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, model: nn.Module, arguments: tuple) -> None:
        self._began = self._now()

    def _end(self, model: nn.Module, arguments: tuple, output: torch.Tensor) -> None:
        if model.training:
            self.laps.append((self._began, self._now()))

    def seconds(self) -> float:
        if not self.on_gpu:
            return sum(end - start for start, end in self.laps)
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.laps) / 1000

    def reset(self) -> None:
        self.laps.clear()
