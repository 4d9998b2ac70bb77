from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.batching.scheduler import (
    LARGEST_PADDING,
    LARGEST_WEIGHT,
    FairQueue,
    Flow,
    QueuedText,
    overrun_s,
    spread,
)

BUDGET = 64
NEVER = float("inf")

lengths = st.lists(st.integers(1, BUDGET), min_size=1, max_size=12)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("call"), lengths, st.sampled_from([NEVER, 5.0, 10.0])),
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.just("remove"), st.integers(0, 40)),
        st.tuples(st.just("prioritize"), st.integers(0, 40)),
        st.tuples(st.just("expire"), st.sampled_from([1.0, 6.0, 11.0])),
    ),
    max_size=60,
)


def make_queue(*, pads: bool = False) -> FairQueue:
    return FairQueue(BUDGET, pads=pads, length_window=16)


def make_text(num_tokens: int, deadline: float = NEVER, payload: object = None) -> QueuedText:
    return QueuedText(np.zeros(num_tokens, np.int32), deadline, payload)


def put_call(queue: FairQueue, call: list[int], deadline: float = NEVER) -> list[QueuedText]:
    flow = Flow(len(call))
    texts = [make_text(num_tokens, deadline) for num_tokens in call]
    for text in texts:
        queue.put(flow, text)
    return texts


@dataclass
class Ledger:
    """What went into a queue, and how each text left it."""

    queue: FairQueue
    waiting: list[QueuedText] = field(default_factory=list)
    left: list[QueuedText] = field(default_factory=list)

    def leave(self, texts: list[QueuedText]) -> None:
        for text in texts:
            assert not text.is_waiting
            self.waiting.remove(text)  # raises for a text that left before
            self.left.append(text)

    def apply(self, operation: tuple) -> None:
        match operation:
            case "call", call, deadline:
                self.waiting += put_call(self.queue, call, deadline)
            case "take", num_parts:
                taken = self.queue.take(num_parts)
                assert bool(taken) == bool(self.waiting)
                self.leave(taken)
            case "remove", place:
                for text in self.waiting[place : place + 1]:
                    assert self.queue.remove(text)
                    assert not self.queue.remove(text)
                    self.leave([text])
            case "prioritize", place:
                for text in self.waiting[place : place + 1]:
                    self.queue.prioritize(Flow(1), text)
            case "expire", now:
                expired = self.queue.expire(now)
                assert all(text.is_expired and text.deadline <= now for text in expired)
                self.leave(expired)
                assert all(text.deadline > now for text in self.waiting)


@given(pads=st.booleans(), operations=operations)
def test_every_text_leaves_exactly_once_and_the_queue_ends_empty(pads: bool, operations: list[tuple]) -> None:
    ledger = Ledger(make_queue(pads=pads))
    for operation in operations:
        ledger.apply(operation)
        assert len(ledger.queue) == len(ledger.waiting)
        assert ledger.queue.num_tokens == sum(text.num_tokens for text in ledger.waiting)
    while ledger.waiting:
        ledger.apply(("take", 1))
    assert ledger.queue.take() == []
    assert len(ledger.queue) == ledger.queue.num_tokens == 0


@given(calls=st.lists(lengths, max_size=8), num_parts=st.integers(1, 3))
def test_no_pass_exceeds_the_token_budget(calls: list[list[int]], num_parts: int) -> None:
    for pads in (False, True):
        queue = make_queue(pads=pads)
        for call in calls:
            put_call(queue, call)
        while taken := [text.num_tokens for text in queue.take(num_parts)]:
            cost = max(taken) * len(taken) if pads else sum(taken)
            assert cost <= BUDGET
            if pads:
                assert cost - sum(taken) <= LARGEST_PADDING * cost


@given(calls=st.lists(lengths, min_size=1, max_size=8))
def test_without_padding_the_texts_of_a_call_keep_their_order(calls: list[list[int]]) -> None:
    queue = make_queue()
    put = [put_call(queue, call) for call in calls]
    taken: list[QueuedText] = []
    while texts := queue.take():
        taken += texts
    for call in put:
        assert [text for text in taken if text in call] == call


@given(
    pads=st.booleans(),
    batch=st.lists(st.integers(1, BUDGET), min_size=100, max_size=256),
    num_passes=st.integers(0, 30),
    single=st.integers(1, BUDGET),
)
@settings(deadline=None, max_examples=50)
def test_a_single_text_goes_into_the_next_pass_or_the_one_after_it_however_large_the_call_before(
    pads: bool, batch: list[int], num_passes: int, single: int
) -> None:
    queue = make_queue(pads=pads)
    put_call(queue, batch)
    for _ in range(num_passes):
        queue.take()
    (text,) = put_call(queue, [single])
    assert text in queue.take() or text in queue.take()


@given(
    pads=st.booleans(),
    batch=st.lists(st.integers(1, BUDGET), min_size=1, max_size=40),
    singles=st.lists(st.integers(1, BUDGET), min_size=1, max_size=40),
)
@settings(deadline=None, max_examples=50)
def test_a_call_is_finished_though_single_texts_never_stop_coming(
    pads: bool, batch: list[int], singles: list[int]
) -> None:
    queue = make_queue(pads=pads)
    left = set(put_call(queue, batch))
    for num_tokens in singles:
        put_call(queue, [num_tokens])
    num_passes = 0
    while left:
        taken = queue.take()
        num_passes += 1
        for text in taken:
            if text in left:
                left.remove(text)
            else:  # its client asks again at once
                put_call(queue, [text.num_tokens])
    # Virtual time comes on by at least a token with each round over all who wait.
    assert num_passes <= (sum(batch) + BUDGET) * (len(singles) + 1)


def test_beside_many_single_texts_a_call_gets_the_share_of_a_few_of_them() -> None:
    queue = make_queue()
    batch = set(put_call(queue, [16] * 100))
    for _ in range(60):
        put_call(queue, [16])
    of_batch = of_singles = 0
    while of_batch < 80:
        for text in queue.take():
            if text in batch:
                of_batch += 1
            else:
                of_singles += 1
                put_call(queue, [16])
    assert of_batch / of_singles == pytest.approx(LARGEST_WEIGHT / 60, rel=0.15)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.data())
def test_each_pass_takes_no_more_than_a_slot_s_share_of_what_waits(
    num_texts: int, num_slots: int, data: st.DataObject
) -> None:
    queue = FairQueue(10_000, pads=False, length_window=16)
    waiting = [data.draw(st.integers(1, 40)) for _ in range(num_texts)]
    put_call(queue, waiting)
    free = st.integers(1, num_slots).flatmap(lambda slots: st.tuples(st.just(slots), st.integers(1, slots)))
    while len(queue):
        share = queue.num_tokens / min(len(queue), num_slots)
        num_parts, slots = spread(len(queue), *data.draw(free), num_passes=num_slots)
        assert 1 <= slots <= num_slots
        assert sum(text.num_tokens for text in queue.take(num_parts)) <= share + max(waiting)


def test_a_text_alone_takes_all_free_slots_and_texts_enough_take_one_each() -> None:
    assert spread(1, 4, 4, 4) == (1, 4)
    assert spread(1, 2, 3, 4) == (1, 2)
    assert spread(2, 4, 4, 4) == (2, 2)
    assert spread(9, 4, 4, 4) == (4, 1)


def test_more_slots_than_passes_are_all_given_out() -> None:
    free_slots, given = 64, []
    for free_passes in range(6, 0, -1):
        num_parts, slots = spread(9, free_slots, free_passes, 6)
        assert num_parts == 6
        given.append(slots)
        free_slots -= slots
    assert (given, free_slots) == ([11, 11, 11, 11, 10, 10], 0)


def test_texts_are_left_for_the_slots_that_are_busy() -> None:
    assert spread(9, 1, 1, 4) == (4, 1)
    assert spread(2, 1, 1, 2) == (2, 1)


def test_a_text_that_a_single_call_wants_too_leaves_its_place_at_the_end_of_a_large_call() -> None:
    queue = make_queue()
    batch = put_call(queue, [16] * 100)
    queue.take()
    queue.prioritize(Flow(1), batch[-1])
    assert batch[-1] in queue.take()


def test_a_hastened_text_never_goes_back() -> None:
    queue = make_queue()
    first, *_ = put_call(queue, [40, 40])
    slow = Flow(1)
    queue.put(slow, make_text(BUDGET))
    queue.prioritize(slow, first)
    assert queue.take() == [first]


def test_near_lengths_go_together_when_passes_pad() -> None:
    queue = make_queue(pads=True)
    put_call(queue, [8, 30, 8, 31, 8, 29, 8])
    passes = deque(sorted(text.num_tokens for text in queue.take()) for _ in range(3))
    assert list(passes) == [[8, 8, 8, 8], [30, 31], [29]]


class _WatchedText(QueuedText):
    """Counts how often a queue looks at a deadline or at a promised time."""

    __slots__ = ()
    num_looks = 0

    def __getattribute__(self, name: str) -> object:
        _WatchedText.num_looks += name in ("deadline", "promised")
        return super().__getattribute__(name)


def test_an_overloaded_queue_is_not_looked_through_before_each_pass() -> None:
    queue = make_queue()
    for _ in range(1000):
        queue.put(Flow(1), _WatchedText(np.zeros(8, np.int32), deadline=60.0, promised=5.0))
    _WatchedText.num_looks = 0
    for i in range(20):
        assert queue.expire(now=float(i)) == []
        assert len(queue.take(now=float(i), tokens_per_second=8_000 / 5)) == BUDGET / 8
    assert _WatchedText.num_looks < 100


def test_a_text_larger_than_any_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="text of 65 tokens > max_batch_tokens 64"):
        put_call(make_queue(), [BUDGET + 1])


class VirtualServer:
    """A queue with one engine, in virtual time: a token takes 10 ms, and an answer may take 2 s."""

    speed, wait_s = 100.0, 2.0

    def __init__(self, *, pads: bool = False) -> None:
        self.queue = make_queue(pads=pads)
        self.now = self.free_at = 0.0
        self.tokens_in_hand = 0
        self.num_refused = 0
        self.lateness: list[float] = []

    def work_until(self, until: float) -> None:
        while len(self.queue) and self.free_at <= until:
            taken = self.queue.take(1, self.free_at, self.speed)
            self.tokens_in_hand = sum(text.num_tokens for text in taken)
            self.free_at += self.tokens_in_hand / self.speed
            self.lateness += [self.free_at - text.promised for text in taken]
        self.now = until
        if self.free_at <= until:
            self.free_at, self.tokens_in_hand = until, 0

    def call(self, call: list[int]) -> None:
        waiting = self.queue.num_tokens + self.tokens_in_hand
        if overrun_s(waiting, sum(call), len(call), self.speed, self.wait_s) > 0:
            self.num_refused += 1
            return
        flow = Flow(len(call))
        for num_tokens in call:
            self.queue.put(flow, QueuedText(np.zeros(num_tokens, np.int32), NEVER, promised=self.now + self.wait_s))


@given(pads=st.booleans(), arrivals=st.lists(st.tuples(st.floats(0, 0.5), lengths), min_size=1, max_size=60))
@settings(deadline=None, max_examples=200)
def test_what_is_accepted_is_answered_within_the_wait_and_one_pass(
    pads: bool, arrivals: list[tuple[float, list[int]]]
) -> None:
    server = VirtualServer(pads=pads)
    for gap, call in arrivals:
        server.work_until(server.now + gap)
        server.call(call)
    server.work_until(1e6)
    assert max(server.lateness, default=0) <= BUDGET / server.speed + 1e-6


@pytest.mark.parametrize("pads", [False, True])
def test_the_last_text_of_a_large_call_keeps_its_time_though_single_texts_never_stop_coming(pads: bool) -> None:
    server = VirtualServer(pads=pads)
    server.call([10] * 15)
    for _ in range(200):
        server.work_until(server.now + 0.03)  # ten tokens each 0.03 s: three times what the engine can do
        server.call([10])
    server.work_until(1e6)
    assert server.num_refused > 100
    assert len(server.lateness) > 60
    assert max(server.lateness) <= BUDGET / server.speed + 1e-6


def test_a_large_call_leaves_room_in_which_single_texts_go_ahead_of_it() -> None:
    speed, wait_s = 1000.0, 2.0
    assert overrun_s(0, 1500, 100, speed, wait_s) <= 0
    assert overrun_s(0, 1600, 100, speed, wait_s) > 0
    assert overrun_s(1500, 500, 1, speed, wait_s) <= 0
    queue = make_queue()
    flow = Flow(100)
    for _ in range(100):
        queue.put(flow, QueuedText(np.zeros(15, np.int32), NEVER, promised=wait_s))
    single = QueuedText(np.zeros(15, np.int32), NEVER, promised=wait_s)
    queue.put(Flow(1), single)
    assert single in queue.take(1, 0.0, speed)


def test_a_text_that_finds_nothing_to_wait_for_is_accepted_however_slow_the_model() -> None:
    assert overrun_s(0, 512, 1, 1.0, 5.0) <= 0
    assert overrun_s(1, 512, 1, 1.0, 5.0) > 0
