"""The threads that turn the texts of waiting calls into token ids, many at once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakValueDictionary

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


@dataclass(slots=True, eq=False)
class Tokenizing:
    """What a model has at the thread of its tokenizer.

    ``on_encoded``: receives the model's texts of a round with their results and the round's
    seconds, called from the thread. ``reserved_tokens``: what its texts count as until then.
    """

    metrics: ModelMetrics
    lengths: TextLengths
    on_encoded: Callable[[Sequence[EncodedText], float], None]
    reserved_tokens: int = 0
    groups: deque[Group] = field(default_factory=deque)


class _Chosen(NamedTuple):
    """A text of a round."""

    model: Tokenizing
    caller: Caller
    expected_tokens: int


class TokenizerThread:
    """Takes one text of each waiting group in turn, encodes them together, and passes them on.

    Models with the same tokenizer share its thread. With a thread each, five models that were asked
    in turn needed 2.4 times as many rounds per text as one model, and threads woke twice as often.
    Models take turns, so that many calls for one do not delay those for another.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._changed = threading.Condition()  # guards everything below, and the models' groups
        self._models: set[Tokenizing] = set()
        self._waiting: deque[Tokenizing] = deque()  # those that have groups, in turn
        self._round: Sequence[_Chosen] = []
        self.is_closed = False
        self.thread = SupervisedThread("tokenize", self._encode_round, self._fail)
        self.thread.start()

    def add(self, model: Tokenizing) -> None:
        with self._changed:
            self._models.add(model)

    def put(self, model: Tokenizing, group: Group) -> None:
        with self._changed:
            if not model.groups:
                self._waiting.append(model)
            model.groups.append(group)
            model.reserved_tokens += sum(group.expected_tokens)
            self._changed.notify()

    def remove(self, model: Tokenizing) -> None:
        """Tokenize no more texts of a model; with the last one, the thread ends after its round."""
        with self._changed:
            self._models.discard(model)
            if model.groups:
                self._waiting.remove(model)
                model.groups.clear()
            self.is_closed = not self._models
            self._changed.notify_all()
        if self.is_closed:
            self.thread.join(JOIN_SECONDS)

    def _encode_round(self) -> bool:
        with self._changed:
            while not (self._waiting or self.is_closed):
                self._changed.wait()
            if self.is_closed:
                return False
            chosen = self._round = self._next_texts()
        # Without the lock from here on: `put` is called on the event loop, which must not wait for
        # the tokenizer.
        started = self.thread.busy_since = time.monotonic()
        wanted = [one for one in chosen if not one.caller.future.done()]
        encoded = self._encode(wanted)
        seconds = time.monotonic() - started
        self.thread.busy_since = None
        by_model: dict[Tokenizing, list[EncodedText]] = {one.model: [] for one in chosen}
        for (model, caller, _), one in zip(wanted, encoded, strict=True):
            if isinstance(one, Encoded):
                model.lengths.add(caller.text, one.num_tokens)
            by_model[model].append((caller, one))
        # In this order: the batcher counts the texts before they leave the reserved tokens, so the
        # sum of both, by which calls are accepted, is never too small.
        for model, texts in by_model.items():
            model.on_encoded(texts, seconds)
        self._leave_round()
        for model, texts in by_model.items():
            model.metrics.tokenized(len(texts), seconds)
        return True

    def _next_texts(self) -> list[_Chosen]:
        chosen: list[_Chosen] = []
        size = 0
        # One text of each model in turn, and of each of its calls, so that a call with one text
        # waits for one round at most, however many texts the calls before it have.
        while self._waiting and len(chosen) < TEXTS_PER_ROUND and size < CHARS_PER_ROUND:
            model = self._waiting.popleft()
            group = model.groups.popleft()
            caller = group.callers[group.num_taken]
            chosen.append(_Chosen(model, caller, group.expected_tokens[group.num_taken]))
            size += num_chars(caller.text)
            group.num_taken += 1
            if group.num_taken < len(group.callers):
                model.groups.append(group)
            if model.groups:
                self._waiting.append(model)
        return chosen

    def _encode(self, chosen: Sequence[_Chosen]) -> list[Encoded | Exception]:
        texts = [one.caller.text for one in chosen]
        try:
            cleaned = [self._tokenizer.clean_all(text) for text in texts]
            encoded = self._tokenizer.encode_cleaned(cleaned)
        except Exception as error:
            # Once, though models may share the round: whose text it was shows below.
            chosen[0].model.metrics.worker_failed()
            logger.error("The tokenizer failed on %d texts (%s)", len(texts), type(error).__name__)
            if len(texts) == 1:
                return [ForwardError(f"the tokenizer failed on this text ({type(error).__name__})")]
            # One text that it cannot read must not fail the others of the round.
            return [result for one in chosen for result in self._encode([one])]
        for i, one in enumerate(encoded):
            if one.passages:
                encoded[i] = replace(one, passages=self._tokenizer.locate(texts[i], one.passages))
        return [_unless_blank(text, one) for text, one in zip(cleaned, encoded, strict=True)]

    def _leave_round(self) -> Sequence[_Chosen]:
        with self._changed:
            chosen, self._round = self._round, []
            for one in chosen:
                one.model.reserved_tokens -= one.expected_tokens
        return chosen

    def _fail(self, error: BaseException) -> None:
        # Anything else than what the tokenizer may raise: drop the current texts and start over.
        logger.error("The tokenizer's thread failed and is restarted (%s)", type(error).__name__)
        failure = ForwardError(f"the tokenizer's thread failed ({type(error).__name__})")
        dropped = self._leave_round()
        deliver((one.caller, failure) for one in dropped)
        for model in {one.model for one in dropped}:
            model.metrics.worker_failed()


class TokenizerThreads:
    """One thread for each tokenizer that models use; only used on the event loop."""

    def __init__(self) -> None:
        # A thread refers to its tokenizer, and ends with the last model that uses it.
        self._running: WeakValueDictionary[TextTokenizer, TokenizerThread] = WeakValueDictionary()

    def thread_of(self, tokenizer: TextTokenizer) -> TokenizerThread:
        """The thread that the models with this very tokenizer share."""
        thread = self._running.get(tokenizer)
        if thread is None or thread.is_closed:
            thread = self._running[tokenizer] = TokenizerThread(tokenizer)
        return thread


def _unless_blank(cleaned: Text, encoded: Encoded) -> Encoded | RefusedTextError:
    # Whoever reports it names the text before this.
    if not encoded.blank:
        return encoded
    if isinstance(cleaned, str):
        return RefusedTextError("blank_text", "is blank: there is nothing to classify")
    which = "first" if 0 in encoded.blank else "second"
    return RefusedTextError("blank_text", f"has a blank {which} text: there is nothing to classify")
