"""A small model answers what it is sure of, a big one the rest, and both share the machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference.batching.audit import ALARM, CHECKED, CHECKED_AT_FIRST, CHECKS_AT_FIRST, Audit
from inference.batching.calls import Answer
from inference.engines.base import TokenBatch
from inference.engines.model_loader import Cascade
from inference.errors import DeadlineExceededError, ForwardError, RefusedTextError
from tests.inference.batching.classifier_bench import Bench, StandInModel, run
from tests.inference.stand_in_engine import StandInEngine

SURE_BELOW = 50  # token ids of which the small model is sure


class Small(StandInEngine):
    """Sure of label 0 if a text begins with a small token id, else not sure."""

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        super().logits(batch, threads)
        firsts = batch.ids[np.cumsum([0, *batch.lengths[:-1]])]
        return np.array([[9.0 if first < SURE_BELOW else 0.1, 0, 0] for first in firsts], np.float32)


class Big(StandInEngine):
    """Says label 1 of everything, and label 0 of the token ids that it is told."""

    agrees_on: range = range(0)

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        super().logits(batch, threads)
        firsts = batch.ids[np.cumsum([0, *batch.lengths[:-1]])]
        return np.array([[5.0 * (first in self.agrees_on), 2, 0] for first in firsts], np.float32)


class Pair:
    """A classifier over a cascade, with the engines of both models."""

    def __init__(self, num_slots: int = 1, num_slots_of_big: int = 0, max_small: int = 16, **limits: float) -> None:
        self.small, self.big = Small(num_slots=num_slots), Big(num_slots=num_slots_of_big or num_slots)
        model = StandInModel(self.big)
        small = StandInModel(self.small, max_length=max_small)
        model.cascade = Cascade(small, 0.9, (0.99, 1.5), 0.005, {})  # type: ignore[arg-type,assignment]
        self.bench = Bench(model, **limits)

    @property
    def texts_of_big(self) -> list[tuple[int, ...]]:
        return [text for one in self.big.passes for text in one.texts]


@asynccontextmanager
async def running(**options: float) -> AsyncIterator[Pair]:
    pair = Pair(**options)
    try:
        yield pair
    finally:
        pair.small.let_go()
        pair.big.let_go()
        await asyncio.to_thread(pair.bench.classifier.close)


def labels_of(answers: list[Answer]) -> list[int]:
    return [one.values.index(max(one.values)) for one in answers]


@pytest.fixture(autouse=True)
def no_checks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The big model gets nothing but what is passed on, except in tests of the audit."""
    if "audit" not in request.node.name:
        monkeypatch.setattr(Audit, "draws", lambda *_, **__: False)


@given(words=st.lists(st.integers(1, 89), min_size=1, max_size=40), num_slots=st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_each_text_is_answered_by_the_model_that_it_is_for(words: list[int], num_slots: int) -> None:
    async def test() -> None:
        async with running(num_slots=num_slots) as pair:
            answers = await pair.bench.answers(*(f"w{word}" for word in words))
            assert [one.stage for one in answers] == [int(word >= SURE_BELOW) for word in words]
            assert labels_of(answers) == [int(word >= SURE_BELOW) for word in words]
            assert set(pair.texts_of_big) == {(word,) for word in words if word >= SURE_BELOW}
            await pair.bench.classifier.drain()
            assert pair.bench.classifier.queued_tokens == 0

    run(test())


def test_a_text_that_the_small_model_reads_only_in_part_is_passed_on() -> None:
    async def test() -> None:
        async with running(max_small=4) as pair:
            (short,), (long,) = await pair.bench.answers("w1 w2"), await pair.bench.answers("w1 w2 w3 w4 w5 w6")
            assert (short.stage, long.stage) == (0, 1)
            assert not long.truncated
            assert long.num_tokens == 6

    run(test())


def test_texts_that_are_equal_to_the_small_model_alone_get_their_own_answers_of_the_big_one() -> None:
    async def test() -> None:
        async with running(max_small=4) as pair:
            pair.small.hold()
            futures = pair.bench.submit("w60 w2 w3 w4 w5", "w60 w2 w3 w4 w6", "w60 w2 w3 w4 w5")
            await pair.bench.all_tokenized()
            pair.small.let_go()
            await asyncio.gather(*futures)
            assert sorted(pair.texts_of_big) == [(60, 2, 3, 4, 5), (60, 2, 3, 4, 6)]

    run(test())


def test_a_lone_easy_text_does_not_wait_for_the_big_model() -> None:
    async def test() -> None:
        async with running() as pair:
            pair.big.hold()
            (hard,) = pair.bench.submit("w60")
            await asyncio.to_thread(pair.big.begun.acquire)
            # One slot, and the big model has it.
            (easy,) = pair.bench.submit("w1")
            pair.big.let_go()
            assert (await easy).stage == 0
            assert (await hard).stage == 1

    run(test())


def test_what_fails_in_the_small_model_is_answered_by_the_big_one() -> None:
    async def test() -> None:
        async with running() as pair:
            pair.small.broken = "out of order"
            assert [one.stage for one in await pair.bench.answers("w1", "w2", "w60")] == [1, 1, 1]
            for _ in range(4):  # the small model counts as broken by now
                assert (await pair.bench.answers("w1"))[0].stage == 1
            pair.bench.classifier.refuse_if_down()

    run(test())


def test_what_fails_in_the_big_model_fails() -> None:
    async def test() -> None:
        async with running() as pair:
            (future,) = pair.bench.submit("w60 raises")
            with pytest.raises(ForwardError):
                await future
            (blank,) = pair.bench.submit(" ")
            with pytest.raises(RefusedTextError):
                await blank

    run(test())


def test_a_text_that_is_cancelled_or_too_late_leaves_the_queue_of_the_big_model() -> None:
    async def test() -> None:
        async with running(num_slots=2, num_slots_of_big=1) as pair:
            pair.big.hold()
            pair.bench.submit("w60")
            await asyncio.to_thread(pair.big.begun.acquire)
            (cancelled,) = pair.bench.submit("w61")
            (late,) = pair.bench.submit("w62", timeout_s=0.2)
            (kept,) = pair.bench.submit("w63")
            while len(pair.bench.classifier._stages[1].batcher.queue) < 3:
                await asyncio.sleep(0.001)
            cancelled.cancel()
            with pytest.raises(DeadlineExceededError):
                await late
            pair.big.let_go()
            await kept
            assert set(pair.texts_of_big) == {(60,), (63,)}

    run(test())


def test_a_stage_that_is_asked_for_answers_whatever_the_cascade_would_do() -> None:
    async def test() -> None:
        async with running() as pair:
            classifier = pair.bench.classifier
            (small,) = await asyncio.gather(*classifier.submit(["w60"], 60, only_stage=0))
            (big,) = await asyncio.gather(*classifier.submit(["w1"], 60, only_stage=1))
            assert (small.stage, big.stage) == (0, 1)

    run(test())


def test_the_audit_compares_what_the_small_model_answers_and_makes_it_stricter() -> None:
    async def test() -> None:
        async with running() as pair:
            audit = pair.bench.classifier.audit
            assert audit is not None
            for _ in range(200):  # the big model never agrees
                await pair.bench.answers(*(f"w{i}" for i in range(1, 21)))
                if audit.threshold > 1:
                    break
            assert audit.num_tightened == 2
            answers = await pair.bench.answers("w1", "w2")
            assert [one.stage for one in answers] == [1, 1]

    run(test())


def test_the_audit_lets_the_small_model_answer_while_both_agree() -> None:
    async def test() -> None:
        async with running() as pair:
            pair.big.agrees_on = range(SURE_BELOW)
            audit = pair.bench.classifier.audit
            assert audit is not None
            for _ in range(30):
                answers = await pair.bench.answers(*(f"w{i}" for i in range(1, 41)))
            assert {one.stage for one in answers} == {0}
            assert audit.evidence < 1
            assert audit.threshold == 0.9

    run(test())


CASCADE = Cascade(None, 0.9, (0.95, 0.99, 1.5), 0.005, {})  # type: ignore[arg-type]


def texts_until_alarm(rate: float, passed_on: float, seed: int, most: int) -> int | None:
    """After how many texts the audit is alarmed, if the small model answers otherwise in this share
    of all texts.
    """
    audit, generator = Audit(CASCADE, seed), np.random.default_rng(seed)
    for number in range(most):
        is_hard = generator.random() < passed_on
        if audit.draws(is_hard):
            audit.checked(audit.threshold, differs=generator.random() < rate / (1 - passed_on))
        if audit.num_tightened:
            return number + 1
    return None


def test_the_audit_raises_no_alarm_in_95_of_100_runs_while_the_promise_is_just_kept() -> None:
    alarms = sum(texts_until_alarm(0.005, 0.2, seed, 20_000) is not None for seed in range(100))
    assert alarms <= 9  # 5 expected at most; 10 would happen to a right audit in 3% of such tests


def test_the_audit_notices_a_broken_promise_within_2000_texts() -> None:
    found = [texts_until_alarm(0.04, 0.3, seed, 2_000) for seed in range(50)]
    assert sum(one is not None for one in found) >= 40


def test_the_audit_checks_every_fourth_text_first_then_few_and_more_again_after_a_change() -> None:
    audit = Audit(CASCADE, seed=0)
    assert audit.share == CHECKED_AT_FIRST
    generator = np.random.default_rng(0)

    def read(num_texts: int, passed_on: float) -> None:
        for _ in range(num_texts):
            if audit.draws(generator.random() < passed_on):
                audit.checked(audit.threshold, differs=False)

    read(5 * CHECKS_AT_FIRST, 0.2)
    assert audit.share == CHECKED
    read(20_000, 0.2)
    assert audit.share == CHECKED
    read(700, 0.5)
    assert audit.share == CHECKED_AT_FIRST
    read(20_000, 0.5)
    assert audit.share == CHECKED


def test_the_audit_ignores_a_check_of_an_earlier_threshold() -> None:
    audit = Audit(CASCADE, seed=0)
    while not audit.num_tightened:
        audit.checked(0.9, differs=True)
    before = audit.evidence
    audit.checked(0.9, differs=True)
    assert audit.evidence == before
    audit.checked(0.95, differs=True)
    assert audit.evidence > before


@pytest.mark.parametrize("promised", [0.0001, 0.005, 0.3, 0.9])
def test_the_audit_still_notices_a_broken_promise_after_a_long_time_without_any_difference(promised: float) -> None:
    audit = Audit(replace(CASCADE, max_disagreement=promised), seed=0)
    for _ in range(100_000):
        audit.checked(0.9, differs=False)
    assert 0 < audit.evidence < ALARM
    for _ in range(2000):
        audit.checked(0.9, differs=True)
    assert audit.num_tightened == 1
