"""The asynchronous interface of one loaded model: texts in on the event loop, one
future per text out.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from common.text import Text, counted
from inference.batching.audit import Audit
from inference.batching.batcher import Share, Workers
from inference.batching.cache import Values
from inference.batching.calls import Answer, Call, Caller, Outcome, deliver
from inference.batching.engine_health import EngineHealth
from inference.batching.scheduler import BULK_SHARE, overrun_s
from inference.batching.stage import Found, QueueLimits, Stage
from inference.batching.tokenizing import TokenizerThreads
from inference.engines.model_loader import ModelLoader
from inference.errors import (
    DeadlineExceededError,
    ForwardError,
    QueueFullError,
    WorkerDownError,
)
from inference.metrics import ModelMetrics

# Seconds after which a stream that waits for room looks again at the earliest.
_SHORTEST_RETRY_S = 0.05
# Of a cascade: the share of texts that the big model answers, until some have been seen, and how
# much one text moves it.
_FIRST_PASSED_ON = 0.2
_SHARE_WEIGHT = 0.005
# If the queue is longer than these shares of the longest wait, few of the small model's answers are
# checked, and none. Above the first, nothing is read in shadow either.
BUSY_ABOVE = 0.02
_NO_CHECKS_ABOVE = 0.25


class Classifier:
    """Answers texts with one model, or with the two of a cascade, on its own threads; used from one
    event loop.
    """

    def __init__(
        self,
        model: ModelLoader,
        limits: QueueLimits,
        metrics: ModelMetrics,
        workers: Workers | None = None,
        weight: float = 1.0,
        tokenizers: TokenizerThreads | None = None,
    ) -> None:
        """Args:
            workers: those that other models use too; by default its own.
            weight: of its share of them.
            tokenizers: the threads that other models use too; by default its own.

        Raises:
            ValueError: a text of the model's full length would not fit into a forward pass.
        """
        self._max_wait_s = limits.max_wait_seconds
        self._metrics = metrics
        # Accepted and not fully answered; touched on the event loop only.
        self._calls: set[Call] = set()
        self._all_answered = asyncio.Event()
        self._cascade = model.cascade
        self._audit = Audit(model.cascade) if model.cascade else None
        # Of a cascade the small model's stage comes first, and passes on what it is not sure of.
        self._owns_workers = workers is None
        self._workers = workers or Workers(0)
        self._workers.grow(max(one.engine.num_slots for one in model.stages))
        self._share = Share(weight)
        machine = self._workers, self._share, tokenizers or TokenizerThreads()
        self._stages: list[Stage] = []
        try:
            for one in model.stages:
                self._stages.append(
                    Stage(len(self._stages), one, limits, metrics, self._report, machine)
                )
        except ValueError:
            self._close_threads()
            raise
        # The share of texts, over the last hundreds, that the big model answers.
        self._passed_on = _FIRST_PASSED_ON if model.cascade else 0.0

    @property
    def audit(self) -> Audit | None:
        """Of a cascade: whether it keeps its promise."""
        return self._audit

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a pass; texts not tokenized yet count with expected tokens."""
        return sum(stage.queued_tokens for stage in self._stages)

    @property
    def queue_seconds(self) -> float:
        """Seconds until everything accepted will be answered, at the measured speed."""
        return self._unanswered_tokens / self.tokens_per_second

    @property
    def load(self) -> float:
        """The length of the queue, as a share of the longest wait."""
        return self.queue_seconds / self._max_wait_s

    @property
    def workers(self) -> Workers:
        """What runs its passes."""
        return self._workers

    @property
    def _unanswered_tokens(self) -> float:
        """What waits or is being read, in tokens of texts that have just come."""
        # Every request asks for it three times, and most models have one stage.
        first, *others = self._stages
        tokens: float = first.unanswered_tokens
        for stage in others:
            tokens += self._as_new(stage, stage.unanswered_tokens)
        return tokens

    def _as_new(self, stage: Stage, num_tokens: float) -> float:
        """As how many tokens of texts that have just come those of a stage count: the big model of
        a cascade takes as long for one as both together take for several.
        """
        if not stage.place or not num_tokens:
            return num_tokens
        return num_tokens * self.tokens_per_second / stage.batcher.tokens_per_second

    @property
    def tokens_per_second(self) -> float:
        """Of texts that have just come: a share of them is read twice in a cascade."""
        return self._overall([stage.batcher.tokens_per_second for stage in self._stages])

    def _overall(self, speeds: Sequence[float]) -> float:
        first, *others = speeds
        if not others:
            return first
        return 1 / (1 / first + sum(self._passed_on / one for one in others))

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds that the longest current pass or tokenizer call has taken; 0 if none."""
        return max(stage.heartbeat_age_s for stage in self._stages)

    @property
    def is_alive(self) -> bool:
        return all(stage.is_alive for stage in self._stages)

    @property
    def health(self) -> EngineHealth:
        """Of the model, in a cascade of the big one: it answers for a small one that is broken."""
        return self._stages[-1].batcher.health

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
        waiting, num_tokens = self._unanswered_tokens, self._usual_tokens
        speed = self._speed_left(waiting, num_tokens)
        return overrun_s(waiting, num_tokens, 1, speed, self._max_wait_s) > 0

    @property
    def _usual_tokens(self) -> int:
        return int(self._stages[0].lengths.tokens_per_text)

    def full_error(self) -> QueueFullError | None:
        """What it would be refused with, if it would be."""
        return self._refusal(self._usual_tokens, 1)

    def most_texts(self, text: Text, stage: int | None = None) -> int:
        """How many texts as long as this one a single call may have while nothing else waits."""
        asked = self._stages[stage or 0]
        most_tokens = BULK_SHARE * self._max_wait_s * self._expected_speed(waiting=0)
        return max(1, int(most_tokens / self._as_new(asked, asked.lengths.expected(text))))

    def submit(
        self, texts: Sequence[Text], timeout_s: float, only_stage: int | None = None
    ) -> list[asyncio.Future[Answer]]:
        """Accept the texts of one call.

        Args:
            texts: at least one, as the model reads them: single texts, or pairs.
            timeout_s: seconds after which unanswered texts fail.
            only_stage: of a cascade, the model that is to answer them, as in `Answer.stage`.

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
        stage = self._stages[only_stage or 0]
        num_tokens = self._as_new(stage, sum(map(stage.lengths.expected, texts)))
        if (refusal := self._refusal(num_tokens, len(texts))) is not None:
            raise refusal
        loop = asyncio.get_running_loop()
        call = Call(texts, timeout_s, self._max_wait_s, loop, only_stage)
        self._calls.add(call)
        for caller in call.callers:
            caller.future.add_done_callback(functools.partial(self._on_done, caller))
        call.timer = call.loop.call_later(timeout_s, self._time_out, call)
        stage.put(call.callers)
        return [caller.future for caller in call.callers]

    async def drain(self) -> None:
        while self._calls:
            self._all_answered.clear()
            await self._all_answered.wait()

    def close(self) -> None:
        """Stop the threads after the current passes, and fail what is left."""
        self._close_threads()
        error = WorkerDownError("the classifier was closed before this text was answered")
        deliver((caller, error) for call in list(self._calls) for caller in call.callers)

    def _close_threads(self) -> None:
        for stage in self._stages:
            stage.close()
        if self._owns_workers:
            self._workers.close()

    def _speed_left(self, waiting: float, num_tokens: float) -> float:
        """Tokens per second at which so many are expected to be answered, and before them those
        that wait.

        The passes of other models count too, but only what fair queueing lets them take: a flood of
        texts for one model must not keep out those for another. What comes for others later is not
        known yet; it can delay these tokens, at most by their share of the time.
        """
        speed = self._expected_speed(waiting)
        return speed * self._workers.share_left(self._share, (waiting + num_tokens) / speed)

    def _refusal(self, num_tokens: float, num_texts: int) -> QueueFullError | None:
        waiting = self._unanswered_tokens
        speed = self._speed_left(waiting, num_tokens)
        too_late_s = overrun_s(waiting, num_tokens, num_texts, speed, self._max_wait_s)
        if too_late_s <= 0:
            return None
        # Two different remedies: a call that would fit into an empty queue may come again as it is;
        # a larger one would be refused for ever, so it is told to send fewer texts.
        answered_s = (waiting + num_tokens) / speed
        limit_s = answered_s - too_late_s
        would_fit = num_texts == 1 or num_tokens / self._expected_speed(waiting=0) <= limit_s
        retry_after_s = max(_SHORTEST_RETRY_S, too_late_s if would_fit else waiting / speed)
        return QueueFullError(
            f"{counted(num_texts, 'more text')} would be answered after {answered_s:.2f} s, limit "
            f"{limit_s:.2f} s (MAX_WAIT_SECONDS {self._max_wait_s:g}); "
            + (
                f"try again in {retry_after_s:.2f} s"
                if would_fit
                else "send fewer texts in one call"
            ),
            retry_after_s,
            "queue_full" if would_fit else "call_too_large",
        )

    def _expected_speed(self, waiting: float) -> float:
        """Tokens per second. One slow pass must not keep out calls with many texts until others
        have shown the true speed; nothing waits then.
        """
        if waiting:
            return self.tokens_per_second
        first = self._overall([stage.first_tokens_per_second for stage in self._stages])
        return max(self.tokens_per_second, first)

    def _on_done(self, caller: Caller, future: asyncio.Future[Answer]) -> None:
        if future.cancelled():
            self._metrics.dropped("cancelled")
            caller.stage.withdraw(caller)
        elif isinstance(future.exception(), DeadlineExceededError):
            self._metrics.dropped("expired")
            caller.stage.withdraw(caller)
        call = caller.call
        call.num_open -= 1
        if not call.num_open:
            call.timer.cancel()
            self._calls.discard(call)
            # The callers refer to the call: a cycle, which only the garbage collector would free,
            # in pauses of tens of milliseconds under load.
            call.callers = []
            if not self._calls:
                self._all_answered.set()

    def _time_out(self, call: Call) -> None:
        for caller in call.callers:
            if not caller.future.done():
                caller.future.set_exception(call.deadline_error())

    # From here on: called from the stages' threads.

    def _report(self, stage: Stage, found: Sequence[Found]) -> None:
        """Answer the callers, or let the big model of a cascade do so."""
        outcomes: list[tuple[Caller, Outcome]] = []
        passed_on: list[Caller] = []
        for caller, result, done in found:
            if stage is not self._stages[-1] and self._passes_on(caller, result, passed_on):
                continue
            if isinstance(result, Exception):
                outcomes.append((caller, result))
                continue
            answer = caller.answer(result, done, stage.place)
            outcomes.append((caller, answer))
            if done is not None:
                self._metrics.waited(answer.queue_s)
        deliver(outcomes)
        if passed_on:
            self._stages[-1].put(passed_on)

    def _passes_on(
        self, caller: Caller, result: Values | Exception, passed_on: list[Caller]
    ) -> bool:
        """Whether the big model is to answer, after the small one has; adds to ``passed_on`` what
        it is to answer, and that may also be a check of what the small one answers.
        """
        if caller.call.only_stage is not None or self._cascade is None or self._audit is None:
            return False
        if isinstance(result, Exception):
            # A text that is blank or too late is so for both; what fails in one may work in the
            # other.
            passes = isinstance(result, ForwardError | WorkerDownError)
        else:
            threshold = self._audit.threshold
            passes = not self._cascade.is_sure(result, caller.truncated, threshold)
            self._passed_on += _SHARE_WEIGHT * (passes - self._passed_on)
            # How many texts are checked depends on how busy the server is, but not on how this one
            # will be answered, so it does not change what the checks prove.
            load = self.load
            if load < _NO_CHECKS_ABOVE and self._audit.draws(passes, is_busy=load > BUSY_ABOVE):
                passed_on.append(self._check(caller, result, threshold))
        if passes:
            caller.queued = None
            passed_on.append(caller)
        self._metrics.answered_by("big" if passes else "small")
        return passes

    def _check(self, caller: Caller, values: Values, threshold: float) -> Caller:
        """A caller for whom the big model answers the same text, only to compare."""
        call = Call([caller.text], self._max_wait_s, self._max_wait_s, caller.call.loop, 1)
        check = call.callers[0]
        label = values.index(max(values))
        check.future.add_done_callback(functools.partial(self._on_checked, label, threshold))
        return check

    def _on_checked(self, label: int, threshold: float, future: asyncio.Future[Answer]) -> None:
        # What came too late, or failed, was not compared.
        if self._audit is None or future.cancelled() or future.exception() is not None:
            return
        values = future.result().values
        differs = values.index(max(values)) != label
        self._metrics.checked("differs" if differs else "same")
        self._audit.checked(threshold, differs=differs)
