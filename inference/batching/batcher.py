"""Worker threads that group waiting texts into forward passes, independent of HTTP, the tokenizer
and asyncio.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from inference.batching.cache import Values, values_of
from inference.batching.engine_health import EngineHealth
from inference.batching.scheduler import FairQueue, Flow, QueuedText, spread, useful_slots
from inference.batching.supervision import JOIN_SECONDS, SupervisedThread
from inference.engines.answering import Answering
from inference.engines.base import PASSES_AT_ONCE, Engine, TokenBatch
from inference.engines.windowed import WindowedEngine
from inference.errors import ForwardError, WorkerDownError
from inference.metrics import ServerMetrics

logger = logging.getLogger(__name__)

_ENGINE_BROKEN = "the model fails on every text now; try again later"

# Tokens per second of a small CPU, for a model whose speed was not measured when it was loaded.
ASSUMED_TOKENS_PER_SECOND = 2000.0
# The initial speed counts as much as this many seconds of passes.
_FIRST_SPEED_S = 0.1
# After one second of work, earlier measurements count half. Time without work does not age them.
_SPEED_HALF_LIFE_S = 1.0

# Seconds between tries of a known good text on a broken engine, until it answers again.
RETRY_INTERVAL_S = 2.0

Outcome = Values | ForwardError | WorkerDownError


@dataclass(slots=True)
class FinishedPass:
    """The outcome of each text of a forward pass; its monotonic start, and its seconds."""

    texts: Sequence[QueuedText]
    outcomes: Sequence[Outcome]
    started: float
    seconds: float


@dataclass(frozen=True, slots=True)
class BatchedModel:
    """What a batcher has to know of a model.

    Attributes:
        good_ids: token ids of a text that the engine can answer, tried while it seems broken.
        tokens_per_second: speed of the engine, until passes have been measured.
        problem_type: what the engine's scores mean.
    """

    engine: Engine
    good_ids: list[int]
    answering: Answering
    tokens_per_second: float = ASSUMED_TOKENS_PER_SECOND


class Batcher:
    """Takes texts from a fair queue into forward passes on all slots of an engine."""

    def __init__(
        self,
        model: BatchedModel,
        queue: FairQueue,
        metrics: ServerMetrics,
        on_finished: Callable[[FinishedPass], None],
        on_expired: Callable[[Sequence[QueuedText]], None],
        retry_interval_s: float = RETRY_INTERVAL_S,
    ) -> None:
        """Start the worker threads, one per pass that may run at the same time.

        Args:
            queue: where texts wait; from here on only the batcher uses it.
            on_finished: receives every text that a worker took, once; called from worker threads.
            on_expired: receives the texts whose deadline passed in the queue; called from worker
                threads.
            retry_interval_s: seconds between tries of the good text on a broken engine.
        """
        engine = model.engine
        self.health = EngineHealth(engine, model.good_ids)
        self._retry_interval_s = retry_interval_s
        self._engine = engine
        self._answering = model.answering
        self._queue = queue
        self._metrics = metrics
        self._on_finished = on_finished
        self._on_expired = on_expired
        # Guards everything below, and the queue. No pass runs and no report is made while it is
        # held: callers on the event loop wait for it.
        self._changed = threading.Condition()
        self._closed = False
        # A slot is one thread's worth of the engine; a pass takes one or more of them. Slots that
        # are free, and those of all workers, add up to the engine's.
        self._free_slots = engine.num_slots
        self._tokens_in_hand = 0
        # Of the last passes, the older the less: their tokens, and their time as if each had taken
        # all slots. The quotient is the speed by which answers are promised.
        self._tokens_done = model.tokens_per_second * _FIRST_SPEED_S
        self._busy_s = _FIRST_SPEED_S
        num_workers = min(engine.num_slots, PASSES_AT_ONCE)
        self._workers = [_Worker(self._make_thread) for _ in range(num_workers)]
        self._free_passes = len(self._workers)
        for worker in self._workers:
            worker.thread.start()

    @property
    def queued_tokens(self) -> int:
        return self._queue.num_tokens

    @property
    def unanswered_tokens(self) -> int:
        return self._queue.num_tokens + self._tokens_in_hand

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all slots together, over the last seconds of work."""
        return self._tokens_done / self._busy_s

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds that the longest current pass has taken; 0 if there is none."""
        return max(worker.thread.busy_s for worker in self._workers)

    @property
    def is_alive(self) -> bool:
        return not self._closed and all(worker.thread.is_alive for worker in self._workers)

    def put(self, texts: Iterable[tuple[Flow, QueuedText]]) -> None:
        with self._changed:
            for flow, text in texts:
                self._queue.put(flow, text)
            # One worker, however many texts came: if it leaves texts and slots over, it calls the
            # next one. To wake all of them would cost each a turn with the lock, for nothing.
            self._changed.notify()

    def share(self, flow: Flow, text: QueuedText, deadline: float) -> bool:
        """Let another call wait for a text that is queued already; False if it is too late."""
        with self._changed:
            if text.is_expired:
                return False
            text.deadline = max(text.deadline, deadline)
            if text.is_waiting:
                self._queue.prioritize(flow, text)
            return True

    def remove(self, text: QueuedText) -> bool:
        with self._changed:
            return self._queue.remove(text)

    def close(self) -> None:
        """Stop the workers after the current passes; waiting texts are never taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        until = time.monotonic() + JOIN_SECONDS
        for worker in self._workers:
            worker.thread.join(max(0.0, until - time.monotonic()))

    def _make_thread(self, worker: _Worker) -> SupervisedThread:
        step = functools.partial(self._serve_once, worker)
        fail = functools.partial(self._fail, worker)
        return SupervisedThread("forward", step, fail, computes=True)

    def _serve_once(self, worker: _Worker) -> bool:
        """Wait for texts, run a pass and report it; False once closed."""
        with self._changed:
            if not self._wait(worker):
                return False
            expired = self._queue.expire(time.monotonic())
            self._take(worker)
        if worker.is_trying:
            self._try_engine(worker)
            return True
        if expired:
            self._on_expired(expired)
        if not worker.texts:
            return True
        started = time.monotonic()
        outcomes = self._answer(worker)
        seconds = time.monotonic() - started
        worker.thread.busy_since = None
        num_texts, num_tokens = len(worker.texts), worker.num_tokens
        # To fail at once is no speed: it would promise answers that nobody can give in time.
        if not all(isinstance(outcome, Exception) for outcome in outcomes):
            self._measure(worker, seconds)
        # Before the report, so that the next pass begins while this thread tells the callers.
        self._release(worker)
        self._on_finished(FinishedPass(worker.texts, outcomes, started, seconds))
        worker.texts = []
        self._metrics.batch_done(num_texts, num_tokens, seconds)
        return True

    def _wait(self, worker: _Worker) -> bool:
        """Wait for texts, or for the time to try a broken engine again; False once closed."""
        while not (self._closed or (len(self._queue) and self._free_slots)):
            is_broken = self.health.failure is not None
            # Without a try from time to time a broken engine would stay so: it gets no requests.
            is_notified = self._changed.wait(self._retry_interval_s if is_broken else None)
            if is_broken and not is_notified and self._free_slots:
                worker.is_trying = True
                break
        return not self._closed

    def _try_engine(self, worker: _Worker) -> None:
        """Try a broken engine with the known text; requests are refused meanwhile, so no pass would
        show that it recovered.
        """
        worker.thread.busy_since = time.monotonic()
        self.health.works(worker.slots)
        worker.thread.busy_since = None
        worker.is_trying = False
        self._release(worker)

    def _take(self, worker: _Worker) -> None:
        if worker.is_trying:
            self._free_slots -= 1
            self._free_passes -= 1
            worker.slots = 1
            return
        if not len(self._queue):
            return
        # Divide what waits over the passes that may run at once, and the free slots among them.
        num_waiting, num_workers = len(self._queue), len(self._workers)
        num_parts, slots = spread(num_waiting, self._free_slots, self._free_passes, num_workers)
        worker.texts = self._queue.take(num_parts, time.monotonic(), self.tokens_per_second)
        worker.num_tokens = sum(text.num_tokens for text in worker.texts)
        # A short pass gains nothing from more slots; those it leaves go to the next worker, which
        # is woken below.
        worker.slots = min(slots, useful_slots(worker.num_tokens))
        self._tokens_in_hand += worker.num_tokens
        self._free_slots -= worker.slots
        self._free_passes -= 1
        if self._free_slots and len(self._queue):
            self._changed.notify()

    def _measure(self, worker: _Worker, seconds: float) -> None:
        busy_s = seconds * worker.slots / self._engine.num_slots
        with self._changed:
            # An exponentially weighted mean by time worked, so that a quiet night does not fade
            # what was measured.
            kept = 0.5 ** (busy_s / _SPEED_HALF_LIFE_S)
            self._tokens_done = self._tokens_done * kept + worker.num_tokens
            self._busy_s = self._busy_s * kept + busy_s

    def _release(self, worker: _Worker) -> None:
        with self._changed:
            if worker.slots:
                self._free_passes += 1
            self._free_slots += worker.slots
            self._tokens_in_hand -= worker.num_tokens
            worker.slots = worker.num_tokens = 0
            if len(self._queue):
                self._changed.notify()  # another worker may begin while this one reports

    def _answer(self, worker: _Worker) -> Sequence[Outcome]:
        """Run a worker's pass; if the engine itself fails, its texts may be sent again."""
        # If every text of a pass fails, either the texts or the engine are bad. A known good text
        # tells: then either each text hears of its own failure, or all may be sent again elsewhere.
        if self.health.failure is None:
            outcomes = self._outcomes(worker, worker.texts)
            if not all(isinstance(outcome, ForwardError) for outcome in outcomes):
                self.health.pass_answered()
                return outcomes
            if self.health.works(worker.slots):
                return outcomes
        elif self.health.works(worker.slots):
            return self._outcomes(worker, worker.texts)
        return [WorkerDownError(self.health.failure or _ENGINE_BROKEN)] * len(worker.texts)

    def _outcomes(self, worker: _Worker, texts: Sequence[QueuedText]) -> list[Outcome]:
        try:
            return self._forward(worker, texts)
        except Exception as error:
            self._metrics.worker_failed()
            logger.exception("A forward pass of %d texts failed", len(texts))
            if len(texts) == 1:
                what = f"the model failed on this text ({type(error).__name__}); the log has more"
                return [ForwardError(what)]
        # One bad text must not fail its neighbors, so each is tried alone.
        return [outcome for text in texts for outcome in self._outcomes(worker, [text])]

    def _forward(self, worker: _Worker, texts: Sequence[QueuedText]) -> list[Outcome]:
        worker.thread.busy_since = time.monotonic()
        batch, deciding = TokenBatch.of([text.ids for text in texts]), None
        if isinstance(self._engine, WindowedEngine):
            logits, deciding = self._engine.read(batch, worker.slots)
        else:
            logits = self._engine.logits(batch, worker.slots)
        # Else answers would go to the wrong texts, which nobody would ever notice.
        if len(logits) != len(texts):
            what = f"{self._engine.name} gave {len(logits)} rows of scores for {len(texts)} texts"
            raise ValueError(what)
        rows = values_of(self._answering, batch, logits)
        if deciding is not None:
            for row, windows in zip(rows, deciding.tolist(), strict=True):
                if row is not None:
                    row.decided_by = windows
        what = "the model answers this text with NaN"
        return [ForwardError(what) if row is None else row for row in rows]

    def _fail(self, worker: _Worker, error: BaseException) -> None:
        # An error that a pass should not raise: the worker drops its current texts and starts over.
        logger.error("A worker failed and is restarted", exc_info=error)
        texts, worker.texts = worker.texts, []
        if texts:
            self.health.works(worker.slots)
        self._release(worker)
        self._metrics.worker_failed()
        if texts:
            what = f"the worker of this text failed ({type(error).__name__}); the log has more"
            failure = ForwardError(what)
            self._on_finished(FinishedPass(texts, [failure] * len(texts), time.monotonic(), 0.0))


class _Worker:
    """One worker thread, its current texts, and the slots it uses."""

    __slots__ = ("is_trying", "num_tokens", "slots", "texts", "thread")

    def __init__(self, thread_of: Callable[[_Worker], SupervisedThread]) -> None:
        self.slots = 0
        self.num_tokens = 0
        self.is_trying = False
        self.texts: Sequence[QueuedText] = []
        self.thread = thread_of(self)
