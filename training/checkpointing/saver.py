"""Checkpoints that are written in the background.

Training only waits for one copy of what this rank writes. A thread then writes that copy, and
coordinates with the threads of the other ranks over a process group of its own. Read
:meth:`Saver.save`, then :meth:`Saver._write`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import StorageWriter

from common.errors import TrainingFailure
from training.checkpointing.ownership import Ownership
from training.checkpointing.sharded import (
    StagedPlanner,
    Staging,
    error_reason,
    writer_with_clear_errors,
)
from training.checkpointing.storage import Storage
from training.config import TrainConfig
from training.distributed.group import saving_group
from training.distributed.ranks import Ranks
from training.monitoring import SavedCheckpoint
from training.parallelism.state import StrategyState

T = TypeVar("T")
STATE_FILE = "state.json"
MOST_FAILURES = 3  # in a row
RETRY_SECONDS = 60.0
RETRY_SECONDS_AT_REST = 20.0  # if the run does nothing else meanwhile
TICK = 0.2  # seconds between two looks
SECONDS_TO_CLOSE = 60.0
SECONDS_TO_CLOSE_FAILED = 2.0


class SaveFailed(Exception):
    """Why a checkpoint could not be written, the same on all ranks."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")


@dataclass(frozen=True)
class _Order:
    """A checkpoint to write, with staged tensors. ``began``: when the main thread asked for it."""

    step: int
    run_state: dict[str, Any]
    best_step: int | None
    began: float


class Saver:
    """Saves checkpoints, one at a time; all ranks call its methods in the same order."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        storage: Storage,
        say: Callable[[str], None],
        stop_agreed: Callable[[], bool] = lambda: False,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.storage = storage
        self.say = say
        self.stop_agreed = stop_agreed
        self.retry_seconds = retry_seconds
        self.group = saving_group(config.collective_timeout) if ranks.is_distributed else None
        self._ownership, self._staging = Ownership(ranks), Staging()
        self._thread: threading.Thread | None = None
        self._order: _Order | None = None
        self._outcome: SavedCheckpoint | Exception | None = None
        self._blocked = 0.0  # seconds that the main thread has waited for this save
        self.num_failed = 0  # in all
        self._failures, self._failed_at = 0, 0.0  # in a row

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        elif self._thread:
            # The save may be waiting for ranks that wait for this one. The process group goes when
            # the process does.
            self._thread.join(SECONDS_TO_CLOSE_FAILED)

    @property
    def done(self) -> bool:
        """Whether this rank's thread has finished; once all have, :meth:`collect` may be called."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def retry_due(self) -> bool:
        """Whether it is time to retry a failed save; only rank 0's clock counts."""
        return self._pause_is_over(self.retry_seconds)

    def _pause_is_over(self, seconds: float) -> bool:
        waits = self._failures > 0 and self._thread is None
        return self.ranks.is_first and waits and time.monotonic() - self._failed_at >= seconds

    def save(
        self,
        step: int,
        state: Callable[[], StrategyState],
        run_state: dict[str, Any],
        best_step: int | None,
    ) -> list[SavedCheckpoint]:
        """Copy the state and write it in the background.

        A save that is still running is waited for first. So is a failed one, if it holds the best
        weights, since this copy replaces the only one left of them.

        Returns:
            The checkpoints completed since the last call.

        Raises:
            TrainingFailure: saving failed for the third time in a row.
        """
        finished = self._join()
        if self._failures and self._order.step == best_step:
            finished += self.wait()  # only this copy is left of the best weights
        began = time.perf_counter()
        held = state()
        self._staging.take(held.tensors, self._ownership.pieces(held.tensors))
        self._order = _Order(step, run_state | {"strategy": held.plain}, best_step, began)
        self._start()
        self._blocked = time.perf_counter() - began
        return finished

    def wait(self) -> list[SavedCheckpoint]:
        """Wait until the last save is complete, retrying; returns and raises like :meth:`save`."""
        pause = min(self.retry_seconds, RETRY_SECONDS_AT_REST)
        finished = self._join(waits=pause)
        while self._failures:
            began = time.perf_counter()
            # Wait in case it is a short outage; but a scheduler that asks to stop gives half a
            # minute.
            while not (self.ranks.any(self._pause_is_over(pause)) or self.stop_agreed()):
                time.sleep(TICK)
            self.retry()
            self._blocked = time.perf_counter() - began
            finished += self._join(waits=pause)
        return finished

    def release(self) -> None:
        """Free the last save's copies, as large as weights and moments, after :meth:`wait`."""
        self._staging.copies.clear()

    def retry(self) -> None:
        self._blocked = 0.0
        self._start()

    def collect(self, *, waits: float | None = None) -> list[SavedCheckpoint]:
        """Take the outcome, once every rank is :attr:`done`; returns and raises like :meth:`save`.

        ``waits``: seconds until the next try if the run waits for it; None if it keeps training.
        """
        outcome, self._outcome, self._thread = self._outcome, None, None
        if isinstance(outcome, SavedCheckpoint):
            self._failures = 0
            return [replace(outcome, blocked_seconds=self._blocked)]
        # SaveFailed is the same on all ranks, so all may go on together. Anything else is not.
        if not isinstance(outcome, SaveFailed):
            raise outcome
        self.num_failed += 1
        self._failures += 1
        self._failed_at = time.monotonic()
        where = (
            f"the checkpoint of step {self._order.step} could not be written to "
            f"{self.storage.location} ({outcome})"
        )
        if self._failures == MOST_FAILURES:
            raise TrainingFailure(
                f"{where}, {MOST_FAILURES} times in a row; {self._newest()}: free some space or "
                f"fix the storage, then {self.config.how_to_resume}",
                quiet=not self.ranks.is_first,
                code="checkpoint-not-saved",
            )
        attempt = f"attempt {self._failures} of {MOST_FAILURES}"
        if waits is None:
            self.say(f"Training continues, but {where}; {attempt}, the next within a minute")
        else:
            self.say(f"Waiting, because {where}; {attempt}, the next in {waits:.0f} s")
        return []

    def _newest(self) -> str:
        with contextlib.suppress(OSError):
            if steps := self.storage.steps():
                return f"the newest checkpoint is that of step {max(steps)}"
        return "there is no earlier checkpoint"

    def close(self) -> None:
        """Wait for a running save, then destroy the process group."""
        if self._thread:
            self._thread.join(SECONDS_TO_CLOSE)
        if self.group and not (self._thread and self._thread.is_alive()):
            dist.destroy_process_group(self.group)
            self.group = None

    def _join(self, *, waits: float | None = None) -> list[SavedCheckpoint]:
        if not self._thread:
            return []
        began = time.perf_counter()
        self._thread.join()
        self._blocked += time.perf_counter() - began
        return self.collect(waits=waits)

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(self._order,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, order: _Order) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.set_device(self.ranks.device)  # a thread begins on GPU 0
        try:
            num_bytes = self._write(order)
            self._outcome = SavedCheckpoint(
                order.step, 0.0, time.perf_counter() - order.began, num_bytes
            )
        except Exception as error:
            # The half that was written may fill the disk, which the next try needs.
            if isinstance(error, SaveFailed) and self.ranks.is_first:
                with contextlib.suppress(OSError):
                    self.storage.discard(order.step)
            self._outcome = error

    def _write(self, order: _Order) -> int:
        """Write a checkpoint, complete or absent, in a thread of each rank. Returns its bytes."""
        storage, step = self.storage, order.step
        # 1. Rank 0 creates an empty staging place: readers do not see what is in it.
        self._on_first(lambda: storage.begin(step))
        # A list instead of a result, because results are sent to all ranks, and a writer cannot be.
        writers: list[StorageWriter] = []
        self._together(lambda: writers.append(writer_with_clear_errors(storage.writer(step))))
        # 2. Every rank writes its pieces into one file. DCP collects the plans of all ranks first,
        # checks that together they cover every tensor exactly once, and writes that as .metadata.
        try:
            dcp.save(
                {},
                storage_writer=writers[0],
                planner=StagedPlanner(self._staging.copies),
                process_group=self.group,
                no_dist=self.group is None,
            )
        except dcp.CheckpointException as error:
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            raise SaveFailed(rank, error_reason(cause)) from error
        # 3. Every rank syncs and hashes its file, and all hashes reach rank 0.
        files = {
            name: entry
            for part in self._together(lambda: self._files(order))
            for name, entry in part.items()
        }
        # 4. Only now, with all files on disk, rank 0 writes the manifest and renames the folder:
        # the commit. A process that dies before this line leaves no checkpoint; one that dies after
        # it leaves a complete one.
        self._on_first(lambda: storage.commit(step, files))
        # 5. The new checkpoint is safe, so older ones may go.
        self._on_first(
            lambda: storage.prune(self.config.keep_last, self.config.keep_every, order.best_step)
        )
        return sum(entry["bytes"] for entry in files.values())

    def _files(self, order: _Order) -> dict[str, dict[str, Any]]:
        files = self.storage.hashes(order.step, f"__{self.ranks.rank}_")
        if self.ranks.is_first:
            self.storage.write_json(order.step, STATE_FILE, order.run_state)
            for name in (STATE_FILE, ".metadata"):
                files |= self.storage.hashes(order.step, name)
        return files

    def _on_first(self, work: Callable[[], object]) -> None:
        def on_first() -> None:
            if self.ranks.is_first:
                work()

        self._together(on_first)

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on all ranks and return all results; if it fails on any rank, all raise."""
        result, reason = None, None
        try:
            result = work()
        except Exception as error:  # of any kind: the other ranks are waiting for an answer
            reason = error_reason(error)
        answers = [(result, reason)]
        if self.group:
            answers *= self.ranks.world_size
            dist.all_gather_object(answers, (result, reason), group=self.group)
        for rank, (_, text) in enumerate(answers):
            if text is not None:
                raise SaveFailed(rank, text)
        return [result for result, _ in answers]
