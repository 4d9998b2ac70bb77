"""Runs a pipeline card by card, and its training loop for every global batch of every epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.errors import ForeseenError, TrainingFailure, first_line
from learn.cards.pipeline import Node, Pipeline
from learn.cards.storage import Storage
from learn.cards.workers import Job, LocalWorkers, RayWorkers, Workers, keep_traceback


@dataclass(frozen=True)
class Event:
    node: str
    state: Literal["running", "done", "failed"]
    epoch: int = 0  # from 1, of a card of the training loop; else 0
    batch: int = 0
    is_last_batch: bool = False  # of the epoch
    seconds: float = 0.0  # that the card took; of one of the loop, all its passes so far
    metrics: dict[str, float] = field(default_factory=dict)
    message: str = ""  # why it failed


class Runner:
    """One run of a pipeline; a context manager, after which no process is left.

    Values are kept in a subfolder of ``folder`` with the pipeline's name; the first step removes an
    earlier run's. ``cluster``: the address of a Ray cluster whose machines run the ranks; None for
    this machine.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        folder: Path,
        on_event: Callable[[Event], None] = lambda event: None,
        cluster: str | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._cluster = cluster
        self.storage = Storage(folder / pipeline.name)
        self.on_event = on_event
        # By node, one per rank; a local card has one.
        self.outputs: dict[str, list[dict[str, Any]]] = {}
        self.seconds: dict[str, float] = {}
        # By node, the epoch and batch whose values are in the storage; (0, 0) outside the training
        # loop.
        self.recorded: dict[str, tuple[int, int]] = {}
        self._num_workers = num_workers(pipeline)
        self.passes_done = 0  # of the training loop
        self._next = 0  # position in pipeline.nodes
        self._workers: Workers | None = None

    @property
    def next_node(self) -> Node | None:
        return self.pipeline.nodes[self._next] if self._next < len(self.pipeline.nodes) else None

    @property
    def total_passes(self) -> int:
        """Passes of the training loop over all epochs; 0 before the rows are sharded."""
        return num_epochs(self.pipeline) * self._batches_per_epoch

    @property
    def _batches_per_epoch(self) -> int:
        shard = self.pipeline.of_type("dist_shard_data")
        outputs = self.outputs.get(shard.id) if shard else None
        return outputs[0]["sharded_data"]["batches_per_epoch"] if outputs else 0

    def step(self) -> bool:
        """Run and record the next card; returns whether there was one."""
        return self._step(recording=True)

    def run(self) -> None:
        """Run all remaining cards; the first and last pass of the training loop are recorded."""
        while self._step(recording=self.passes_done in (0, self.total_passes - 1)):
            pass

    def close(self) -> None:
        """Also from another thread than the one that runs."""
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self, *, recording: bool) -> bool:
        node = self.next_node
        if node is None:
            return False
        place = self._place(node)
        # A card outside the loop runs only once. In the loop there are many passes, of which a few
        # are enough to look at.
        recording = recording or not node.in_loop
        self.on_event(Event(node.id, "running", *place, self.seconds.get(node.id, 0.0)))
        start = time.monotonic()
        try:
            metrics = self._run_card(node, recording=recording)
        except ForeseenError as error:
            self.on_event(Event(node.id, "failed", *place, message=str(error)))
            raise
        self.seconds[node.id] = self.seconds.get(node.id, 0.0) + time.monotonic() - start
        if recording:
            self.recorded[node.id] = place[:2]
        self.on_event(Event(node.id, "done", *place, self.seconds[node.id], metrics))
        return True

    def _run_card(self, node: Node, *, recording: bool) -> dict[str, float]:
        try:
            # Only now: a run that is never started must not delete the one before it.
            if not self.outputs:
                self.storage.begin_run()
            self.outputs[node.id] = self._execute(node, recording=recording)
            metrics = node.card.metrics(self.outputs[node.id][0])
            self._advance(node)
            return metrics
        except ForeseenError:
            raise
        except Exception as error:
            # From a local card or this program; those of ranks arrive as foreseen errors.
            what = f"{type(error).__name__}: {first_line(error)}"
            message = f"{what}{keep_traceback(self.storage.at(node.id))}"
            raise TrainingFailure(
                f"card {node.card.card_type} (node {node.id}): {message}", code="card-failed"
            ) from error

    def _place(self, node: Node) -> tuple[int, int, bool]:
        """Epoch and batch of a card of the loop, from 1, and whether it is the epoch's last."""
        if not node.in_loop:
            return 0, 0, False
        # Without shards there are no batches to repeat the loop for; then it has one pass.
        batches_per_epoch = self._batches_per_epoch or 1
        epoch, batch = divmod(self.passes_done, batches_per_epoch)
        return epoch + 1, batch + 1, batch + 1 == batches_per_epoch

    def _advance(self, node: Node) -> None:
        """Move to the next node; from the loop's last to its first, until all passes are done."""
        self._next += 1
        loop = self.pipeline.loop
        if not loop or node != loop[-1]:
            return
        self.passes_done += 1
        # What the first pass left would be overwritten by the next one, and the page compares both.
        if self.passes_done == 1:
            for member in loop:
                self.storage.at(member.id).keep_first_pass()
        if self.passes_done < self.total_passes:
            self._next -= len(loop)

    def _execute(self, node: Node, *, recording: bool) -> list[dict[str, Any]]:
        if node.card.execution_mode == "local":
            storage = self.storage.at(node.id)
            outputs = node.card.run(node.config, self._inputs(node, 0), storage)
            storage.save("outputs", outputs)
            return [outputs]
        # Started with the first distributed card, and kept: the model and the optimizer are in
        # their memory from card to card.
        if self._workers is None:
            self._workers = (
                LocalWorkers(self._num_workers, self.storage.folder)
                if self._cluster is None
                else RayWorkers(self._num_workers, self.storage.folder, self._cluster)
            )
        card = (node.card.card_type, node.id, node.config.model_dump())
        inputs = [self._inputs(node, rank) for rank in range(self._num_workers)]
        return self._workers.run([Job(*card, values, recording) for values in inputs])

    def _inputs(self, node: Node, rank: int) -> dict[str, Any]:
        # A rank takes its own output of a distributed card, or the only one of a local card.
        values = {}
        for name, source in node.inputs.items():
            outputs = self.outputs[source.node]
            values[name] = outputs[rank if len(outputs) > 1 else 0][source.output]
        return values


def num_epochs(pipeline: Pipeline) -> int:
    """Training ends with the epoch that is saved."""
    save = pipeline.of_type("dist_save_checkpoint")
    return 1 if save is None else save.config.epoch


def num_workers(pipeline: Pipeline) -> int:
    shard = pipeline.of_type("dist_shard_data")
    return 1 if shard is None else shard.config.num_workers
