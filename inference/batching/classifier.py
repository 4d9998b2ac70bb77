"""The asynchronous interface of one loaded model: texts in on the event loop, one
future per text out.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.text import Text
from inference.batching.batcher import (
    ASSUMED_TOKENS_PER_SECOND,
    BatchedModel,
    Batcher,
    FinishedPass,
)
from inference.batching.cache import AnswerCache, Values
from inference.batching.calls import Answer, Call, Caller, Outcome, TextLengths, deliver
from inference.batching.engine_health import EngineHealth
from inference.batching.scheduler import BULK_SHARE, FairQueue, QueuedText, overrun_s
from inference.batching.tokenizing import EncodedText, TokenizerThread
from inference.engines.model_loader import ModelLoader
from inference.errors import DeadlineExceededError, QueueFullError, WorkerDownError
from inference.metrics import ServerMetrics

# Seconds after which a stream that waits for room looks again at the earliest.
_SHORTEST_RETRY_S = 0.05


@dataclass(frozen=True)
class QueueLimits:
    """The limits of the queue.

    ``max_batch_tokens``: tokens per forward pass, including padding if the engine pads; 0 = the
    engine's choice. ``max_wait_seconds``: a text whose answer would take longer, at the measured
    speed, is refused. ``cache_entries``: answers to remember; 0 = none.
    """

    max_batch_tokens: int = 0
    max_wait_seconds: float = 5.0
    cache_entries: int = 0

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 0:
            raise ValueError(f"max_batch_tokens {self.max_batch_tokens}: must be at least 0")
        if self.cache_entries < 0:
            raise ValueError(f"cache_entries {self.cache_entries}: must be at least 0")
        if self.max_wait_seconds <= 0:
            raise ValueError(f"max_wait_seconds {self.max_wait_seconds}: must be greater than 0")


def length_window(max_batch_tokens: int) -> int:
    """Among how many of the oldest texts to look for similar lengths: enough for a pass."""
    return max(64, max_batch_tokens // 8)


class Classifier:
    """Answers texts with one model, on its own threads; used from one event loop."""

    def __init__(self, model: ModelLoader, limits: QueueLimits, metrics: ServerMetrics) -> None:
        """Raises:
        ValueError: a text of the model's full length would not fit into a forward pass.
        """
        longest = model.tokenizer.most_ids
        budget = limits.max_batch_tokens or max(model.engine.batch_tokens, longest)
        if budget < longest:
            raise ValueError(
                f"max_batch_tokens {budget}: must be at least the model's max_length, {longest}"
            )
        self._lengths = TextLengths(longest)
        self._max_wait_s = limits.max_wait_seconds
        self._first_tokens_per_second = model.tokens_per_second or ASSUMED_TOKENS_PER_SECOND
        self._metrics = metrics
        # Accepted and not fully answered; touched on the event loop only.
        self._calls: set[Call] = set()
        self._all_answered = asyncio.Event()
        # Guards the next two, and the callers of every queued text. Always taken before the
        # batcher's own lock, never after it, so the two cannot wait for each other.
        self._lock = threading.Lock()
        # By the bytes of their token ids; the payload is the list of callers, more than one if
        # several sent the same text.
        self._on_their_way: dict[bytes, QueuedText] = {}
        self._cache = AnswerCache(limits.cache_entries)
        queue = FairQueue(budget, pads=model.engine.pads, length_window=length_window(budget))
        batched = BatchedModel(
            model.engine,
            model.tokenizer.encode(["News"])[0].ids,
            model.answering,
            self._first_tokens_per_second,
        )
        self._batcher = Batcher(batched, queue, metrics, self._finish, self._expire)
        self._tokenizing = TokenizerThread(model.tokenizer, metrics, self._lengths, self._enqueue)

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a pass; texts not tokenized yet count with expected tokens."""
        return self._batcher.queued_tokens + self._tokenizing.reserved_tokens

    @property
    def queue_seconds(self) -> float:
        """Seconds until everything accepted will be answered, at the measured speed."""
        return self._unanswered_tokens / self.tokens_per_second

    @property
    def _unanswered_tokens(self) -> int:
        return self._batcher.unanswered_tokens + self._tokenizing.reserved_tokens

    @property
    def tokens_per_second(self) -> float:
        return self._batcher.tokens_per_second

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds that the longest current pass or tokenizer call has taken; 0 if none."""
        return max(self._batcher.heartbeat_age_s, self._tokenizing.thread.busy_s)

    @property
    def is_alive(self) -> bool:
        return self._tokenizing.thread.is_alive and self._batcher.is_alive

    @property
    def health(self) -> EngineHealth:
        return self._batcher.health

    def refuse_if_down(self) -> None:
        if not self.is_alive:
            raise WorkerDownError(
                "the classifier is stopped; try again, another one may be running by now"
            )
        if self.health.failure is not None:
            raise WorkerDownError(self.health.failure)

    @property
    def is_full(self) -> bool:
        """Whether a single text of usual length would be refused now."""
        waiting, num_tokens = self._unanswered_tokens, int(self._lengths.tokens_per_text)
        return overrun_s(waiting, num_tokens, 1, self._expected_speed, self._max_wait_s) > 0

    def full_error(self) -> QueueFullError | None:
        """What it would be refused with, if it would be."""
        return self._refusal(int(self._lengths.tokens_per_text), 1)

    def most_texts(self, text: Text) -> int:
        """How many texts as long as this one a single call may have while nothing else waits."""
        most_tokens = BULK_SHARE * self._max_wait_s * self._expected_speed
        return max(1, int(most_tokens / self._lengths.expected(text)))

    def submit(self, texts: Sequence[Text], timeout_s: float) -> list[asyncio.Future[Answer]]:
        """Accept the texts of one call.

        Args:
            texts: at least one, as the model reads them: single texts, or pairs.
            timeout_s: seconds after which unanswered texts fail.

        Returns:
            One future per text, in order. Each ends in an `Answer` or in one of
            `DeadlineExceededError`, `ForwardError`, `RefusedTextError` (a blank text) and
            `WorkerDownError`; cancelling it removes the text from the queue.

        Raises:
            QueueFullError: the last of them would be answered too late; none is accepted.
            WorkerDownError: the classifier is closed, or its engine fails on every text.
        """
        self.refuse_if_down()
        # All or nothing, and at once: a call that is refused now may go to another server, while
        # one that waits in vain has cost its caller the whole timeout.
        call = Call(texts, timeout_s, self._max_wait_s, self._lengths)
        if (refusal := self._refusal(call.reserved_tokens, len(texts))) is not None:
            raise refusal
        self._calls.add(call)
        for caller in call.callers:
            caller.future.add_done_callback(functools.partial(self._on_done, caller))
        call.timer = call.loop.call_later(timeout_s, self._time_out, call)
        self._tokenizing.put(call)
        return [caller.future for caller in call.callers]

    async def drain(self) -> None:
        while self._calls:
            self._all_answered.clear()
            await self._all_answered.wait()

    def close(self) -> None:
        """Stop the threads after the current passes, and fail what is left."""
        # First, so that no pass begins once this classifier is not alive.
        self._batcher.close()
        self._tokenizing.close()
        error = WorkerDownError("the classifier was closed before this text was answered")
        deliver((caller, error) for call in list(self._calls) for caller in call.callers)

    def _refusal(self, num_tokens: int, num_texts: int) -> QueueFullError | None:
        waiting, speed = self._unanswered_tokens, self._expected_speed
        too_late_s = overrun_s(waiting, num_tokens, num_texts, speed, self._max_wait_s)
        if too_late_s <= 0:
            return None
        # Two different remedies: a call that would fit into an empty queue may come again as it is;
        # a larger one would be refused for ever, so it is told to send fewer texts.
        answered_s = (waiting + num_tokens) / speed
        limit_s = answered_s - too_late_s
        would_fit = num_texts == 1 or num_tokens / speed <= limit_s
        retry_after_s = max(_SHORTEST_RETRY_S, too_late_s if would_fit else waiting / speed)
        return QueueFullError(
            f"{num_texts} more texts would be answered after {answered_s:.2f} s, limit "
            f"{limit_s:.2f} s (MAX_WAIT_SECONDS {self._max_wait_s:g}); "
            + (
                f"try again in {retry_after_s:.2f} s"
                if would_fit
                else "send fewer texts in one call"
            ),
            retry_after_s,
            "queue_full" if would_fit else "call_too_large",
        )

    @property
    def _expected_speed(self) -> float:
        """Tokens per second. One slow pass must not keep out calls with many texts until others
        have shown the true speed.
        """
        speed = self.tokens_per_second
        return speed if self._unanswered_tokens else max(speed, self._first_tokens_per_second)

    def _on_done(self, caller: Caller, future: asyncio.Future[Answer]) -> None:
        if future.cancelled():
            self._metrics.dropped("cancelled")
            self._withdraw(caller)
        elif isinstance(future.exception(), DeadlineExceededError):
            self._metrics.dropped("expired")
            self._withdraw(caller)
        call = caller.call
        call.num_open -= 1
        if not call.num_open:
            call.timer.cancel()
            self._calls.discard(call)
            # The callers refer to the call: a cycle, which only the garbage collector would free,
            # in pauses of tens of milliseconds under load. A call that the tokenizer still has (all
            # its callers have gone) keeps them.
            if call.num_taken == len(call.callers):
                call.callers = []
            if not self._calls:
                self._all_answered.set()

    def _time_out(self, call: Call) -> None:
        for caller in call.callers:
            if not caller.future.done():
                caller.future.set_exception(call.deadline_error())

    def _withdraw(self, caller: Caller) -> None:
        """Remove a text from the queue unless another caller waits for it too."""
        with self._lock:
            text = caller.queued
            if text is None or caller not in text.payload:
                # Not tokenized yet, and will not be; or answered in this moment.
                return
            text.payload.remove(caller)
            # If a worker has it already, the pass is not stopped, and its answer goes to the cache.
            if not text.payload and self._batcher.remove(text):
                self._forget(text)

    def _enqueue(self, encoded: Sequence[EncodedText], seconds: float) -> None:
        """Queue what needs a forward pass, and answer the rest."""
        outcomes: list[tuple[Caller, Outcome]] = []
        fresh = []
        with self._lock:
            for caller, one in encoded:
                if isinstance(one, Exception):
                    outcomes.append((caller, one))
                    continue
                if caller.future.done():
                    continue
                caller.num_tokens, caller.truncated = one.num_tokens, one.truncated
                caller.tokenize_s, caller.passages = seconds, one.passages
                # Equal token ids give equal answers, also if the texts differ in what cleaning or
                # truncation removes. So the ids are the key of the cache and of joining.
                ids = np.array(one.ids, dtype=np.int32)
                key = ids.tobytes()
                known = self._remembered(key)
                if known is not None:
                    outcomes.append((caller, caller.answer(known)))
                elif not self._join(caller, key):
                    caller.queued = self._on_their_way[key] = QueuedText(
                        ids, caller.call.deadline, [caller], caller.call.promised
                    )
                    fresh.append((caller.call.flow, caller.queued))
            self._batcher.put(fresh)
        deliver(outcomes)

    def _remembered(self, key: bytes) -> Values | None:
        if not self._cache.max_entries:
            return None
        known = self._cache.get(key)
        if known is None:
            self._metrics.cache_miss()
        else:
            self._metrics.cache_hit()
        return known

    def _join(self, caller: Caller, key: bytes) -> bool:
        """Let the caller wait for an identical text that is already being classified."""
        text = self._on_their_way.get(key)
        if text is None or not self._batcher.share(caller.call.flow, text, caller.call.deadline):
            return False
        text.payload.append(caller)
        caller.queued = text
        self._metrics.deduplicated()
        return True

    def _forget(self, text: QueuedText) -> None:
        key = text.ids.tobytes()
        if self._on_their_way.get(key) is text:
            del self._on_their_way[key]

    def _finish(self, done: FinishedPass) -> None:
        outcomes: list[tuple[Caller, Outcome]] = []
        with self._lock:
            for text, outcome in zip(done.texts, done.outcomes, strict=True):
                self._forget(text)
                if isinstance(outcome, Exception):
                    outcomes += [(caller, outcome) for caller in text.payload]
                else:
                    self._cache.put(text.ids.tobytes(), outcome)
                    outcomes += [(caller, caller.answer(outcome, done)) for caller in text.payload]
                text.payload.clear()  # they refer to the text
        deliver(outcomes)
        for _, outcome in outcomes:
            if isinstance(outcome, Answer):
                self._metrics.waited(outcome.queue_s)

    def _expire(self, texts: Sequence[QueuedText]) -> None:
        outcomes: list[tuple[Caller, Outcome]] = []
        with self._lock:
            for text in texts:
                self._forget(text)
                outcomes += [(caller, caller.call.deadline_error()) for caller in text.payload]
                text.payload.clear()
        deliver(outcomes)
