"""The ranks: long-lived processes that run one card after another, and keep their model in between."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from common.errors import TrainingFailure, UserError, first_line
from learn.cards.model import record_held
from learn.cards.registry import named_card
from learn.cards.storage import Storage
from training.parallelism.distributed import is_lost_rank, use_loopback

# When a rank reports that it lost another, the other one's own error, which is the cause, may take this long to come.
CAUSE_TIMEOUT = 5.0


@dataclass(frozen=True)
class Job:
    card_type: str
    node: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Any]
    recording: bool


@dataclass(frozen=True)
class Answer:
    kind: Literal["done", "user error", "failed", "lost a rank"]
    outputs: Mapping[str, Any]
    message: str = ""
    code: str = ""


class Workers:
    """The processes of all ranks, until :meth:`close` ends them.

    They find each other as under torchrun: by its environment variables, and a store in the parent.
    """

    def __init__(self, count: int, folder: Path) -> None:
        # A fork of a server that has imported torch starts fast, and does not inherit this program's open files.
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo"])  # which every optimizer would import
        _start_fork_server()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes, self._pipes = [], []
        for rank in range(count):
            own_end, child_end = context.Pipe()
            place = (child_end, folder, rank, count, self._store.port)
            process = context.Process(target=_run_rank, args=place, name=f"rank {rank}", daemon=True)
            process.start()
            child_end.close()
            self._processes.append(process)
            self._pipes.append(own_end)

    def run(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Run a card on all ranks, one job each; returns their outputs in the order of ranks.

        Raises:
            UserError: of the card, on the first rank that raised one.
            TrainingFailure: a rank died or its card failed; no process is left.
        """
        try:
            for pipe, job in zip(self._pipes, jobs, strict=True):
                pipe.send(job)
            answers = self._answers()
        except ConnectionError:  # a rank ended; its answer says how
            answers = self._answers()
        bad = [(rank, answer) for rank, answer in answers.items() if answer.kind != "done"]
        if not bad:
            return [dict(answers[rank].outputs) for rank in range(len(self._pipes))]
        self.close()
        rank, answer = min(bad, key=lambda one: (one[1].kind == "lost a rank", one[0]))
        if answer.kind == "user error":
            raise UserError(answer.message, code=answer.code)
        raise TrainingFailure(
            f"rank {rank}, card {jobs[0].card_type} (node {jobs[0].node}): {answer.message}", code="card-failed"
        )

    def _answers(self) -> dict[int, Answer]:
        """Every rank's answer; fewer once one has failed, because the others may wait for it forever."""
        answers: dict[int, Answer] = {}
        deadline = None
        while len(answers) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                answers[waiting[pipe]] = self._answer(pipe, waiting[pipe])
            kinds = {answer.kind for answer in answers.values()}
            if kinds & {"user error", "failed"} or (deadline and not ready):
                break
            if "lost a rank" in kinds and deadline is None:
                deadline = time.monotonic() + CAUSE_TIMEOUT
        return answers

    def _answer(self, pipe: Connection, rank: int) -> Answer:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join()
            code = process.exitcode or 0
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Answer("failed", {}, f"the process ended ({how})")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _start_fork_server() -> None:
    """Start the server so that it ignores Ctrl-C, which reaches the whole terminal: the parent ends its ranks itself.

    A process inherits its parent's blocked signals, so the server and its forks never see SIGINT.
    """
    resource_tracker.ensure_running()  # otherwise the server's start does it, and unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_rank(pipe: Connection, folder: Path, rank: int, count: int, port: int) -> None:
    """Run jobs until the parent ends this process, or has ended itself."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The parent holds the store, as torchrun's agent does, so no rank has to guess a free port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    use_loopback()
    live: dict[str, Any] = {}
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            job = pipe.recv()
            pipe.send(_answer_of(job, Storage(folder, job.node, rank, live=live, recording=job.recording)))


def _answer_of(job: Job, storage: Storage) -> Answer:
    try:
        card = named_card(job.card_type)
        record_held("before", storage)
        outputs = card.run(card.config_schema.model_validate(job.config), job.inputs, storage)
        record_held("after", storage)
        storage.save("outputs", outputs)
    except UserError as error:
        return Answer("user error", {}, str(error), error.code)
    except Exception as error:
        trace = keep_traceback(storage)
        if is_lost_rank(error):
            message = f"another rank went away, or the collective failed ({first_line(error)})"
            return Answer("lost a rank", {}, message + trace)
        return Answer("failed", {}, f"{type(error).__name__}: {first_line(error)}{trace}")
    return Answer("done", outputs)


def keep_traceback(storage: Storage) -> str:
    """Save the current traceback; returns the end of the error message, which names the file."""
    path = storage.folder / f"{storage.key('error')}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:  # for example a full disk, which may be the error itself
        return ""
    return f"; traceback in {path}"


def _end_with_parent() -> None:
    """End this rank when the parent is killed, even if it is waiting in a collective."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
