"""Starts the ranks of a check, hears what became of them, asks those that hang where they stand, and ends them all."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch.distributed as dist

from training.by_hand.checking.rank import READY, Report, run_rank
from training.errors import TrainingFailure

START_SECONDS = 120.0
ANSWER_SECONDS = 5.0


def call_on_ranks(world_size: int, path: Path, name: str, seconds: float) -> dict[int, Report]:
    """Call a learner's function on new gloo ranks; returns what became of each, the first to tell first.

    As soon as one has failed, the others are asked where they stand: they may wait for it for ever.

    Args:
        world_size: number of ranks.
        path: the learner's file, absolute.
        name: of the function.
        seconds: for the call; the start of the processes does not count.

    Raises:
        TrainingFailure: the ranks did not form a group.
    """
    context = multiprocessing.get_context("forkserver")  # imports torch once; each rank is a fork of it
    context.set_forkserver_preload(["training.by_hand.checking.rank"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], {}
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, _environment(rank, world_size, store.port), path, name)
            processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes[ours] = rank
        _wait_for_group(pipes)
        return _reports(pipes, seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    places = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    # The store is this process's, as it is torchrun's in a run: no rank needs a port that was free a moment ago.
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in (places | shared | {"TORCHELASTIC_RESTART_COUNT": 0}).items()}


def _wait_for_group(pipes: Mapping[Connection, int]) -> None:
    end = time.monotonic() + START_SECONDS
    for pipe, rank in pipes.items():
        try:
            formed = pipe.poll(max(0.0, end - time.monotonic())) and pipe.recv_bytes() == READY
        except EOFError:
            formed = False
        if not formed:
            raise TrainingFailure(f"rank {rank} of {len(pipes)} did not start within {START_SECONDS:.0f} s; try again")


def _reports(pipes: Mapping[Connection, int], seconds: float) -> dict[int, Report]:
    end = time.monotonic() + seconds
    reports: dict[int, Report] = {}
    pending = dict(pipes)
    while pending and all(report.outcome == "returned" for report in reports.values()):
        ready = wait(list(pending), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            reports[pending.pop(pipe)] = _receive(pipe)
    return reports | {rank: _ask(pipe) for pipe, rank in pending.items()}


def _receive(pipe: Connection) -> Report:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return Report("gone")


def _ask(pipe: Connection) -> Report:
    try:
        pipe.send_bytes(b"where?")
    except OSError:
        return Report("gone")
    return _receive(pipe) if pipe.poll(ANSWER_SECONDS) else Report("waits")
