"""Ranks that stay: processes of this machine which one parent starts, asks and ends.

The cards, the checkers of the lessons and the tests all run on them. They find each other as under
torchrun, by its environment variables.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from training.distributed.group import loopback_store, use_loopback

END_SECONDS = 5.0  # for a process whose pipe is closed to be gone


@dataclass(frozen=True)
class Ended:
    """In place of a message: the rank's process is gone."""

    exit_code: int | None


class RankPool:
    """Ranks that all run ``work(pipe, *arguments)``; a context manager, after which none is left.

    ``work`` is a function of a module's top level. It talks to the parent through its end of the
    pipe, by :func:`send` and :func:`receive`, and its process stays when it returns.
    """

    def __init__(self, count: int, work: Callable[..., None], *arguments: Any) -> None:
        context = get_context("forkserver")
        # A fork of a server that has imported torch starts fast, and does not inherit this
        # program's open files. Every optimizer would import torch._dynamo.
        context.set_forkserver_preload([work.__module__, "torch._dynamo"])
        _start_fork_server()
        # Kept: the store goes with the last reference to it, and the ranks meet in it whenever they
        # form a group.
        self._store = loopback_store()
        self._processes, self._pipes = [], []
        for rank in range(count):
            own_end, child_end = context.Pipe()
            place = (child_end, environment(rank, count, self._store.port), work, arguments)
            process = context.Process(target=_run, args=place, name=f"rank {rank}", daemon=True)
            process.start()
            # Only the rank may hold its end: otherwise its death would not close the pipe.
            child_end.close()
            self._processes.append(process)
            self._pipes.append(own_end)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, rank: int, message: Any) -> None:
        """Send a rank something. If it is gone, only its next message says so: :class:`Ended`."""
        with suppress(ConnectionError):
            send(self._pipes[rank], message)

    def messages(self, ranks: Iterable[int], seconds: float | None) -> dict[int, Any]:
        """One message of each of these ranks that has one; waits for a first, up to ``seconds``."""
        by_pipe = {self._pipes[rank]: rank for rank in ranks}
        return {by_pipe[pipe]: self._message(by_pipe[pipe]) for pipe in wait(by_pipe, seconds)}

    def _message(self, rank: int) -> Any:
        try:
            return receive(self._pipes[rank])
        except (EOFError, ConnectionError):
            # Its end of the pipe is closed: the process has ended, or is about to.
            self._processes[rank].join(END_SECONDS)
            return Ended(self._processes[rank].exitcode)

    def close(self) -> None:
        # Killed, because a rank that waits in a collective does not react to anything else.
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def send(pipe: Connection, message: Any) -> None:
    # By value: multiprocessing would send a tensor as shared memory, which ends with its process.
    pipe.send_bytes(pickle.dumps(message))


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun would set for a rank on one machine."""
    places = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    # The parent holds the store, as torchrun's agent does, so no rank has to guess a free port.
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in (places | store).items()}


def _start_fork_server() -> None:
    """Start the server so that it ignores Ctrl-C, which reaches the whole terminal: the parent ends
    its ranks itself.

    A process inherits its parent's blocked signals, so the server and its forks never see SIGINT.
    """
    # Otherwise the server's start does it, and unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    pipe: Connection,
    variables: dict[str, str],
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ranks share the cores of one machine: with a thread per core each, they would fight for them.
    torch.set_num_threads(1)
    os.environ |= variables
    use_loopback()
    work(pipe, *arguments)
    # The other ranks may still be in a collective with this one: if it ended now, they would lose a
    # neighbour, and report that.
    threading.Event().wait()


def _end_with_parent() -> None:
    """End this rank when the parent is killed, even if it is waiting in a collective."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
