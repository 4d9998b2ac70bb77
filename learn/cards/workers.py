"""The ranks: long-lived processes that run one card after another, and keep their model in between.

They are processes of this machine, or actors on the machines of a Ray cluster.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from common.errors import TrainingFailure, UserError, first_line
from common.ray_cluster import check_room, connect
from learn.cards.model import record_held
from learn.cards.registry import named_card
from learn.cards.storage import Storage
from learn.ranks import Ended, RankPool, receive, send
from training.distributed.group import interface_to, use_loopback
from training.distributed.ranks import is_lost_rank

# When a rank reports that it lost another, the other one's own error, which is the cause, may take
# this long to come.
CAUSE_TIMEOUT = 5.0
# A cluster that grows on demand has a new machine within this time.
ROOM_TIMEOUT = 300.0


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


class Workers(ABC):
    """All ranks, until :meth:`close` ends them.

    They find each other as under torchrun: by its environment variables.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    @abstractmethod
    def _send(self, jobs: Sequence[Job]) -> None:
        """Give each rank its job. A rank that is gone is no error yet."""

    @abstractmethod
    def _answered(self, waiting: Sequence[int], seconds: float | None) -> dict[int, Answer]:
        """The answers of these ranks so far; waits for a first one, up to ``seconds``."""

    @abstractmethod
    def close(self) -> None: ...

    def run(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Run a card on all ranks, one job each; returns their outputs in the order of ranks.

        Raises:
            UserError: of the card, on the first rank that raised one.
            TrainingFailure: a rank died or its card failed; no process is left.
        """
        self._send(jobs)
        answers = self._answers()
        bad = [(rank, answer) for rank, answer in answers.items() if answer.kind != "done"]
        if not bad:
            return [dict(answers[rank].outputs) for rank in range(self.count)]
        # One rank failed, so the group is broken: a rank that waits in a collective cannot be told.
        self.close()
        # A rank that lost another one is a consequence: the cause is reported if there is one.
        rank, answer = min(bad, key=lambda one: (one[1].kind == "lost a rank", one[0]))
        if answer.kind == "user error":
            raise UserError(answer.message, code=answer.code)
        where = f"rank {rank}, card {jobs[0].card_type} (node {jobs[0].node})"
        raise TrainingFailure(f"{where}: {answer.message}", code="card-failed")

    def _answers(self) -> dict[int, Answer]:
        """Every rank's answer; fewer once one has failed, as the others may wait for it forever."""
        answers: dict[int, Answer] = {}
        deadline = None
        while len(answers) < self.count:
            waiting = [rank for rank in range(self.count) if rank not in answers]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            found = self._answered(waiting, left)
            answers |= found
            kinds = {answer.kind for answer in answers.values()}
            # Without a deadline an answer is always found: if there is none, the time is over.
            if kinds & {"user error", "failed"} or not found:
                break
            if "lost a rank" in kinds and deadline is None:
                deadline = time.monotonic() + CAUSE_TIMEOUT
        return answers


class LocalWorkers(Workers):
    """Processes of this machine."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__(count)
        self._ranks = RankPool(count, _run_jobs, folder)

    def _send(self, jobs: Sequence[Job]) -> None:
        for rank, job in enumerate(jobs):
            self._ranks.send(rank, job)

    def _answered(self, waiting: Sequence[int], seconds: float | None) -> dict[int, Answer]:
        messages = self._ranks.messages(waiting, seconds)
        return {
            rank: _ended(message.exit_code or 0) if isinstance(message, Ended) else message
            for rank, message in messages.items()
        }

    def close(self) -> None:
        self._ranks.close()


def _ended(code: int) -> Answer:
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Answer("failed", {}, f"the process ended ({how})")


class RayWorkers(Workers):
    """Actors on the machines of a Ray cluster, as evenly spread as it can; rank 0 holds the store.

    Raises:
        UserError: Ray is missing, no cluster answers, or it has fewer free cores than ranks.
    """

    def __init__(self, count: int, folder: Path, address: str) -> None:
        super().__init__(count)
        is_local = connect(address, flag="--cluster")
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray = ray
        if not is_local and not folder.is_absolute():
            raise UserError(
                f"--output {folder}: give an absolute path on storage that all machines of the "
                "cluster share; the page "
                "shows what the ranks write there",
                code="folder-not-shared",
            )
        if is_local:  # others may grow
            check_room(f"{count} ranks", {"CPU": count}, "--cluster")
        self._group = placement_group([{"CPU": 1}] * count, strategy="SPREAD")
        if not self._group.wait(ROOM_TIMEOUT):
            self._ray.util.remove_placement_group(self._group)
            raise UserError(
                f"--cluster {address}: has no {count} free cores after {ROOM_TIMEOUT:.0f} s; give "
                "--workers a smaller "
                "number, or wait until others are done",
                code="ray-too-small",
            )
        on_bundle = [PlacementGroupSchedulingStrategy(self._group, index) for index in range(count)]
        actor = ray.remote(num_cpus=1, max_restarts=0)(_RankOnRay)
        # Each rank is an actor on a bundle of its own, so Ray spreads them over the machines.
        cwd = str(Path.cwd())
        self._actors = [actor.options(scheduling_strategy=one).remote(cwd) for one in on_bundle]
        # Rank 0's machine and a free port there: the address at which all ranks meet.
        places = ray.get([one.place.remote() for one in self._actors])
        master, port = places[0]
        for rank, (host, _) in enumerate(places):
            here = [other for other, (name, _) in enumerate(places) if name == host]
            # As torchrun numbers them: over all machines, and within the machine.
            among = {"LOCAL_RANK": here.index(rank), "LOCAL_WORLD_SIZE": len(here)}
            among |= {"RANK": rank, "WORLD_SIZE": count}
            ray.get(self._actors[rank].join.remote(folder.absolute(), among, master, port))
        self._answer_refs: list[Any] = []

    def _send(self, jobs: Sequence[Job]) -> None:
        pairs = zip(self._actors, jobs, strict=True)
        self._answer_refs = [actor.run.remote(job) for actor, job in pairs]

    def _answered(self, waiting: Sequence[int], seconds: float | None) -> dict[int, Answer]:
        ranks = {self._answer_refs[rank]: rank for rank in waiting}
        ready, _ = self._ray.wait(list(ranks), timeout=seconds)
        answers = {}
        for reference in ready:
            try:
                answers[ranks[reference]] = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:  # the process is gone
                how = f"the process ended ({first_line(error)})"
                answers[ranks[reference]] = Answer("failed", {}, how)
        return answers

    def close(self) -> None:
        with suppress(Exception):  # Ray itself may be gone, and its actors with it
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._group)


class _RankOnRay:
    """One rank, in a process that Ray starts."""

    def __init__(self, folder: str) -> None:
        if Path(folder).is_dir():  # relative paths mean what they mean where the command was typed
            os.chdir(folder)
        self._live: dict[str, Any] = {}

    def place(self) -> tuple[str, int]:
        """This machine's address in the cluster, and a port that is free there."""
        from ray.util import get_node_ip_address

        with socket.socket() as free:
            free.bind(("", 0))
            return get_node_ip_address(), free.getsockname()[1]

    def join(self, folder: Path, among: Mapping[str, int], master: str, port: int) -> None:
        self._folder, self._rank = folder, among["RANK"]
        torch.set_num_threads(1)
        os.environ |= {name: str(value) for name, value in among.items()}
        os.environ |= {"MASTER_ADDR": master, "MASTER_PORT": str(port)}
        if among["LOCAL_WORLD_SIZE"] == among["WORLD_SIZE"]:
            use_loopback()
        elif (interface := interface_to(master)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def run(self, job: Job) -> Answer:
        place = (self._folder, job.node, self._rank)
        return _answer_of(job, Storage(*place, live=self._live, recording=job.recording))


def _run_jobs(pipe: Connection, folder: Path) -> None:
    """Run one job after the other, with what the cards before have left in memory."""
    rank, live = int(os.environ["RANK"]), dict[str, Any]()
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            job = receive(pipe)
            storage = Storage(folder, job.node, rank, live=live, recording=job.recording)
            send(pipe, _answer_of(job, storage))


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
