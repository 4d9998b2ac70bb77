"""A candidate in shadow on the workers of the live model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from inference.batching.calls import Answer
from inference.batching.classifier import BUSY_ABOVE, QueueLimits
from inference.batching.shadow import Shadow
from inference.observing.stream import InShadow
from tests.inference.batching.classifier_bench import LONG, Bench, StandInModel, run
from tests.inference.stand_in_engine import StandInEngine


class Model(StandInModel):
    reads_pairs = False

    def __init__(self, revision: str) -> None:
        super().__init__(StandInEngine())
        self.info = {"name": revision, "revision": revision, "engine": "stand-in", "precision": "none"}


class Counted(Bench):
    """A live model and a candidate; ``of`` counts what became of the texts in shadow."""

    def __init__(self, share: float) -> None:
        live, candidate = Model("old"), Model("new")
        super().__init__(live, max_wait_seconds=1.0)
        self.in_shadow = self.counts.of
        self.counts.in_shadow = self._count  # type: ignore[method-assign]
        limits = QueueLimits(max_wait_seconds=LONG)
        self.candidate = candidate.engine
        self.shadow = Shadow(candidate, live, self.classifier, self.counts, limits, share)  # type: ignore[arg-type]

    def _count(self, result: str, texts: int = 1) -> None:
        self.in_shadow[result] += texts

    async def occupy(self) -> asyncio.Future[Answer]:
        """Hold the only worker in a pass of the live model."""
        while self.engine.begun.acquire(blocking=False):
            pass  # of passes that have ended
        return await super().occupy()

    async def counted(self, texts: int) -> None:
        while sum(self.in_shadow[name] for name in ("same", "differs", "dropped")) < texts:
            await asyncio.sleep(0.001)

    @property
    def read_by_candidate(self) -> int:
        return sum(len(one.texts) for one in self.candidate.passes)


@asynccontextmanager
async def in_shadow(share: float = 1.0) -> AsyncIterator[Counted]:
    bench = Counted(share)
    try:
        yield bench
    finally:
        bench.engine.let_go()
        bench.candidate.let_go()
        await asyncio.to_thread(bench.shadow.close)
        await asyncio.to_thread(bench.classifier.close)


def test_what_waits_for_the_candidate_is_dropped_once_the_live_queue_fills() -> None:
    async def test() -> None:
        async with in_shadow() as bench:
            answered = [f"w{number}" for number in range(10)]
            answers = await bench.answers(*answered)
            blocking = await bench.occupy()  # the only worker has a text of the live model
            bench.shadow.saw(answered, answers)
            while not bench.shadow._own.queued_tokens:
                await asyncio.sleep(0.001)
            live = bench.submit(*(f"w{number} w1 w2 w3 w4" for number in range(20)))
            assert bench.classifier.load > BUSY_ABOVE
            bench.shadow.saw(["w5"], answers[5:6])
            await bench.counted(11)
            bench.engine.let_go()
            await asyncio.gather(blocking, *live)
            assert bench.in_shadow["dropped"] == 11
            assert not bench.read_by_candidate

    run(test())


def test_the_candidate_reads_texts_while_nothing_else_waits() -> None:
    async def test() -> None:
        async with in_shadow() as bench:
            texts = [f"w{number}" for number in range(10)]
            bench.shadow.saw(texts, await bench.answers(*texts))
            await bench.counted(10)
            assert bench.in_shadow["same"] == bench.read_by_candidate == 10
            assert bench.shadow.record["agreement"] == 1
            labels = bench.shadow.record["labels"].values()
            assert sum(one["texts"] for one in labels) == sum(one["same"] for one in labels) == 10

    run(test())


def test_what_the_candidate_answers_is_told_with_the_place_of_the_text() -> None:
    async def test() -> None:
        async with in_shadow() as bench:
            texts = [f"w{number}" for number in range(4)]
            told: list[tuple[int, InShadow]] = []
            bench.shadow.saw(texts, await bench.answers(*texts), lambda *one: told.append(one))
            await bench.counted(4)
            assert sorted(place for place, _ in told) == [0, 1, 2, 3]
            assert {one.revision for _, one in told} == {"new"}
            assert all(0 < one.confidence <= 1 for _, one in told)

    run(test())


def test_a_burst_leaves_no_more_than_a_few_texts_to_the_candidate() -> None:
    async def test() -> None:
        async with in_shadow() as bench:
            answers = await bench.answers(*["w1"] * 4)
            blocking = await bench.occupy()
            bench.shadow.saw(["w1"] * 200, answers * 50)
            await bench.counted(100)
            assert bench.in_shadow["dropped"] == 200 - 32
            bench.engine.let_go()
            await blocking
            await bench.counted(200)

    run(test())


def test_a_candidate_that_fails_costs_no_answer() -> None:
    async def test() -> None:
        async with in_shadow() as bench:
            bench.candidate.broken = "out of order"
            texts = [f"w{number}" for number in range(5)]
            for _ in range(3):
                bench.shadow.saw(texts, await bench.answers(*texts))
            await bench.counted(15)
            assert bench.in_shadow["dropped"] == 15
            assert bench.shadow.record["agreement"] is None
            assert bench.classifier.health.failure is None

    run(test())


def test_only_the_share_is_drawn() -> None:
    async def test() -> None:
        async with in_shadow(share=0.1) as bench:
            bench.shadow._random.seed(0)
            (answer,) = await bench.answers("w1")
            blocking = await bench.occupy()
            bench.shadow.saw(["w1"] * 2000, [answer] * 2000)
            await bench.counted(100)
            bench.engine.let_go()
            await blocking
            while bench.shadow._waiting:
                await asyncio.sleep(0.001)
            assert 150 < sum(bench.in_shadow[name] for name in ("same", "dropped")) < 250

    run(test())


@pytest.mark.parametrize(("revision", "pairs", "reason"), [("old", False, "it is the model"), ("new", True, "pairs")])
def test_what_cannot_be_compared_is_not_put_in_shadow(revision: str, pairs: bool, reason: str) -> None:
    async def test() -> None:
        async with in_shadow() as bench:
            candidate = Model(revision)
            candidate.reads_pairs = pairs
            live, limits = Model("old"), QueueLimits()
            with pytest.raises(ValueError, match=reason):
                Shadow(candidate, live, bench.classifier, bench.counts, limits, 1.0)  # type: ignore[arg-type]

    run(test())
