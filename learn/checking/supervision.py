"""Start the ranks of a check, collect their reports, locate those that hang, end them all."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from common.errors import TrainingFailure
from learn.checking.rank import READY, Report, run_rank
from training.parallelism.distributed import loopback_store

START_SECONDS = 120.0  # for all processes to start and to form a group
ANSWER_SECONDS = 5.0  # for a rank to report where it is
OTHERS_SECONDS = 1.0  # for the other ranks to fail too, once one has


@dataclass
class _Started:
    """A rank's process and the pipe to it."""

    rank: int
    process: BaseProcess
    pipe: Connection

    def receive(self) -> Report:
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            # Its end of the pipe is closed, so the process has ended, or is about to.
            self.process.join(ANSWER_SECONDS)
            return Report("gone", value=self.process.exitcode)

    def ask(self) -> Report:
        """Ask a rank that has not reported where it is."""
        try:
            self.pipe.send_bytes(b"where?")
        except OSError:
            return self.receive()
        return self.receive() if self.pipe.poll(ANSWER_SECONDS) else Report("waits")


def call_on_ranks(world_size: int, path: Path, name: str, seconds: float) -> list[Report]:
    """Call a learner's function on new gloo ranks; returns one report per rank, in order.

    Soon after one has failed, the others are asked where they are, because they may wait for it
    forever. ``seconds`` limits the call, without the start of the processes.

    Raises:
        TrainingFailure: the ranks did not form a group.
    """
    # A server that imports torch once; each rank is a fork of it, with what DDP and optimizers
    # would import as well.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["learn.checking.rank", "torch._dynamo"])
    store = loopback_store()
    started: list[_Started] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, _environment(rank, world_size, store.port), path, name)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            # Only the rank may hold its end: otherwise its death would not close the pipe.
            theirs.close()
            started.append(_Started(rank, process, ours))
        _wait_for_group(started)
        return _reports(started, seconds)
    finally:
        # Killed, because a rank that waits in a collective does not react to anything else.
        for one in started:
            one.process.kill()
            one.process.join()
            one.pipe.close()


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    places = {"RANK": rank, "WORLD_SIZE": world_size}
    places |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RESTART_COUNT": 0}
    # This process holds the store, as torchrun does in a run, so no rank has to guess a free port.
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in (places | shared).items()}


def _wait_for_group(started: Sequence[_Started]) -> None:
    end = time.monotonic() + START_SECONDS
    pending = {one.pipe: one for one in started}
    while pending:
        ready = wait(list(pending), max(0.0, end - time.monotonic()))
        # If the time is up, none is ready, and the first one that is missing is named.
        for pipe in ready or list(pending):
            one, message = pending.pop(pipe), b""
            with suppress(EOFError):
                message = pipe.recv_bytes() if ready else b""
            if message != READY:
                why = message.decode() or "is the machine out of memory?"
                problem = f"rank {one.rank} of {len(started)} did not start"
                raise TrainingFailure(f"{problem}; {why}", code="rank-lost")


def _reports(started: Sequence[_Started], seconds: float) -> list[Report]:
    end = time.monotonic() + seconds
    reports: dict[int, Report] = {}
    pending = {one.pipe: one for one in started}
    while pending and (ready := wait(list(pending), max(0.0, end - time.monotonic()))):
        reports |= {one.rank: one.receive() for one in map(pending.pop, ready)}
        # The others may wait for the one that failed, forever. They get a moment to fail as well,
        # because the first to fail need not be the one that made the mistake.
        if any(report.outcome != "returned" for report in reports.values()):
            end = min(end, time.monotonic() + OTHERS_SECONDS)
    # Whoever has not reported by now hangs, and is asked where.
    reports |= {one.rank: one.ask() for one in pending.values()}
    return [reports[one.rank] for one in started]
