from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference.batching.batcher import (
    ASSUMED_TOKENS_PER_SECOND,
    BatchedModel,
    Batcher,
    FinishedPass,
    Share,
    Workers,
)
from inference.batching.scheduler import FairQueue, Flow, QueuedText
from inference.batching.supervision import COMPUTING_NICENESS
from inference.engines.answering import OneLabelAnswering
from inference.engines.base import PASSES_AT_ONCE, TokenBatch
from inference.errors import ForwardError, WorkerDownError
from inference.metrics import ServerMetrics
from tests.inference.stand_in_engine import ANSWERS_NAN, DIES, RAISES, StandInEngine, answer_of, scores_of
from tests.processes import wait_until

BUDGET = 64
GOOD = [1, 2]  # token ids of the text that tells a broken engine from a bad text
NEVER = float("inf")
PATIENCE = 30  # seconds; far more than anything here takes


class Counts(ServerMetrics):
    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        self.passes: list[tuple[int, int]] = []

    def worker_failed(self) -> None:
        self.failures += 1

    def batch_done(self, texts: int, tokens: int, seconds: float) -> None:
        assert seconds >= 0
        self.passes.append((texts, tokens))


class Encoder:
    """Reads texts for several stand-ins; each sees other scores in them."""

    def __init__(self, num_models: int) -> None:
        self.engines = [StandInEngine() for _ in range(num_models)]
        self.passes: list[list[tuple[int, ...]]] = []
        self.is_broken = False

    def read_all(self, batch: TokenBatch, threads: int = 1) -> dict[StandInEngine, tuple[NDArray[np.float32], None]]:
        texts = [tuple(part.tolist()) for part in np.split(batch.ids, np.cumsum(batch.lengths)[:-1])]
        self.passes.append(texts)
        if self.is_broken:
            raise RuntimeError("broken")
        scores = np.array([scores_of(text) for text in texts], np.float32)
        return {engine: (scores * (i + 1), None) for i, engine in enumerate(self.engines)}


class Bench:
    """A batcher with all that it reports, one entry a text."""

    def __init__(
        self,
        engine: StandInEngine,
        retry_interval_s: float = 60,
        workers: Workers | None = None,
        share: Share | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self.engine = engine
        self.counts = Counts()
        self.reports: queue.Queue[tuple[QueuedText, object]] = queue.Queue()
        waiting = FairQueue(BUDGET, pads=engine.pads, length_window=16)
        reports = (self._finished, self._expired)
        model = BatchedModel(engine, GOOD, OneLabelAnswering(["a", "b"]), encoder=encoder)
        self.workers = workers or Workers(engine.num_slots, retry_interval_s)
        self.batcher = Batcher(model, waiting, self.counts, *reports, self.workers, share)

    def close(self) -> None:
        self.batcher.close()
        self.workers.close()

    def _finished(self, done: FinishedPass) -> None:
        for pair in zip(done.texts, done.outcomes, strict=True):
            self.reports.put(pair)

    def _expired(self, texts: Sequence[QueuedText]) -> None:
        for text in texts:
            self.reports.put((text, "expired"))

    def put_call(self, texts: Sequence[tuple[int, ...]], deadline: float = NEVER) -> list[QueuedText]:
        flow = Flow(len(texts))
        queued = [QueuedText(np.array(ids, np.int32), deadline, ids) for ids in texts]
        self.batcher.put((flow, text) for text in queued)
        return queued

    def outcomes(self, num_texts: int) -> dict[tuple[int, ...], object]:
        """What came of the next texts, by their token ids."""
        return {
            text.payload: outcome for text, outcome in (self.reports.get(timeout=PATIENCE) for _ in range(num_texts))
        }


@contextmanager
def running(engine: StandInEngine, retry_interval_s: float = 60) -> Iterator[Bench]:
    bench = Bench(engine, retry_interval_s)
    try:
        yield bench
    finally:
        engine.let_go()
        bench.close()


texts_of_any_kind = st.lists(
    st.sampled_from([*range(1, 10), RAISES, DIES, ANSWERS_NAN]), min_size=1, max_size=BUDGET // 4
).map(tuple)


@given(
    num_slots=st.integers(1, 3),
    pads=st.booleans(),
    calls=st.lists(
        st.tuples(st.lists(texts_of_any_kind, min_size=1, max_size=8), st.sampled_from([NEVER, NEVER, -NEVER])),
        min_size=1,
        max_size=8,
    ),
    removed=st.sets(st.integers(0, 20)),
    held=st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_every_text_is_reported_exactly_once_whatever_happens(
    num_slots: int, pads: bool, calls: list, removed: set[int], held: bool
) -> None:
    engine = StandInEngine(num_slots=num_slots, pads=pads)
    if held:
        engine.hold()
    with running(engine) as bench:
        texts = [text for call, deadline in calls for text in bench.put_call(call, deadline)]
        taken_back = {i for i, text in enumerate(texts) if i in removed and bench.batcher.remove(text)}
        engine.let_go()
        places = {id(text): i for i, text in enumerate(texts)}
        reports = [bench.reports.get(timeout=PATIENCE) for _ in range(len(texts) - len(taken_back))]
        bench.batcher.close()
        assert bench.reports.empty()
        assert sorted(places[id(text)] for text, _ in reports) == sorted(set(range(len(texts))) - taken_back)
        for text, outcome in reports:
            check_outcome(text, outcome)
        assert bench.batcher.queued_tokens == 0
    assert engine.most_slots_busy <= num_slots
    for one in engine.passes:
        longest = max(map(len, one.texts))
        assert (longest * len(one.texts) if pads else sum(map(len, one.texts))) <= BUDGET


def check_outcome(text: QueuedText, outcome: object) -> None:
    if text.deadline < 0:
        assert outcome == "expired"
    elif RAISES in text.payload or DIES in text.payload or ANSWERS_NAN in text.payload:
        assert isinstance(outcome, ForwardError)
    else:  # a neighbour of one that kills the worker goes down with it
        assert isinstance(outcome, ForwardError) or outcome == pytest.approx(answer_of(text.payload))


def test_one_text_that_raises_fails_alone() -> None:
    engine = StandInEngine()
    with running(engine) as bench:
        engine.hold()
        bench.put_call([(9,)])
        engine.begun.acquire()
        bench.put_call([(1, 2), (3, RAISES), (4,)])
        engine.let_go()
        outcomes = bench.outcomes(4)
        assert outcomes[1, 2] == pytest.approx(answer_of((1, 2)))
        assert outcomes[4,] == pytest.approx(answer_of((4,)))
        assert isinstance(outcomes[3, RAISES], ForwardError)
    assert "RuntimeError" in str(outcomes[3, RAISES])
    assert [len(one.texts) for one in engine.passes] == [1, 3, 1, 1, 1]
    assert bench.counts.failures == 2  # the pass of three, and the text alone


def test_one_text_with_nan_fails_alone_and_no_pass_is_repeated() -> None:
    engine = StandInEngine()
    with running(engine) as bench:
        engine.hold()
        bench.put_call([(9,)])
        engine.begun.acquire()
        bench.put_call([(1,), (ANSWERS_NAN,), (2,)])
        engine.let_go()
        outcomes = bench.outcomes(4)
        assert isinstance(outcomes[ANSWERS_NAN,], ForwardError)
        assert outcomes[2,] == pytest.approx(answer_of((2,)))
    assert [len(one.texts) for one in engine.passes] == [1, 3]
    assert bench.counts.failures == 0


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_worker_that_dies_fails_its_texts_and_starts_afresh(num_slots: int) -> None:
    with running(StandInEngine(num_slots=num_slots)) as bench:
        for _ in range(3):
            bench.put_call([(DIES,)])
            assert isinstance(bench.outcomes(1)[DIES,], ForwardError)
        bench.put_call([(5,)])
        assert bench.outcomes(1)[5,] == pytest.approx(answer_of((5,)))
        assert bench.batcher.is_alive
        assert bench.counts.failures == 3
        assert bench.engine.passes[-1].threads == num_slots  # the dead ones gave their slots back


def test_texts_that_fail_never_make_the_engine_look_broken() -> None:
    with running(StandInEngine()) as bench:
        for i in range(10):
            bench.put_call([(i, RAISES), (i, ANSWERS_NAN)])
            assert {type(outcome) for outcome in bench.outcomes(2).values()} == {ForwardError}
        assert bench.batcher.health.failure is None


def test_an_engine_that_fails_on_a_good_text_too_is_broken_after_three_passes() -> None:
    engine = StandInEngine()
    with running(engine) as bench:
        engine.broken = "out of order"
        for i in range(3):
            assert bench.batcher.health.failure is None
            bench.put_call([(i,)])
            assert isinstance(bench.outcomes(1)[i,], WorkerDownError)
        assert "out of order" in bench.batcher.health.failure
        assert not bench.batcher.health.needs_restart
        # What was queued before is tried again, but the known text goes first.
        engine.broken = None
        bench.put_call([(5,)])
        assert bench.outcomes(1)[5,] == pytest.approx(answer_of((5,)))
        assert bench.batcher.health.failure is None


def test_a_broken_engine_is_tried_again_without_any_text() -> None:
    engine = StandInEngine(num_slots=2)
    with running(engine, retry_interval_s=0.01) as bench:
        engine.broken = "CUDA error: device-side assert triggered"
        for i in range(3):
            bench.put_call([(i,)])
            bench.outcomes(1)
        assert bench.batcher.health.needs_restart
        engine.broken = None
        wait_until(lambda: bench.batcher.health.failure is None)
        assert not bench.batcher.health.needs_restart
        bench.put_call([(5,)])
        assert bench.outcomes(1)[5,] == pytest.approx(answer_of((5,)))
        assert engine.passes[-1].threads == 2  # the trials gave their slot back


def test_a_text_alone_takes_all_slots_and_several_share_them() -> None:
    engine = StandInEngine(num_slots=2)
    with running(engine) as bench:
        engine.hold()
        bench.put_call([(1,)])
        engine.begun.acquire()
        bench.put_call([(2,) * 10, (3,) * 10, (4,) * 10, (5,) * 10])
        engine.let_one_go()
        for _ in range(2):
            engine.begun.acquire()
        engine.let_go()
        bench.outcomes(5)
    assert [(len(one.texts), one.threads) for one in engine.passes] == [(1, 2), (2, 1), (1, 1), (1, 1)]
    assert engine.most_slots_busy == 2


def test_many_processors_mean_wider_passes_not_more_workers() -> None:
    engine = StandInEngine(num_slots=256)
    before = threading.active_count()
    with running(engine) as bench:
        assert threading.active_count() - before == PASSES_AT_ONCE
        engine.hold()
        bench.put_call([(1,) * 50])
        engine.begun.acquire()
        bench.put_call([(2,) * 50] * 30)
        for _ in range(PASSES_AT_ONCE - 1):
            engine.begun.acquire()
        # Nine threads share the 50 tokens of a text, about six each; the rest is there for others.
        assert [one.threads for one in engine.passes] == [9] * PASSES_AT_ONCE
        engine.let_go()
        bench.outcomes(31)
    assert engine.most_slots_busy <= 256


def test_a_slot_that_is_free_while_another_works_takes_what_waits() -> None:
    engine = StandInEngine(num_slots=2)
    with running(engine) as bench:
        engine.hold()
        bench.put_call([(1,), (2,)])
        for _ in range(2):
            engine.begun.acquire()
        assert [one.threads for one in engine.passes] == [1, 1]
        engine.let_go()
        bench.outcomes(2)


@pytest.mark.parametrize("pads", [False, True])
def test_a_call_of_256_texts_delays_a_single_text_by_two_passes_at_most(pads: bool) -> None:
    engine = StandInEngine(pads=pads)
    with running(engine) as bench:
        engine.hold()
        bench.put_call([(1 + i % 9,) * 8 for i in range(256)])
        for _ in range(5):  # some way into the call
            engine.begun.acquire()
            engine.let_one_go()
        engine.begun.acquire()
        before = len(engine.passes)
        bench.put_call([(7,) * 11])
        engine.let_go()
        bench.outcomes(257)
    place = next(i for i, one in enumerate(engine.passes) if (7,) * 11 in one.texts)
    assert place - before < 2


def test_the_heartbeat_ages_with_a_pass_and_rests_without_one() -> None:
    engine = StandInEngine()
    with running(engine) as bench:
        assert bench.batcher.heartbeat_age_s == 0
        engine.hold()
        bench.put_call([(1,)])
        engine.begun.acquire()
        first = bench.batcher.heartbeat_age_s
        assert bench.batcher.heartbeat_age_s > first >= 0
        engine.let_go()
        bench.outcomes(1)
        assert bench.batcher.heartbeat_age_s == 0
        assert bench.batcher.is_alive
    assert not bench.batcher.is_alive


class _PriorityEngine(StandInEngine):
    niceness = 0

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        self.niceness = os.getpriority(os.PRIO_PROCESS, 0)
        return super().logits(batch, threads)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness per thread")
def test_passes_leave_the_processor_to_the_event_loop_first() -> None:
    engine, ours = _PriorityEngine(), os.getpriority(os.PRIO_PROCESS, 0)
    with running(engine) as bench:
        bench.put_call([(1, 2)])
        bench.outcomes(1)
    assert engine.niceness == min(19, ours + COMPUTING_NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, 0) == ours


def test_speed_is_assumed_first_and_measured_then() -> None:
    with running(StandInEngine(num_slots=2)) as bench:
        assert bench.batcher.tokens_per_second == ASSUMED_TOKENS_PER_SECOND
        bench.put_call([(1,) * 30] * 20)
        bench.outcomes(1)
        assert bench.batcher.tokens_per_second != ASSUMED_TOKENS_PER_SECOND
        assert bench.batcher.tokens_per_second > 0


def test_a_closed_batcher_has_ended_its_threads_and_takes_nothing_more() -> None:
    engine = StandInEngine(num_slots=2)
    before = threading.active_count()
    with running(engine) as bench:
        assert threading.active_count() == before + 2
        bench.put_call([(1,)])
        bench.outcomes(1)
        bench.batcher.close()
        bench.put_call([(2,)])
    assert threading.active_count() == before
    assert len(engine.passes) == 1
    assert bench.reports.empty()


def test_texts_from_many_threads_are_all_answered() -> None:
    per_thread = 200
    with running(StandInEngine(num_slots=2)) as bench:

        def send(number: int) -> None:
            for i in range(per_thread):
                bench.put_call([(number, i + 100)])

        senders = [threading.Thread(target=send, args=(number,)) for number in range(1, 5)]
        for sender in senders:
            sender.start()
        outcomes = bench.outcomes(4 * per_thread)
        for sender in senders:
            sender.join()
        assert len(outcomes) == 4 * per_thread
    assert Counter(len(one.texts) for one in bench.engine.passes).total() <= 4 * per_thread
    assert sum(texts for texts, _ in bench.counts.passes) == 4 * per_thread


def test_a_late_text_is_reported_before_the_pass_that_it_missed() -> None:
    with running(StandInEngine()) as bench:
        bench.put_call([(1,), (2,)], deadline=time.monotonic() - 1)
        bench.put_call([(3,)])
        assert [text.payload for text, _ in (bench.reports.get(timeout=PATIENCE) for _ in range(3))] == [
            (1,),
            (2,),
            (3,),
        ]
    assert [one.texts for one in bench.engine.passes] == [[(3,)]]


def test_batchers_that_share_a_machine_get_equal_times_however_many_texts_wait_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Batcher, "measure", lambda *_: None)  # the speeds stay as they are assumed
    order: list[str] = []

    class Named(StandInEngine):
        def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
            order.append(self.name)
            return super().logits(batch, threads)

    engines = Named(), Named()
    engines[0].name, engines[1].name = "busy", "other"
    with running(engines[0]) as busy:
        other = Bench(engines[1], workers=busy.workers)
        engines[0].hold()
        first = busy.put_call([(1,)])
        engines[0].begun.acquire()
        # Each text fills a pass. The busy one has many more of them, and they came first.
        busy.put_call([tuple([1] * BUDGET)] * 40)
        other.put_call([tuple([2] * BUDGET)] * 10)
        engines[0].let_go()
        busy.outcomes(len(first) + 40)
        other.outcomes(10)
        last = len(order) - order[::-1].index("other") - 1
        assert order[: last + 1].count("busy") <= 12
        other.batcher.close()


def test_a_broken_engine_leaves_the_batchers_beside_it_their_answers_and_recovers() -> None:
    broken, fine = StandInEngine(), StandInEngine()
    with running(fine, retry_interval_s=0.01) as bench:
        other = Bench(broken, workers=bench.workers)
        broken.broken = "out of order"
        for _ in range(3):
            other.put_call([(1,)])
            other.outcomes(1)
        assert other.batcher.health.failure is not None
        bench.put_call([(1,), (2,)])
        assert not any(isinstance(one, Exception) for one in bench.outcomes(2).values())
        broken.broken = None
        wait_until(lambda: other.batcher.health.failure is None)
        other.batcher.close()
        bench.put_call([(3,)])
        bench.outcomes(1)


def test_one_that_leaves_takes_nothing_more_and_the_others_go_on() -> None:
    engines = StandInEngine(num_slots=2), StandInEngine(num_slots=2)
    with running(engines[0]) as bench:
        other = Bench(engines[1], workers=bench.workers)
        assert other.batcher.is_alive
        other.batcher.close()
        assert not other.batcher.is_alive
        other.put_call([(1,)])
        bench.put_call([(1,), (2,)])
        bench.outcomes(2)
        assert other.reports.empty()
        assert not engines[1].passes
        assert bench.batcher.is_alive


def test_models_take_turns_by_their_weights_and_the_batchers_of_one_within_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Batcher, "measure", lambda *_: None)  # the speeds stay as they are assumed
    engines = [StandInEngine() for _ in range(3)]
    order: list[str] = []
    shares = [Share(weight=2.0), Share()]
    workers = Workers(1)
    first = Bench(engines[0], workers=workers, share=shares[0])
    second = Bench(engines[1], workers=workers, share=shares[0])  # the two of a cascade
    third = Bench(engines[2], workers=workers, share=shares[1])
    benches = {"first": first, "second": second, "third": third}
    for name, bench in benches.items():
        bench.engine.logits = _noting(order, name, bench.engine.logits)
    engines[0].hold()
    first.put_call([(1,) * BUDGET])
    assert engines[0].begun.acquire(timeout=PATIENCE)  # so that all texts wait before the next pass begins
    for bench in benches.values():
        bench.put_call([(1,) * BUDGET] * 12)
    engines[0].let_go()
    wait_until(lambda: len(order) == 37)
    counts = Counter(order[1:19])
    assert counts["first"] + counts["second"] == pytest.approx(12, abs=1)
    assert counts["first"] == pytest.approx(6, abs=1)
    for bench in benches.values():
        bench.batcher.close()
    workers.close()


def _noting(order: list[str], name: str, logits: Any) -> Any:
    def noted(batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        order.append(name)
        return logits(batch, threads)

    return noted


def test_what_waits_for_others_takes_from_a_model_s_time_at_most_their_shares() -> None:
    engines = StandInEngine(), StandInEngine()
    mine, others = Share(weight=1.0), Share(weight=3.0)
    workers = Workers(1)
    bench = Bench(engines[0], workers=workers, share=mine)
    other = Bench(engines[1], workers=workers, share=others)
    assert workers.share_left(mine, 1.0) == 1.0
    engines[1].hold()
    other.put_call([(1,) * BUDGET] * 10)
    assert engines[1].begun.acquire(timeout=PATIENCE)
    waiting_s = 10 * BUDGET / ASSUMED_TOKENS_PER_SECOND
    # In a long time all that waits is done beside it, in a short one the others get three quarters.
    assert workers.share_left(mine, 100.0) == pytest.approx(100 / (100 + waiting_s))
    assert workers.share_left(mine, 0.01) == pytest.approx(1 / 4)
    assert workers.share_left(others, 1.0) == 1.0
    engines[1].let_go()
    for one in (bench, other):
        one.batcher.close()
    workers.close()


def test_workers_grow_with_the_model_that_needs_most() -> None:
    workers = Workers(0)
    assert workers.all == []
    for num_slots in (2, 1, 3):
        workers.grow(num_slots)
    assert (workers.num_slots, workers.free_slots, workers.free_passes) == (3, 3, 3)
    bench = Bench(StandInEngine(num_slots=3), workers=workers)
    bench.put_call([(1,), (2,), (3,)])
    bench.outcomes(3)
    bench.close()


@contextmanager
def several_on_one_encoder(encoder: Encoder) -> Iterator[list[Bench]]:
    """Benches of which the first is in a pass, so that what they are given waits."""
    workers = Workers(1)
    benches = [Bench(engine, workers=workers, share=Share(), encoder=encoder) for engine in encoder.engines]
    first = benches[0]
    first.engine.hold()
    first.put_call([(9,)])
    assert first.engine.begun.acquire(timeout=PATIENCE)
    yield benches
    first.engine.let_go()
    for bench in benches:
        bench.batcher.close()
    workers.close()


def probabilities(scores: Sequence[float]) -> tuple[float, ...]:
    exponentials = np.exp(np.array(scores))
    return tuple(exponentials / exponentials.sum())


def test_texts_of_models_on_one_encoder_are_read_in_one_pass_and_an_equal_text_once() -> None:
    encoder = Encoder(3)
    with several_on_one_encoder(encoder) as benches:
        given = [[(1,), (2, 3)], [(2, 3), (4,)], [(2, 3)]]
        for bench, texts in zip(benches, given, strict=True):
            bench.put_call(texts)
        benches[0].engine.let_go()
        for i, (bench, texts) in enumerate(zip(benches, given, strict=True)):
            outcomes = bench.outcomes(len(texts) + (i == 0))
            for text in texts:
                expected = probabilities([score * (i + 1) for score in scores_of(text)])
                assert outcomes[text] == pytest.approx(expected, abs=1e-6)
        counted = [[(len(texts), sum(map(len, texts)))] for texts in given]
        wait_until(lambda: [bench.counts.passes[-1:] for bench in benches] == counted)
        assert [sorted(texts) for texts in encoder.passes] == [[(1,), (2, 3), (4,)]]
        assert all(bench.batcher.tokens_in_hand == bench.batcher.passes_in_hand == 0 for bench in benches)


def test_a_pass_takes_no_more_texts_of_other_models_than_it_has_room_for() -> None:
    encoder = Encoder(2)
    with several_on_one_encoder(encoder) as benches:
        long = [(i,) * 30 for i in range(1, 6)]
        for bench in benches:
            bench.put_call(long)
        benches[0].engine.let_go()
        for i, bench in enumerate(benches):
            assert bench.outcomes(len(long) + (i == 0)).keys() >= set(long)
        everything = [*encoder.passes, *([list(one.texts) for bench in benches for one in bench.engine.passes])]
        assert all(sum(map(len, texts)) <= BUDGET for texts in everything)


@pytest.mark.parametrize("is_broken", [True, False])
def test_if_a_pass_for_several_models_fails_each_reads_its_own_texts(is_broken: bool) -> None:
    encoder = Encoder(2)
    encoder.is_broken = is_broken
    with several_on_one_encoder(encoder) as benches:
        if not is_broken:
            encoder.engines.pop()  # as if the model had been removed while its last texts wait
        for bench in benches:
            bench.put_call([(2, 3)])
        benches[0].engine.let_go()
        for i, bench in enumerate(benches):
            assert bench.outcomes(1 + (i == 0))[2, 3] == pytest.approx(answer_of((2, 3)), abs=1e-6)
        assert len(encoder.passes) == 1


def test_a_model_whose_engine_is_broken_joins_no_pass_of_others() -> None:
    encoder = Encoder(2)
    with several_on_one_encoder(encoder) as benches:
        benches[1].engine.broken = benches[1].batcher.health.failure = "broken"
        for bench in benches:
            bench.put_call([(2, 3)])
        benches[0].engine.let_go()
        assert benches[0].outcomes(2)[2, 3] == pytest.approx(answer_of((2, 3)), abs=1e-6)
        assert isinstance(benches[1].outcomes(1)[2, 3], WorkerDownError)
        assert not encoder.passes
