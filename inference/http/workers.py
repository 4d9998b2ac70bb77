"""Several server processes behind one port, for machines whose cores one Python process cannot keep
busy.

The supervisor opens the port, loads the model and forks the workers, which share its memory: the
weights are there once. Each worker is the whole application with its share of the processors.
Between the two runs a line of JSON messages, over which a worker tells what it counts and hears
what concerns all of them.

The kernel spreads connections over one listening socket for each worker. The supervisor keeps all
of them open, so that connections to a worker that has died wait for the one that takes its place. A
reload forks workers with the new model; only when all of them are ready do they take over, and the
old ones finish what they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from starlette.exceptions import HTTPException

from inference.batching.served_model import LoadModel, refusal_of, wanted_of
from inference.batching.served_models import has_several
from inference.engines.model_loader import ModelLoader
from inference.engines.selection import is_native_without_comparison
from inference.errors import SettingsError
from inference.http.schemas import ModelResponse
from inference.http.worker_messages import (
    AllAreReady,
    AllCounts,
    Answer,
    Ask,
    CannotServe,
    CanServe,
    Counts,
    FromSupervisor,
    FromWorker,
    IsReady,
    Leave,
    Reloaded,
    ReloadOutcome,
    ReloadRefused,
    ReloadRunning,
    Serve,
    Taken,
    TellCounts,
    decode,
    encode,
)
from inference.metrics import ServerMetrics, Snapshot, merged
from inference.settings import MOST_WORKERS, Settings

logger = logging.getLogger(__name__)

# With about as many processors, the kernels answer as many texts of a small model as one Python
# process can read and write.
CPUS_PER_WORKER = 8
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_BACKLOG = 2048
_LONGEST_MESSAGE = 2**24
# Seconds after which the counts of a worker that does not tell them are taken as they were.
_SNAPSHOT_S = 1.0
# Seconds within which the supervisor answers, and within which new workers must have loaded a
# model.
_ANSWER_S, _RELOAD_S = 5.0, 120.0
# Seconds between two reports of what clients have taken of their rate limits.
_REPORT_INTERVAL_S = 0.1
# A worker that dies sooner than this is replaced later and later.
_SHORT_LIFE_S, _LONGEST_PAUSE_S = 5.0, 10.0
# Seconds beyond drain and grace until a worker that does not end is killed.
_END_S = 5.0


def num_workers(settings: Settings) -> int:
    """How many processes serve. ``auto`` is one, unless many processors can share the weights.

    Raises:
        SettingsError: there are to be several, and several models.
    """
    if has_several(settings):
        if settings.workers not in ("auto", 1):
            line = f"WORKERS {settings.workers}: several models are served by one process; set 1"
            raise SettingsError(line)
        return 1
    if settings.workers != "auto":
        return settings.workers
    wanted = min(round(settings.hardware.num_threads / CPUS_PER_WORKER), MOST_WORKERS)
    # Only Linux spreads connections over several sockets that listen on the same port.
    if wanted <= 1 or not sys.platform.startswith("linux"):
        return 1
    can_share = is_native_without_comparison(
        settings.model_checkpoint, settings.engine, settings.hardware
    )
    return wanted if can_share else 1


def share_of(settings: Settings, workers: int) -> Settings:
    """The settings of one of the workers: its part of the processors, and of what bounds memory."""
    return settings.model_copy(
        update={
            "threads": max(1, settings.hardware.num_threads // workers),
            "max_connections": -(-settings.max_connections // workers),
            # Half of it is for streams, and in the other one body has to fit.
            "max_pending_mb": max(settings.max_pending_mb / workers, 2 * settings.max_body_mb),
            "cache_entries": -(-settings.cache_entries // workers),
        }
    )


# ---------------------------------------------------------------- in a worker


class SupervisorLine:
    """A worker's line to the supervisor; only used on the event loop."""

    def __init__(self, connection: socket.socket, *, has_model: bool) -> None:
        """``has_model``: whether loading takes no time, as a model is in memory already."""
        self.has_model = has_model
        # Until then this worker is not ready either: a client that it answers may reach one without
        # a model next.
        self.all_are_ready = has_model
        self._connection = connection
        self._answers: dict[int, asyncio.Future[AllCounts | ReloadOutcome]] = {}
        self._num_asked = 0
        self._taken: dict[tuple[str, str, float | None], float] = {}

    async def connect(self) -> None:
        # A message is one line, and the longest is a snapshot of all metrics; asyncio's own limit
        # for a line, 64 KiB, is too small for it.
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=self._connection, limit=_LONGEST_MESSAGE
        )

    async def follow(
        self,
        snapshot: Callable[[], Snapshot],
        take_elsewhere: Callable[[str, str, float | None, float], None],
        leave: Callable[[], None],
    ) -> None:
        """Do what the supervisor says; if it dies, the worker ends like one that is told to."""
        try:
            while line := await self._reader.readline():
                match message := decode(line):
                    case TellCounts():
                        self.say_counts(snapshot())
                    case Leave():
                        leave()
                    case AllAreReady():
                        self.all_are_ready = True
                    case Taken(amounts):
                        for limiter, client, rate, amount in amounts:
                            take_elsewhere(limiter, client, rate, amount)
                    case Answer():
                        self._hand_on(message)
        # A worker that no longer hears the supervisor would keep its model when the others get a
        # new one, and two models would answer at one address. So it ends, and another replaces it.
        except Exception:
            logger.exception("the worker cannot follow the supervisor, so it ends")
        # Not sys.exit: SIGTERM lets the server finish what it has begun, as at any other end.
        os.kill(os.getpid(), signal.SIGTERM)

    def _hand_on(self, answer: Answer) -> None:
        # The request that asked may have given up by now, or its client may have gone.
        asked = self._answers.get(answer.number)
        if asked is not None and not asked.done():
            asked.set_result(answer.content)

    def say_loaded(self) -> None:
        self._send(IsReady())

    def say_counts(self, snapshot: Snapshot) -> None:
        self._send(Counts(snapshot))

    def report_taken(self, limiter: str, client: str, rate: float | None, amount: float) -> None:
        """Let the other workers know, soon, what a client has taken of its rate limit here."""
        # Collected for a moment: a message per request would cost more than the request. Until the
        # others hear of it a client may take a little more than its rate, once per worker.
        if not self._taken:
            asyncio.get_running_loop().call_later(_REPORT_INTERVAL_S, self._send_taken)
        self._taken[limiter, client, rate] = self._taken.get((limiter, client, rate), 0) + amount

    def _send_taken(self) -> None:
        self._send(Taken([(*key, amount) for key, amount in self._taken.items()]))
        self._taken.clear()

    async def metrics_of_all(self) -> list[Snapshot]:
        return (await self._ask(_ANSWER_S, "metrics")).snapshots

    async def reload(self) -> ReloadOutcome:
        """Let all workers serve what MODEL_CHECKPOINT names now, or none."""
        return await self._ask(_RELOAD_S + _ANSWER_S, "reload")

    async def _ask(self, seconds: float, what: Literal["metrics", "reload"]) -> Any:
        self._num_asked += 1
        number = self._num_asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number, what))
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise HTTPException(
                503, "the supervisor of the workers is busy; try again", {"Retry-After": "5"}
            ) from None
        finally:
            del self._answers[number]

    def _send(self, message: FromWorker) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(message))


# ---------------------------------------------------------------- in the supervisor


@dataclass(slots=True, eq=False)
class _Worker:
    slot: int  # which of the listening sockets it has
    pid: int
    connection: socket.socket
    is_serving: bool
    started: float = field(default_factory=time.monotonic)
    # It has loaded the model for itself, though perhaps not to serve it yet.
    is_ready: bool = False
    is_leaving: bool = False
    has_told: bool = False  # its counts, since they were asked for
    snapshot: Snapshot = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)


class Supervisor:
    def __init__(
        self,
        settings: Settings,
        workers: int,
        load_model: LoadModel,
        run_server: Callable[[Settings, LoadModel, SupervisorLine, socket.socket], None],
    ) -> None:
        """Args:
        load_model: loads a model for one worker, with the hardware of `share_of`.
        run_server: serves on a listening socket until the worker is to end.
        """
        self._settings = settings
        self._share = share_of(settings, workers)
        self._num_workers = workers

        def load(path: Path, engine: str) -> ModelLoader:
            model = load_model(path, engine)
            # Before a worker with the old model makes room for one that would refuse this one.
            wanted_of(model, path, settings)
            return model

        self._load_model = load
        self._run_server = run_server
        # What is loaded before the fork, or why it could not be; None if each worker has to load
        # for itself, because the threads of other engines would not survive the fork.
        self._model: ModelLoader | Exception | None = None
        self._has_served = False
        self._model_before = self._model  # during a reload
        self._workers: list[_Worker] = []
        self._next: list[_Worker] = []  # what a reload has started, until all of them are ready
        self._metrics = ServerMetrics()
        self._retired: Snapshot = []  # what workers that are gone had counted
        self._asked_metrics: list[tuple[_Worker, int]] = []
        self._asked_reload: list[tuple[_Worker, int]] = []
        self._num_metrics = 0
        self._num_short_lives = 0
        self._is_ending = False
        self._sockets: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._due: list[tuple[float, Callable[[], None]]] = []

    def run(self, host: str, port: int) -> None:
        """Serve until SIGTERM or SIGINT, and until what is in progress then is answered."""
        self._open_sockets(host, port)
        signals = self._take_signals()
        # The ports are open by now, so clients that come early wait for the first worker.
        self._model = self._load()
        if isinstance(self._model, Exception):
            self._metrics.reloads.labels("refused").inc()
        elif self._model is not None:
            self._count_served()
        for slot in range(self._num_workers):
            self._start(slot, is_serving=True)
        what = "listening on %s:%d: %d workers with %d threads each"
        address, port = self._sockets[0].getsockname()[:2]
        logger.info(what, address, port, self._num_workers, self._share.hardware.num_threads)
        while self._workers or not self._is_ending:
            now = time.monotonic()
            until = min((when for when, _ in self._due), default=now + 60)
            for key, _ in self._selector.select(max(0.0, until - now)):
                key.data()
            # Handlers only note signals, so that they are acted upon here, between two messages,
            # and never in the middle of a fork.
            while signals:
                self._react(signals.pop(0))
            self._act_on_time()

    def _act_on_time(self) -> None:
        now = time.monotonic()
        ready = [one for one in self._due if one[0] <= now]
        # Before they act, since some of them come back with a new time.
        self._due = [one for one in self._due if one[0] > now]
        for _, act in ready:
            act()

    def _open_sockets(self, host: str, port: int) -> None:
        # One socket per worker on the same port. With a single shared one, whichever worker wakes
        # first would accept, and the load would be uneven; here the kernel spreads by the client's
        # address and port.
        for _ in range(self._num_workers):
            listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind((host, port))
            listening.listen(_BACKLOG)
            # Port 0 takes a free one, which the others then have to share.
            port = listening.getsockname()[1]
            self._sockets.append(listening)

    def _take_signals(self) -> list[int]:
        # A handler alone would not end `select`, which continues after a signal. Python also writes
        # a byte for each signal into a socket, which `select` watches.
        arrived: list[int] = []
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: arrived.append(number))
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        self._wake = wake  # open as long as the supervisor
        self._selector.register(woken, selectors.EVENT_READ, lambda: woken.recv(4096))
        return arrived

    def _react(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._reload()
        elif not self._is_ending:
            self._is_ending = True
            # The workers' copies stay open until they have drained.
            for listening in self._sockets:
                listening.close()
            for worker in [*self._workers, *self._next]:
                self._kill(worker, signal.SIGTERM)
            self._later(
                self._settings.drain_seconds + self._settings.grace_seconds + _END_S, self._kill_all
            )

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, act))

    def _kill(self, worker: _Worker, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, number)

    def _kill_all(self) -> None:
        for worker in self._workers:
            logger.error("worker %d does not stop, so it is killed", worker.pid)
            self._kill(worker, signal.SIGKILL)

    # ---- models

    def _load(self) -> ModelLoader | Exception | None:
        path, engine = self._settings.model_checkpoint, self._settings.engine
        if not is_native_without_comparison(path, engine, self._share.hardware):
            return None
        try:
            model = self._load_model(path, engine)
        except Exception as error:  # the workers say why
            return error
        return model if all(one.engine.survives_fork for one in model.stages) else None

    def _reload(self) -> None:
        """Start workers with the model that is there now; once all have it, they `_take_over`."""
        if self._next or self._is_ending:
            return
        model = self._load()
        if isinstance(model, Exception):
            self._refuse_reload(str(refusal_of(self._settings.model_checkpoint, model)))
            return
        # Kept until all workers have loaded the new one: if one of them does not, it is the model
        # that is served again.
        self._model_before, self._model = self._model, model
        started = self._next = []
        self._later(_RELOAD_S, lambda: self._give_up(started, f"not loaded within {_RELOAD_S:g} s"))
        try:
            for slot in range(self._num_workers):
                # Not a comprehension: if a fork fails, those before it have to be ended.
                started.append(self._fork(slot, is_serving=False))  # noqa: PERF401
        except OSError as error:
            self._give_up(started, f"the system starts no more processes ({error})")

    def _take_over(self, model: dict[str, Any]) -> None:
        # First the new workers begin to accept, then the old ones stop: in between both do, and no
        # connection finds nobody.
        before, after = self._workers, self._next
        self._workers, self._next, self._model_before = [*before, *after], [], None
        for worker in after:
            self._serve(worker)
        for worker in before:
            # One that was to take a dead one's place has accepted nothing yet.
            if not worker.is_serving:
                self._kill(worker, signal.SIGKILL)
            # One that has been leaving since the last reload has to end now, however long its
            # streams still are, or the models of many reloads would pile up in memory.
            elif worker.is_leaving:
                self._kill(worker, signal.SIGTERM)
            else:
                self._send(worker, Leave())
            worker.is_leaving = True
        self._count_served()
        self._answer(self._asked_reload, Reloaded(model))

    def _count_served(self) -> None:
        self._has_served = True
        self._metrics.reloads.labels("served").inc()

    def _give_up(self, started: list[_Worker], reason: str) -> None:
        # The timer of a reload that has ended since; another one may be in progress now.
        if started is not self._next:
            return
        self._next, self._model, self._model_before = [], self._model_before, None
        for worker in started:
            self._kill(worker, signal.SIGKILL)
        self._refuse_reload(reason)

    def _refuse_reload(self, reason: str) -> None:
        logger.error("all workers keep the model that they have: %s", reason)
        self._metrics.reloads.labels("refused").inc()
        self._answer(self._asked_reload, ReloadRefused(reason))

    # ---- workers

    def _fork(self, slot: int, is_serving: bool) -> _Worker:
        """Start a worker, which serves at once, or loads the model and waits for `Serve`."""
        ours, theirs = socket.socketpair()
        # Else the collector in each worker would write to all objects of the model and the program,
        # and the kernel would copy every page that it writes to.
        gc.freeze()
        # What is buffered would be in both processes, and written twice.
        sys.stdout.flush()
        # Until the worker has handlers of its own, a signal for it would run ours, and be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                ours.close()
                self._be_worker(slot, theirs, is_serving)
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            theirs.close()
        # So that a worker that hangs with a full buffer cannot stop the supervisor for ever.
        ours.settimeout(_ANSWER_S)
        worker = _Worker(slot, pid, ours, is_serving)
        self._selector.register(ours, selectors.EVENT_READ, functools.partial(self._hear, worker))
        return worker

    def _be_worker(self, slot: int, connection: socket.socket, is_serving: bool) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            # A terminal sends Ctrl-C to the whole process group; it is for the supervisor alone,
            # which lets workers finish.
            os.setpgid(0, 0)
            self._close_what_others_have(slot)
            # The worker's copy of the pages would keep the old model in memory after the supervisor
            # has dropped it.
            self._model_before = None
            load_model = self._load_model if self._model is None else self._loaded
            if not is_serving:
                load_model = _loaded_and_told_to_serve(connection, load_model, self._settings)
            line = SupervisorLine(connection, has_model=not is_serving or self._model is not None)
            self._run_server(self._share, load_model, line, self._sockets[slot])
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            logger.exception("the worker fails")
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(code)  # what lies below on the stack is the supervisor's

    def _close_what_others_have(self, slot: int) -> None:
        """In a worker: close the copies that the fork made of all file descriptors but its own."""
        # With a copy here, another worker's connection would stay open when the supervisor ends.
        for other in [*self._workers, *self._next]:
            other.connection.close()
        # And its port would accept connections until the last copy is closed, long after it has
        # drained, with nobody here to answer them.
        for number, listening in enumerate(self._sockets):
            if number != slot:
                listening.close()

    def _loaded(self, path: Path, engine: str) -> ModelLoader:
        if path != self._settings.model_checkpoint:  # the candidate in shadow
            return self._load_model(path, engine)
        if isinstance(self._model, Exception):
            raise self._model
        return self._model

    def _serve(self, worker: _Worker) -> None:
        worker.is_serving = True
        self._send(worker, Serve())

    def _say_if_all_are_ready(self) -> None:
        if all(worker.is_ready for worker in self._workers):
            if not self._has_served:
                self._count_served()
            for worker in self._workers:
                self._send(worker, AllAreReady())

    def _hear(self, worker: _Worker) -> None:
        try:
            data = worker.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._bury(worker)
            return
        worker.received += data
        # A read ends anywhere, also within a line: the rest of it comes with the next one.
        *lines, rest = worker.received.split(b"\n")
        worker.received = rest
        for line in lines:
            self._obey(worker, decode(line))

    def _obey(self, worker: _Worker, message: FromWorker) -> None:
        match message:
            case Counts(snapshot):
                worker.snapshot, worker.has_told = snapshot, True
                self._answer_metrics()
            case Taken():
                self._pass_on(message, worker)
            case CannotServe(reason) if worker in self._next:
                self._give_up(self._next, reason)
            case CannotServe(reason):
                logger.error("a new worker cannot replace a dead one: %s", reason)
            case IsReady():
                worker.is_ready = True
                self._say_if_all_are_ready()
            case CanServe(model):
                self._let_serve(worker, model)
            case Ask(number, "metrics"):
                self._asked_metrics.append((worker, number))
                # Those who ask while the counts are collected get the same answer.
                if len(self._asked_metrics) == 1:
                    self._ask_for_snapshots()
            case Ask(number):
                self._begin_reload(worker, number)

    def _pass_on(self, taken: Taken, worker: _Worker) -> None:
        for other in self._workers:
            if other is not worker and other.is_serving:
                self._send(other, taken)

    def _let_serve(self, worker: _Worker, model: dict[str, Any]) -> None:
        """Let a worker serve what it has loaded: at once, or with the others of its reload."""
        worker.is_ready = True
        if worker not in self._next:  # it takes a dead worker's place
            self._serve(worker)
            self._say_if_all_are_ready()
        elif all(one.is_ready for one in self._next):
            self._take_over(model)

    def _begin_reload(self, worker: _Worker, number: int) -> None:
        asked = [(worker, number)]
        if self._is_ending:
            self._answer(asked, ReloadRefused("the server is shutting down"))
        elif self._next:
            self._answer(asked, ReloadRunning())
        else:
            self._asked_reload += asked
            self._reload()

    def _bury(self, worker: _Worker) -> None:
        self._selector.unregister(worker.connection)
        worker.connection.close()
        # What it counted is not lost: the counters of a server may only grow, or rates computed
        # from them would jump.
        _, status = os.waitpid(worker.pid, 0)
        self._retired = merged([self._retired, worker.snapshot], only_counts=True)
        how = f"exit code {os.WEXITSTATUS(status)}"
        if os.WIFSIGNALED(status):
            how = f"signal {os.WTERMSIG(status)}"
        if worker in self._next:
            self._give_up(self._next, f"a worker with the new model ended with {how}")
            return
        if worker not in self._workers:  # one of a reload that was given up
            return
        self._workers.remove(worker)
        self._answer_metrics()
        if self._is_ending or worker.is_leaving:
            return
        life_s = time.monotonic() - worker.started
        self._start_later(worker.slot, life_s, f"worker {worker.pid} ended with {how}")

    def _start_later(self, slot: int, life_seconds: float, reason: str) -> None:
        # A worker that dies at once would do so again, and a loop of forks would take the
        # processors from those that work: the pause doubles with each short life.
        is_short = life_seconds < _SHORT_LIFE_S
        self._num_short_lives = self._num_short_lives + 1 if is_short else 0
        pause = min(_LONGEST_PAUSE_S, 0.1 * 2**self._num_short_lives) if is_short else 0.0
        logger.error("%s; another one replaces it in %.1f s", reason, pause)
        self._later(pause, functools.partial(self._start, slot))

    def _start(self, slot: int, *, is_serving: bool = False) -> None:
        is_taken = any(worker.slot == slot and not worker.is_leaving for worker in self._workers)
        if self._is_ending or is_taken:  # by a reload
            return
        try:
            self._workers.append(self._fork(slot, is_serving=is_serving))
        except OSError as error:
            self._start_later(slot, 0.0, f"a worker cannot be started ({error})")

    def _send(self, worker: _Worker, message: FromSupervisor) -> None:
        try:
            worker.connection.sendall(encode(message))
        except TimeoutError:
            logger.error("worker %d no longer accepts messages and is killed", worker.pid)
            self._kill(worker, signal.SIGKILL)
        except OSError:
            pass  # it has just ended, which is heard next

    def _answer(self, asked: list[tuple[_Worker, int]], content: AllCounts | ReloadOutcome) -> None:
        for worker, number in asked:
            self._send(worker, Answer(number, content))
        asked.clear()

    # ---- metrics

    def _ask_for_snapshots(self) -> None:
        for worker in self._workers:
            # One that loads its model yet has no event loop that could answer.
            worker.has_told = not worker.is_serving
            if worker.is_serving:
                self._send(worker, TellCounts())
        self._later(_SNAPSHOT_S, functools.partial(self._answer_metrics, self._num_metrics))

    def _answer_metrics(self, late: int | None = None) -> None:
        """Answer once all have told their counts, or it is too ``late`` for this answer."""
        if self._asked_metrics and (
            late == self._num_metrics or all(worker.has_told for worker in self._workers)
        ):
            self._num_metrics += 1
            snapshots = [
                self._metrics.snapshot(),
                self._retired,
                *(worker.snapshot for worker in self._workers),
            ]
            self._answer(self._asked_metrics, AllCounts(snapshots))


def _loaded_and_told_to_serve(
    connection: socket.socket, load_model: LoadModel, settings: Settings
) -> LoadModel:
    """Load the model and wait for the supervisor's word; ends the process if it is refused."""
    try:
        model = load_model(settings.model_checkpoint, settings.engine)
    except Exception as error:
        reason = str(refusal_of(settings.model_checkpoint, error))
        connection.sendall(encode(CannotServe(reason)))
        raise SystemExit(0) from None
    description = ModelResponse.of(model, settings).model_dump(exclude_none=True)
    connection.sendall(encode(CanServe(description)))
    # Exactly this many bytes: what the supervisor says next is for the event loop, which takes over
    # the connection, and would never see bytes that were read into a buffer here.
    word = encode(Serve())
    if connection.recv(len(word), socket.MSG_WAITALL) != word:
        raise SystemExit(0)
    return lambda path, engine: (
        model if path == settings.model_checkpoint else load_model(path, engine)
    )
