"""Functions of the tests on real gloo ranks, without a launcher's seconds for each.

Python's fork server imports torch and transformers once; every rank is a fork of it that never computed before.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from training.parallelism.distributed import Ranks, use_loopback

T = TypeVar("T")
PRELOADED = (
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.bert.modeling_bert",
    "transformers.models.distilbert.modeling_distilbert",
    "transformers.models.llama.modeling_llama",
    "training.run.trainer",
)


class RankFailure(AssertionError):
    """What went wrong on a rank: its traceback, or that it was still at work at the deadline."""


def here(device: str = "cpu") -> Ranks:
    """This process's place among the ranks that :func:`run_on_ranks` started; on ``cuda`` they share the first GPU."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, size, rank, size, torch.device(device, 0 if device == "cuda" else None), "gloo")


def run_on_ranks(world_size: int, function: Callable[..., T], *arguments: Any, seconds: float = 120.0) -> list[T]:
    """Call ``function(*arguments)`` on new gloo ranks, one thread each; returns its results in the order of ranks.

    Args:
        world_size: number of ranks; ``RANK`` and its like are set, and the process group stands.
        function: of a module's top level; what it takes and returns must pickle.
        seconds: after them the ranks are killed.

    Raises:
        RankFailure: a rank raised (the first to do so is quoted), ended without a word, or is late.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], {}
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            place = (rank, world_size, str(Path(folder) / "rendezvous"), seconds)
            ranks.append(context.Process(target=_rank, args=(sender, place, function, arguments), daemon=True))
            ranks[-1].start()
            sender.close()
            pipes[receiver] = rank
        try:
            return _results(pipes, time.monotonic() + seconds)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(
    sender: Connection, place: tuple[int, int, str, float], function: Callable[..., Any], arguments: tuple
) -> None:
    rank, world_size, rendezvous, seconds = place
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    try:
        use_loopback()
        store = f"file://{rendezvous}"
        dist.init_process_group("gloo", store, timedelta(seconds), world_size=world_size, rank=rank)
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    # By value: a tensor sent as shared memory is gone once its process is.
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    # The others may still be in a collective: stay until all have answered and the caller ends this process.
    time.sleep(seconds)


def _results(pipes: dict[Connection, int], end: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for pipe, rank in pipes.items() if rank not in results]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {sorted(pipes[pipe] for pipe in waiting)} are still at work at the deadline")
        for pipe in ready:
            rank = pipes[pipe]
            try:
                succeeded, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankFailure(f"rank {rank} ended without a word") from None
            if not succeeded:
                raise RankFailure(f"rank {rank}:\n{answer}")
            results[rank] = answer
    return [results[rank] for rank in sorted(results)]
