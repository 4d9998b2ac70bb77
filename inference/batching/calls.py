"""The callers' side of the queue: calls, their deadlines, and how answers get back to them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.text import Text, num_chars
from inference.batching.batcher import FinishedPass
from inference.batching.cache import Values
from inference.batching.scheduler import Flow, QueuedText
from inference.errors import DeadlineExceededError


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to one text, and what it took.

    Attributes:
        values: what the model answers, in the order of its labels.
        stage: which model of a cascade answered, 0 the small one and 1 the big one; else 0.
        num_tokens: token ids of the whole text, including special tokens.
        truncated: whether the model read only the beginning.
        cached: whether the answer comes from the cache.
        tokenize_s: seconds in the tokenizer.
        queue_s: seconds of waiting, for the tokenizer and for the forward pass.
        forward_s: seconds in the forward pass; 0 if cached.
        passages: where each window of a long text begins and ends in it, in characters; empty if it
            has one window.
    """

    values: Values
    num_tokens: int
    truncated: bool
    cached: bool
    tokenize_s: float
    queue_s: float
    forward_s: float
    passages: Sequence[tuple[int, int]] = ()
    stage: int = 0

    def passage(self, index: int) -> tuple[int, int] | None:
        """The part of a long text that decided the value at this place; None if the text was read
        as a whole.
        """
        return self.passages[self.values.decided_by[index]] if self.passages else None


Outcome = Answer | Exception


class TextLengths:
    """The usual number of tokens per text, learned from texts; one thread adds, others read."""

    # For English news and WordPiece, until other texts have been seen; a language without spaces
    # has about 1 token per character.
    _TOKENS_PER_CHAR = 0.25
    _TOKENS_PER_TEXT = 50.0
    # How much one text moves the averages.
    _WEIGHT = 0.01

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.tokens_per_char = self._TOKENS_PER_CHAR
        self.tokens_per_text = min(self._TOKENS_PER_TEXT, max_length)

    def add(self, text: Text, num_tokens: int) -> None:
        # Exponential averages: they follow a change of language within a few hundred texts, and one
        # strange text moves them by a hundredth of its difference.
        per_char = num_tokens / max(1, num_chars(text))
        self.tokens_per_char += self._WEIGHT * (per_char - self.tokens_per_char)
        per_text = min(num_tokens, self.max_length)
        self.tokens_per_text += self._WEIGHT * (per_text - self.tokens_per_text)

    def expected(self, text: Text) -> int:
        """Roughly how many tokens the model will read of a text."""
        # Two special tokens around every text, [CLS] and [SEP] or the like.
        return min(self.max_length, 2 + int(num_chars(text) * self.tokens_per_char))


class Call:
    """The texts that one caller submitted together.

    ``only_stage``: the model of a cascade that is to answer them; None if the cascade decides.
    """

    __slots__ = (
        "callers",
        "deadline",
        "flows",
        "loop",
        "num_open",
        "only_stage",
        "promised",
        "started",
        "timeout_s",
        "timer",
    )

    def __init__(
        self,
        texts: Sequence[Text],
        timeout_s: float,
        max_wait_s: float,
        loop: asyncio.AbstractEventLoop,
        only_stage: int | None = None,
    ) -> None:
        self.loop = loop
        self.only_stage = only_stage
        # Two limits. At the deadline the caller gets an error, and no pass takes the text any more.
        # The promise is earlier: when the call was accepted, its last answer was expected by then.
        self.started = time.monotonic()
        self.timeout_s = timeout_s
        self.deadline = self.started + timeout_s
        self.promised = self.started + max_wait_s
        # The position in the queue of each stage, in which virtual time is another.
        self.flows = (Flow(len(texts)), Flow(len(texts)))
        self.callers = [Caller(self, text) for text in texts]
        self.num_open = len(texts)
        self.timer: asyncio.TimerHandle

    def deadline_error(self) -> DeadlineExceededError:
        """What texts get that were not answered in time."""
        elapsed = time.monotonic() - self.started
        return DeadlineExceededError(
            f"no answer after {elapsed:.2f} s, limit {self.timeout_s:g} s; try again later"
        )


class HoldsTexts(Protocol):
    """A `Stage`, which imports this module."""

    def withdraw(self, caller: Caller) -> None: ...


class Caller:
    """One text of a call and the future that waits for its answer.

    ``stage``: where the text is; ``queued``: its entry in the queue there, which identical texts
    share, None before it is tokenized.
    """

    __slots__ = (
        "call",
        "future",
        "num_tokens",
        "passages",
        "queued",
        "stage",
        "text",
        "tokenize_s",
        "truncated",
    )

    def __init__(self, call: Call, text: Text) -> None:
        self.call = call
        self.text = text
        self.stage: HoldsTexts
        self.future: asyncio.Future[Answer] = call.loop.create_future()
        self.queued: QueuedText | None = None
        self.num_tokens = 0
        self.truncated = False
        self.passages: Sequence[tuple[int, int]] = ()
        self.tokenize_s = 0.0

    def answer(self, values: Values, done: FinishedPass | None = None, stage: int = 0) -> Answer:
        """The answer to this text, from a forward pass or from the cache."""
        until = done.started if done else time.monotonic()
        return Answer(
            values=values,
            num_tokens=self.num_tokens,
            truncated=self.truncated,
            cached=done is None,
            tokenize_s=self.tokenize_s,
            # An equal text of another call may have started before this call came.
            queue_s=max(0.0, until - self.call.started - self.tokenize_s),
            forward_s=done.seconds if done else 0.0,
            passages=self.passages,
            stage=stage,
        )


class Group:
    """Callers whose texts a tokenizer takes one by one, in turn with those of other groups.

    ``expected_tokens``: what each text counts as until it is tokenized.
    """

    __slots__ = ("callers", "expected_tokens", "num_taken")

    def __init__(self, callers: Sequence[Caller], expected_tokens: Sequence[int]) -> None:
        self.callers = callers
        self.expected_tokens = expected_tokens
        self.num_taken = 0


def deliver(outcomes: Iterable[tuple[Caller, Outcome]]) -> None:
    """Resolve futures from any thread, with a single hop to the event loop for all of them."""
    # To wake an event loop costs a system call, so a pass with 64 texts does it once. There is one
    # loop in a server; tests and scripts may have several.
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Caller, Outcome]]] = {}
    for caller, outcome in outcomes:
        by_loop.setdefault(caller.call.loop, []).append((caller, outcome))
    for loop, part in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits any more
            loop.call_soon_threadsafe(_resolve, part)


def _resolve(outcomes: Sequence[tuple[Caller, Outcome]]) -> None:
    for caller, outcome in outcomes:
        # Cancelled or timed out, while the outcome was on its way from the thread.
        if caller.future.done():
            continue
        if isinstance(outcome, Answer):
            caller.future.set_result(outcome)
        else:
            caller.future.set_exception(outcome)
