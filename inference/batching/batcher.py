"""Worker threads that group waiting texts into forward passes, independent of HTTP, the tokenizer
and asyncio.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from inference.batching.cache import Values, values_of
from inference.batching.engine_health import EngineHealth
from inference.batching.scheduler import FairQueue, Flow, QueuedText, spread, useful_slots
from inference.batching.supervision import JOIN_SECONDS, SupervisedThread
from inference.engines.answering import Answering
from inference.engines.base import PASSES_AT_ONCE, Engine, Reading, TokenBatch
from inference.engines.windowed import WindowedEngine
from inference.errors import ForwardError, WorkerDownError
from inference.metrics import ModelMetrics

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


class EncoderOfSeveral(Protocol):
    """Computes the scores of several models in one pass."""

    def read_all(self, batch: TokenBatch, threads: int = 1) -> Mapping[Engine, Reading]: ...


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
        answering: what the engine's scores mean.
        encoder: the one that the engine shares with others; None if it has its own.
    """

    engine: Engine
    good_ids: list[int]
    answering: Answering
    tokens_per_second: float = ASSUMED_TOKENS_PER_SECOND
    encoder: EncoderOfSeveral | None = None


@dataclass(slots=True, eq=False)
class Share:
    """One model's share of the machine; the batchers of a cascade take turns within it.

    Attributes:
        weight: a model of weight 2 gets twice the time of one of weight 1 while both have texts.
        served_until: the end of its last pass in the fair order of all models.
        virtual_time: the start of the last pass in the fair order of its own batchers.
    """

    weight: float = 1.0
    served_until: float = 0.0
    virtual_time: float = 0.0


class Workers:
    """Threads that run the forward passes of one batcher, or of several that share the machine.

    Which model's texts come next is decided by start-time fair queueing, as in `FairQueue`, but in
    seconds of the whole machine instead of tokens: a model that is never without texts gets its
    share of the time, however many texts wait for another one, and what one leaves the others take.
    The batchers of one model share its time in the same way.
    """

    def __init__(self, num_slots: int, retry_interval_s: float = RETRY_INTERVAL_S) -> None:
        """Start the threads, one per pass that may run at the same time.

        Args:
            num_slots: threads' worth of the machine, shared by all passes; 0 until `grow`.
            retry_interval_s: seconds between tries of the good text on a broken engine.
        """
        # Guards everything below, and the batchers' queues. No pass runs and no report is made
        # while it is held: callers on the event loop wait for it.
        self.changed = threading.Condition()
        self.num_slots = 0
        self.free_slots = 0  # these and the slots of all workers add up to num_slots
        self._retry_interval_s = retry_interval_s
        self._batchers: list[Batcher] = []
        self._virtual_time = 0.0
        self._closed = False
        self.all: list[_Worker] = []
        self.free_passes = 0
        self.grow(num_slots)

    def grow(self, num_slots: int) -> None:
        """Have at least this many slots, and the threads for them."""
        with self.changed:
            self.free_slots += max(0, num_slots - self.num_slots)
            self.num_slots = max(num_slots, self.num_slots)
            num_threads = min(self.num_slots, PASSES_AT_ONCE)
            started = [_Worker(self._make_thread) for _ in range(len(self.all), num_threads)]
            self.all += started
            self.free_passes += len(started)
            for worker in started:
                worker.thread.start()

    @property
    def are_alive(self) -> bool:
        return all(worker.thread.is_alive for worker in self.all)

    @property
    def num_waiting(self) -> int:
        """Texts that wait for a pass, of all batchers."""
        return sum(len(one.queue) for one in self._batchers)

    def share_left(self, share: Share, seconds: float) -> float:
        """How much of the machine a model gets while it does work of so many seconds, by what waits
        for others now: 1 if nothing does.

        While it does them, fair queueing gives each other model at most its share of the time, and
        at most what it has work for.
        """
        if len(self._batchers) == 1:
            return 1.0
        others: dict[Share, float] = {}
        for one in list(self._batchers):
            if one.model_share is not share and (tokens := one.unanswered_tokens):
                busy_s = tokens / one.tokens_per_second
                others[one.model_share] = others.get(one.model_share, 0.0) + busy_s
        taken_s = sum(
            min(busy_s, seconds * other.weight / share.weight) for other, busy_s in others.items()
        )
        return seconds / (seconds + taken_s) if taken_s else 1.0

    def add(self, batcher: Batcher) -> None:
        with self.changed:
            self._batchers.append(batcher)

    def remove(self, batcher: Batcher) -> None:
        """Take no more texts of this batcher, and wait for its current passes."""
        until = time.monotonic() + JOIN_SECONDS
        with self.changed:
            if batcher in self._batchers:
                self._batchers.remove(batcher)
            while batcher.passes_in_hand and (left := until - time.monotonic()) > 0:
                self.changed.wait(left)

    def close(self) -> None:
        """Stop the threads after the current passes."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        until = time.monotonic() + JOIN_SECONDS
        for worker in self.all:
            worker.thread.join(max(0.0, until - time.monotonic()))

    def release(self, worker: _Worker) -> None:
        with self.changed:
            if worker.slots:
                self.free_passes += 1
                for one in worker.parts:
                    one.batcher.passes_in_hand -= 1
                    one.batcher.tokens_in_hand -= one.num_tokens
            self.free_slots += worker.slots
            worker.slots = 0
            if all(one.batcher in self._batchers for one in worker.parts):
                self.changed.notify()  # another worker may begin while this one reports
            else:
                self.changed.notify_all()  # `remove` waits for this pass

    def _make_thread(self, worker: _Worker) -> SupervisedThread:
        step = functools.partial(self._serve_once, worker)
        fail = functools.partial(self._fail, worker)
        return SupervisedThread("forward", step, fail, computes=True)

    def _fail(self, worker: _Worker, error: BaseException) -> None:
        # An error that a pass should not raise: the worker drops its current texts and starts over.
        logger.error("A worker failed and is restarted", exc_info=error)
        for one in worker.parts:
            if one.texts:
                one.batcher.health.works(worker.slots)
        self.release(worker)
        for one in worker.parts:
            one.batcher.fail(one, error)
        worker.parts = []

    def _serve_once(self, worker: _Worker) -> bool:
        """Wait for texts, run a pass and report it; False once closed."""
        with self.changed:
            batcher = self._wait(worker)
            if batcher is None:
                return False
            now = time.monotonic()
            expired = [(one, texts) for one in self._batchers if (texts := one.queue.expire(now))]
            self._take(worker, batcher)
        for one, texts in expired:
            one.on_expired(texts)
        if worker.is_trying:
            batcher.try_engine(worker)
        elif worker.parts:
            self._run_pass(worker)
        worker.parts = []
        return True

    def _run_pass(self, worker: _Worker) -> None:
        """Run a worker's pass and report it."""
        parts, started = worker.parts, time.monotonic()
        together = self._read_together(worker) if len(parts) > 1 else {}
        outcomes = [one.batcher.answer(worker, one, together) for one in parts]
        seconds = time.monotonic() - started
        worker.thread.busy_since = None
        num_tokens = sum(one.num_tokens for one in parts)
        for one, found in zip(parts, outcomes, strict=True):
            # To fail at once is no speed: it would promise answers that nobody can give in time.
            if not all(isinstance(outcome, Exception) for outcome in found):
                one.batcher.measure(worker.slots, num_tokens, seconds)
        # Before the report, so that the next pass begins while this thread tells the callers.
        self.release(worker)
        for one, found in zip(parts, outcomes, strict=True):
            one.batcher.report(FinishedPass(one.texts, found, started, seconds), one.num_tokens)

    def _read_together(self, worker: _Worker) -> Mapping[Engine, Reading]:
        """What all models of a pass make of their texts, by their engines; a text that several
        models are asked about is read once. Nothing if it fails: then each reads its own texts.
        """
        texts = [text for one in worker.parts for text in one.texts]
        places: dict[bytes, int] = {}
        rows = [places.setdefault(text.ids.tobytes(), len(places)) for text in texts]
        batch = TokenBatch.of([np.frombuffer(ids, np.int32) for ids in places])
        worker.thread.busy_since = time.monotonic()
        read = worker.parts[0].batcher.read_for_all(batch, worker.slots)
        found: dict[Engine, Reading] = {}
        start = 0
        for one in worker.parts:
            own = rows[start : start + len(one.texts)]
            start += len(own)
            # A model that is no longer served reads its last texts on its own.
            if (reading := read.get(one.batcher.engine)) is not None:
                scores, deciding = reading
                found[one.batcher.engine] = scores[own], None if deciding is None else deciding[own]
        return found

    def _wait(self, worker: _Worker) -> Batcher | None:
        """Wait until a batcher has texts, or a broken engine is to be tried; None once closed."""
        while not self._closed:
            broken = [one for one in self._batchers if one.health.failure is not None]
            if self.free_slots:
                # Without a try from time to time a broken engine would stay so: it gets no texts.
                now = time.monotonic()
                for one in broken:
                    since = min(one.health.broken_s, now - one.tried_at)
                    if since >= self._retry_interval_s and not one.passes_in_hand:
                        worker.is_trying = True
                        return one
                if (found := self._next()) is not None:
                    return found
            self.changed.wait(self._retry_interval_s if broken else None)
        return None

    def _next(self) -> Batcher | None:
        """Whose texts come next: of those that have any, the one that is served first in the fair
        order.
        """
        ready = [one for one in self._batchers if one.has_work]
        if not ready:
            return None
        return min(ready, key=self._turn)

    def _turn(self, batcher: Batcher) -> tuple[float, float]:
        # First between models, then between the batchers of one. What was without texts for a while
        # starts now: it gets no credit for that time.
        share = batcher.model_share
        between_models = max(share.served_until, self._virtual_time)
        return between_models, max(batcher.served_until, share.virtual_time)

    def _take(self, worker: _Worker, batcher: Batcher) -> None:
        if worker.is_trying:
            batcher.tried_at = time.monotonic()
            worker.slots = 1
            worker.parts = [_Part(batcher, [])]
        elif len(batcher.queue):
            # Divide what waits over the passes that may run at once, and the free slots among them.
            num_parts, slots = spread(
                self.num_waiting, self.free_slots, self.free_passes, len(self.all)
            )
            worker.parts = self._parts(batcher, num_parts)
            num_tokens = sum(one.num_tokens for one in worker.parts)
            # A short pass gains nothing from more slots; those it leaves go to the next worker,
            # which is woken below.
            worker.slots = min(slots, batcher.num_slots, useful_slots(num_tokens))
        else:
            return
        for one in worker.parts:
            one.batcher.passes_in_hand += 1
            one.batcher.tokens_in_hand += one.num_tokens
        self.free_slots -= worker.slots
        self.free_passes -= 1
        if self.free_slots and self.num_waiting:
            self.changed.notify()

    def _parts(self, batcher: Batcher, num_parts: int) -> list[_Part]:
        """Take the texts of a pass: of this batcher, and as far as they leave room, of others on
        the same encoder, which computes all of them at once.
        """
        others = [one for one in self._batchers if one.may_join(batcher)]
        everything = sum(one.queue.num_tokens for one in (batcher, *others))
        room = min(batcher.queue.max_batch_tokens, everything // num_parts)
        parts: list[_Part] = []
        for one in (batcher, *sorted(others, key=self._turn)):
            limit = room if parts else None
            texts = one.queue.take(num_parts, time.monotonic(), one.tokens_per_second, limit)
            if texts:
                part = _Part(one, texts)
                parts.append(part)
                room -= part.num_tokens
                # Virtual time is that of the first: another one is served ahead of its turn, which
                # must not move the turn of those who wait.
                self._charge(part, moves_time=one is batcher)
        return parts

    def _charge(self, part: _Part, *, moves_time: bool) -> None:
        batcher, share = part.batcher, part.batcher.model_share
        between_models, within_model = self._turn(batcher)
        if moves_time:
            self._virtual_time, share.virtual_time = between_models, within_model
        seconds = part.num_tokens / batcher.tokens_per_second
        share.served_until = between_models + seconds / share.weight
        batcher.served_until = within_model + seconds


class Batcher:
    """Takes the texts of one model from a fair queue into forward passes."""

    def __init__(
        self,
        model: BatchedModel,
        queue: FairQueue,
        metrics: ModelMetrics,
        on_finished: Callable[[FinishedPass], None],
        on_expired: Callable[[Sequence[QueuedText]], None],
        workers: Workers,
        share: Share | None = None,
    ) -> None:
        """Args:
        queue: where texts wait; from here on only the batcher and its workers use it.
        on_finished: receives every text that a worker took, once; called from worker threads.
        on_expired: receives the texts whose deadline passed in the queue; called from worker
            threads.
        workers: run the passes, and may be shared with other batchers.
        share: the one of its model, by default its own.
        """
        engine = model.engine
        self.health = EngineHealth(engine, model.good_ids)
        self.queue = queue
        self.on_expired = on_expired
        self.model_share = share or Share()
        self.engine = engine
        self.encoder = model.encoder
        self._answering = model.answering
        self._metrics = metrics
        self._on_finished = on_finished
        # Of the last passes, the older the less: their tokens, and their time as if each had taken
        # all slots. The quotient is the speed by which answers are promised.
        self._tokens_done = model.tokens_per_second * _FIRST_SPEED_S
        self._busy_s = _FIRST_SPEED_S
        # For the workers, under their lock: what is being run, the end of its last pass in the fair
        # order, and when a broken engine was last tried.
        self.tokens_in_hand = self.passes_in_hand = 0
        self.served_until = self.tried_at = 0.0
        self._closed = False
        self._workers = workers
        self._workers.add(self)

    @property
    def num_slots(self) -> int:
        return self.engine.num_slots

    @property
    def has_work(self) -> bool:
        """Whether another pass may begin: no more at once than the engine has slots."""
        return len(self.queue) > 0 and self.passes_in_hand < self.num_slots

    def may_join(self, other: Batcher) -> bool:
        """Whether texts may be read in a pass of another model."""
        shares = self.encoder is not None and self.encoder is other.encoder and self is not other
        both_work = self.health.failure is None and other.health.failure is None
        return shares and both_work and self.has_work

    @property
    def queued_tokens(self) -> int:
        return self.queue.num_tokens

    @property
    def unanswered_tokens(self) -> int:
        return self.queue.num_tokens + self.tokens_in_hand

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all slots together, over the last seconds of work."""
        return self._tokens_done / self._busy_s

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds that the longest current pass has taken; 0 if there is none."""
        mine = (
            worker.thread.busy_s
            for worker in self._workers.all
            if any(one.batcher is self for one in worker.parts)
        )
        return max(mine, default=0.0)

    @property
    def is_alive(self) -> bool:
        return not self._closed and self._workers.are_alive

    def put(self, texts: Iterable[tuple[Flow, QueuedText]]) -> None:
        with self._workers.changed:
            for flow, text in texts:
                self.queue.put(flow, text)
            # One worker, however many texts came: if it leaves texts and slots over, it calls the
            # next one. To wake all of them would cost each a turn with the lock, for nothing.
            self._workers.changed.notify()

    def share(self, flow: Flow, text: QueuedText, deadline: float) -> bool:
        """Let another call wait for a text that is queued already; False if it is too late."""
        with self._workers.changed:
            if text.is_expired:
                return False
            text.deadline = max(text.deadline, deadline)
            if text.is_waiting:
                self.queue.prioritize(flow, text)
            return True

    def remove(self, text: QueuedText) -> bool:
        with self._workers.changed:
            return self.queue.remove(text)

    def close(self) -> None:
        """End after the current passes; waiting texts are never taken."""
        self._closed = True
        self._workers.remove(self)

    # Called by the workers.

    def try_engine(self, worker: _Worker) -> None:
        """Try a broken engine with the known text; requests are refused meanwhile, so no pass would
        show that it recovered.
        """
        worker.thread.busy_since = time.monotonic()
        self.health.works(worker.slots)
        worker.thread.busy_since = None
        worker.is_trying = False
        self._workers.release(worker)

    def measure(self, slots: int, num_tokens: int, seconds: float) -> None:
        """Learn the speed from a pass."""
        # An engine that runs one pass at a time, on threads of its own, has the machine for it.
        busy_s = seconds * slots / self.num_slots
        with self._workers.changed:
            # An exponentially weighted mean by time worked, so that a quiet night does not fade
            # what was measured.
            kept = 0.5 ** (busy_s / _SPEED_HALF_LIFE_S)
            self._tokens_done = self._tokens_done * kept + num_tokens
            self._busy_s = self._busy_s * kept + busy_s

    def read_for_all(self, batch: TokenBatch, slots: int) -> Mapping[Engine, Reading]:
        """What all models on this one's encoder make of texts; nothing if that fails."""
        try:
            return self.encoder.read_all(batch, slots)
        except Exception:
            self._metrics.worker_failed()
            logger.exception("A forward pass for several models failed")
            return {}

    def report(self, done: FinishedPass, num_tokens: int) -> None:
        self._on_finished(done)
        self._metrics.batch_done(len(done.texts), num_tokens, done.seconds)

    def answer(
        self, worker: _Worker, part: _Part, together: Mapping[Engine, Reading]
    ) -> Sequence[Outcome]:
        """What becomes of this model's part of a pass; if the engine itself fails, its texts may be
        sent again.

        ``together``: what has been read of all parts at once.
        """
        # If every text of a pass fails, either the texts or the engine are bad. A known good text
        # tells: then either each text hears of its own failure, or all may be sent again elsewhere.
        if self.health.failure is None:
            outcomes = self._outcomes(worker, part.texts, together.get(self.engine))
            if not all(isinstance(outcome, ForwardError) for outcome in outcomes):
                self.health.pass_answered()
                return outcomes
            if self.health.works(worker.slots):
                return outcomes
        elif self.health.works(worker.slots):
            return self._outcomes(worker, part.texts)
        return [WorkerDownError(self.health.failure or _ENGINE_BROKEN)] * len(part.texts)

    def _outcomes(
        self, worker: _Worker, texts: Sequence[QueuedText], reading: Reading | None = None
    ) -> list[Outcome]:
        try:
            return self._forward(worker, texts, reading)
        except Exception as error:
            self._metrics.worker_failed()
            logger.exception("A forward pass of %d texts failed", len(texts))
            if len(texts) == 1:
                what = f"the model failed on this text ({type(error).__name__}); the log has more"
                return [ForwardError(what)]
        # One bad text must not fail its neighbors, so each is tried alone.
        return [outcome for text in texts for outcome in self._outcomes(worker, [text])]

    def _forward(
        self, worker: _Worker, texts: Sequence[QueuedText], reading: Reading | None
    ) -> list[Outcome]:
        worker.thread.busy_since = time.monotonic()
        batch = TokenBatch.of([text.ids for text in texts])
        if reading is not None:
            logits, deciding = reading
        elif isinstance(self.engine, WindowedEngine):
            logits, deciding = self.engine.read(batch, worker.slots)
        else:
            logits, deciding = self.engine.logits(batch, worker.slots), None
        # Else answers would go to the wrong texts, which nobody would ever notice.
        if len(logits) != len(texts):
            what = f"{self.engine.name} gave {len(logits)} rows of scores for {len(texts)} texts"
            raise ValueError(what)
        rows = values_of(self._answering, batch, logits)
        if deciding is not None:
            for row, windows in zip(rows, deciding.tolist(), strict=True):
                if row is not None:
                    row.decided_by = windows
        what = "the model answers this text with NaN"
        return [ForwardError(what) if row is None else row for row in rows]

    def fail(self, part: _Part, error: BaseException) -> None:
        self._metrics.worker_failed()
        if part.texts:
            what = f"the worker of this text failed ({type(error).__name__}); the log has more"
            outcomes = [ForwardError(what)] * len(part.texts)
            self._on_finished(FinishedPass(part.texts, outcomes, time.monotonic(), 0.0))


class _Part:
    """The texts of one model in a pass."""

    __slots__ = ("batcher", "num_tokens", "texts")

    def __init__(self, batcher: Batcher, texts: Sequence[QueuedText]) -> None:
        self.batcher = batcher
        self.texts = texts
        self.num_tokens = sum(text.num_tokens for text in texts)


class _Worker:
    """One worker thread, the parts of its current pass, and the slots that it uses."""

    __slots__ = ("is_trying", "parts", "slots", "thread")

    def __init__(self, thread_of: Callable[[_Worker], SupervisedThread]) -> None:
        self.slots = 0
        self.is_trying = False
        self.parts: Sequence[_Part] = []
        self.thread = thread_of(self)
