"""The thread that turns the texts of waiting calls into token ids, many at once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.text import Encoded, Text, TextTokenizer, num_chars
from inference.batching.calls import Caller, Group, TextLengths, deliver
from inference.batching.supervision import JOIN_SECONDS, SupervisedThread
from inference.errors import ForwardError, RefusedTextError
from inference.metrics import ModelMetrics

logger = logging.getLogger(__name__)

# Characters per round, a few milliseconds of work, so that single texts get in between those of a
# large call.
TEXTS_PER_ROUND = 32
CHARS_PER_ROUND = 16_384

EncodedText = tuple[Caller, Encoded | Exception]


class TokenizerThread:
    """Takes one text of each waiting group in turn, encodes them together, and passes them on."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        metrics: ModelMetrics,
        lengths: TextLengths,
        on_encoded: Callable[[Sequence[EncodedText], float], None],
    ) -> None:
        """``on_encoded`` receives the texts of a round with their results and the round's seconds,
        called from the thread.
        """
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._lengths = lengths
        self._on_encoded = on_encoded
        self._changed = threading.Condition()  # guards everything below
        self._closed = False
        self._groups: deque[Group] = deque()
        self._round: list[Caller] = []
        self._round_tokens = 0
        self.reserved_tokens = 0
        self.thread = SupervisedThread("tokenize", self._encode_round, self._fail)
        self.thread.start()

    def put(self, group: Group) -> None:
        with self._changed:
            self._groups.append(group)
            self.reserved_tokens += sum(group.expected_tokens)
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread after the current round; waiting texts are not tokenized."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.thread.join(JOIN_SECONDS)

    def _encode_round(self) -> bool:
        with self._changed:
            while not (self._groups or self._closed):
                self._changed.wait()
            if self._closed:
                return False
            callers = self._round = self._next_callers()
        # Without the lock from here on: `put` is called on the event loop, which must not wait for
        # the tokenizer.
        started = self.thread.busy_since = time.monotonic()
        wanted = [caller for caller in callers if not caller.future.done()]
        encoded = self._encode([caller.text for caller in wanted])
        seconds = time.monotonic() - started
        self.thread.busy_since = None
        for caller, one in zip(wanted, encoded, strict=True):
            if isinstance(one, Encoded):
                self._lengths.add(caller.text, one.num_tokens)
        # In this order: the batcher counts the texts before they leave the reserved tokens, so the
        # sum of both, by which calls are accepted, is never too small.
        self._on_encoded(list(zip(wanted, encoded, strict=True)), seconds)
        self._leave_round()
        self._metrics.tokenized(len(wanted), seconds)
        return True

    def _next_callers(self) -> list[Caller]:
        chosen: list[Caller] = []
        size = 0
        # One text of each call in turn, so that a call with one text waits for one round at most,
        # however many texts the calls before it have.
        while self._groups and len(chosen) < TEXTS_PER_ROUND and size < CHARS_PER_ROUND:
            group = self._groups.popleft()
            chosen.append(group.callers[group.num_taken])
            self._round_tokens += group.expected_tokens[group.num_taken]
            size += num_chars(chosen[-1].text)
            group.num_taken += 1
            if group.num_taken < len(group.callers):
                self._groups.append(group)
        return chosen

    def _encode(self, texts: Sequence[Text]) -> list[Encoded | Exception]:
        try:
            cleaned = [self._tokenizer.clean_all(text) for text in texts]
            encoded = self._tokenizer.encode_cleaned(cleaned)
        except Exception as error:
            self._metrics.worker_failed()
            logger.error("The tokenizer failed on %d texts (%s)", len(texts), type(error).__name__)
            if len(texts) == 1:
                return [ForwardError(f"the tokenizer failed on this text ({type(error).__name__})")]
            # One text that it cannot read must not fail the others of the round.
            return [one for text in texts for one in self._encode([text])]
        for i, one in enumerate(encoded):
            if one.passages:
                encoded[i] = replace(one, passages=self._tokenizer.locate(texts[i], one.passages))
        return [_unless_blank(text, one) for text, one in zip(cleaned, encoded, strict=True)]

    def _leave_round(self) -> list[Caller]:
        with self._changed:
            callers, self._round = self._round, []
            self.reserved_tokens -= self._round_tokens
            self._round_tokens = 0
        return callers

    def _fail(self, error: BaseException) -> None:
        # Anything else than what the tokenizer may raise: drop the current texts and start over.
        logger.error("The tokenizer's thread failed and is restarted (%s)", type(error).__name__)
        failure = ForwardError(f"the tokenizer's thread failed ({type(error).__name__})")
        deliver((caller, failure) for caller in self._leave_round())
        self._metrics.worker_failed()


def _unless_blank(cleaned: Text, encoded: Encoded) -> Encoded | RefusedTextError:
    # Whoever reports it names the text before this.
    if not encoded.blank:
        return encoded
    if isinstance(cleaned, str):
        return RefusedTextError("blank_text", "is blank: there is nothing to classify")
    which = "first" if 0 in encoded.blank else "second"
    return RefusedTextError("blank_text", f"has a blank {which} text: there is nothing to classify")
