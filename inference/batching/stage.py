"""One model's part in answering texts: its tokenizer's thread, the answers that it remembers, the
texts that are on their way to it, and its batcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.text import TextTokenizer
from inference.batching.batcher import (
    ASSUMED_TOKENS_PER_SECOND,
    BatchedModel,
    Batcher,
    EncoderOfSeveral,
    FinishedPass,
    Share,
    Workers,
)
from inference.batching.cache import AnswerCache, Values
from inference.batching.calls import Caller, Group, TextLengths
from inference.batching.scheduler import FairQueue, QueuedText
from inference.batching.tokenizing import EncodedText, TokenizerThreads, Tokenizing
from inference.engines.answering import Answering
from inference.engines.base import Engine
from inference.metrics import ModelMetrics

# What became of a text in a stage, with the pass that it was in, None if it needed none.
Found = tuple[Caller, Values | Exception, FinishedPass | None]


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


class Model(Protocol):
    """What a stage has to know of a `ModelLoader`."""

    engine: Engine
    tokenizer: TextTokenizer
    answering: Answering
    tokens_per_second: float | None
    encoder: EncoderOfSeveral | None


def length_window(max_batch_tokens: int) -> int:
    """Among how many of the oldest texts to look for similar lengths: enough for a pass."""
    return max(64, max_batch_tokens // 8)


class Stage:
    """Takes the texts of callers, and reports what its model makes of each, once."""

    def __init__(
        self,
        place: int,
        model: Model,
        limits: QueueLimits,
        metrics: ModelMetrics,
        report: Callable[[Stage, Sequence[Found]], None],
        machine: tuple[Workers, Share, TokenizerThreads],
    ) -> None:
        """Args:
            place: of a cascade, 0 for the small model and 1 for the big one; else 0.
            report: called from the stage's threads.
            machine: the workers, the share of them that its model has, and the tokenizers' threads.

        Raises:
            ValueError: a text of the model's full length would not fit into a forward pass.
        """
        longest = model.tokenizer.most_ids
        budget = limits.max_batch_tokens or max(model.engine.batch_tokens, longest)
        if budget < longest:
            raise ValueError(
                f"max_batch_tokens {budget}: must be at least the model's max_length, {longest}"
            )
        self.place = place
        self.lengths = TextLengths(longest)
        self.first_tokens_per_second = model.tokens_per_second or ASSUMED_TOKENS_PER_SECOND
        self._metrics = metrics
        self._report = report
        # Guards the next two, and the callers of every queued text. Always taken before the
        # workers' own lock, never after it, so the two cannot wait for each other.
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
            self.first_tokens_per_second,
            model.encoder,
        )
        workers, share, tokenizers = machine
        self.batcher = Batcher(batched, queue, metrics, self._finish, self._expire, workers, share)
        self._tokenizing = Tokenizing(metrics, self.lengths, self._enqueue)
        self._tokenizer = tokenizers.thread_of(model.tokenizer)
        self._tokenizer.add(self._tokenizing)

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a pass; texts not tokenized yet count with expected tokens."""
        return self.batcher.queued_tokens + self._tokenizing.reserved_tokens

    @property
    def unanswered_tokens(self) -> int:
        return self.batcher.unanswered_tokens + self._tokenizing.reserved_tokens

    @property
    def heartbeat_age_s(self) -> float:
        return max(self.batcher.heartbeat_age_s, self._tokenizer.thread.busy_s)

    @property
    def is_alive(self) -> bool:
        return self._tokenizer.thread.is_alive and self.batcher.is_alive

    def put(self, callers: Sequence[Caller]) -> None:
        for caller in callers:
            caller.stage = self
        expected = [self.lengths.expected(caller.text) for caller in callers]
        self._tokenizer.put(self._tokenizing, Group(list(callers), expected))

    def withdraw(self, caller: Caller) -> None:
        """Remove a text from the queue unless another caller waits for it too."""
        with self._lock:
            text = caller.queued
            if text is None or caller not in text.payload:
                # Not tokenized yet, and will not be; or answered in this moment.
                return
            text.payload.remove(caller)
            # If a worker has it already, the pass is not stopped, and its answer goes to the cache.
            if not text.payload and self.batcher.remove(text):
                self._forget(text)

    def close(self) -> None:
        # First, so that no pass begins once this stage is not alive.
        self.batcher.close()
        self._tokenizer.remove(self._tokenizing)

    def _enqueue(self, encoded: Sequence[EncodedText], seconds: float) -> None:
        """Queue what needs a forward pass, and report the rest."""
        found: list[Found] = []
        fresh = []
        with self._lock:
            for caller, one in encoded:
                if isinstance(one, Exception):
                    found.append((caller, one, None))
                    continue
                if caller.future.done():
                    continue
                caller.num_tokens, caller.truncated = one.num_tokens, one.truncated
                caller.tokenize_s += seconds
                caller.passages = one.passages
                # Equal token ids give equal answers, also if the texts differ in what cleaning or
                # truncation removes. So the ids are the key of the cache and of joining.
                ids = np.array(one.ids, dtype=np.int32)
                key = ids.tobytes()
                known = self._remembered(key)
                if known is not None:
                    found.append((caller, known, None))
                elif not self._join(caller, key):
                    caller.queued = self._on_their_way[key] = QueuedText(
                        ids, caller.call.deadline, [caller], caller.call.promised
                    )
                    fresh.append((caller.call.flows[self.place], caller.queued))
            self.batcher.put(fresh)
        self._report(self, found)

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
        if text is None or not self.batcher.share(
            caller.call.flows[self.place], text, caller.call.deadline
        ):
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
        found: list[Found] = []
        with self._lock:
            for text, outcome in zip(done.texts, done.outcomes, strict=True):
                self._forget(text)
                if not isinstance(outcome, Exception):
                    self._cache.put(text.ids.tobytes(), outcome)
                found += [(caller, outcome, done) for caller in text.payload]
                text.payload.clear()  # they refer to the text
        self._report(self, found)

    def _expire(self, texts: Sequence[QueuedText]) -> None:
        found: list[Found] = []
        with self._lock:
            for text in texts:
                self._forget(text)
                found += [(one, one.call.deadline_error(), None) for one in text.payload]
                text.payload.clear()
        self._report(self, found)
