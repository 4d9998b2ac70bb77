"""Equal texts: computed once while they are on their way, and remembered where the cache is on."""

from __future__ import annotations

import asyncio

import pytest

from inference.batching.cache import AnswerCache
from inference.errors import (
    DeadlineExceededError,
)
from tests.inference.batching.classifier_bench import (
    run,
    running,
)
from tests.inference.stand_in_engine import answer_of


def test_equal_texts_on_their_way_are_computed_once() -> None:
    async def test() -> None:
        async with running() as bench:
            await bench.occupy()
            futures = [*bench.submit("w1 w2", "w1  w2", "w3"), *bench.submit("w1 \\ w2")]
            await bench.all_tokenized()
            bench.engine.let_go()
            answers = await asyncio.gather(*futures)
            assert [answer.values for answer in answers] == [
                pytest.approx(answer_of(ids)) for ids in [(1, 2), (1, 2), (3,), (1, 2)]
            ]
            assert bench.counts.of["deduplicated"] == 2
            assert [one.texts for one in bench.engine.passes] == [[(89,)], [(1, 2), (3,)]]

    run(test())


def test_a_text_whose_forward_pass_has_begun_is_joined_too() -> None:
    async def test() -> None:
        async with running() as bench:
            first = await bench.occupy()
            (second,) = bench.submit("w89")
            await bench.all_tokenized()
            bench.engine.let_go()
            assert (await first).values == (await second).values
            assert len(bench.engine.passes) == 1

    run(test())


def test_cancelling_one_of_two_equal_texts_leaves_the_other_its_answer() -> None:
    async def test() -> None:
        async with running() as bench:
            await bench.occupy()
            one, other = bench.submit("w1", "w1")
            await bench.all_tokenized()
            one.cancel()
            await asyncio.sleep(0)
            bench.engine.let_go()
            assert (await other).values == pytest.approx(answer_of((1,)))
            assert bench.counts.of["cancelled"] == 1

    run(test())


def test_a_single_text_equal_to_the_last_of_a_large_call_does_not_wait_for_the_call() -> None:
    async def test() -> None:
        async with running() as bench:
            await bench.occupy()
            call = bench.submit(*(f"w{i % 80} " * 8 + f"w{i // 80}" for i in range(256)))
            await bench.all_tokenized()
            (single,) = bench.submit("w15 " * 8 + "w3")  # the text of i = 255
            await bench.all_tokenized()
            bench.engine.let_go()
            await asyncio.gather(single, *call)
            place = next(i for i, one in enumerate(bench.engine.passes) if (*[15] * 8, 3) in one.texts)
            assert place <= 2
            assert bench.counts.of["deduplicated"] == 1

    run(test())


def test_the_deadline_of_one_caller_does_not_end_another_one_s_wait_for_the_same_text() -> None:
    async def test() -> None:
        async with running() as bench:
            await bench.occupy()
            (hasty,) = bench.submit("w1", timeout_s=0.02)
            (patient,) = bench.submit("w1")
            with pytest.raises(DeadlineExceededError):
                await hasty
            bench.engine.let_go()
            assert (await patient).values == pytest.approx(answer_of((1,)))

    run(test())


def test_remembered_answers_are_given_at_once_and_counted() -> None:
    async def test() -> None:
        async with running(cache_entries=2) as bench:
            (first,) = await bench.answers("w1 w2")
            (again,) = await bench.answers(" w1  w2 ")
            assert (first.cached, again.cached) == (False, True)
            assert again.values == first.values
            assert again.forward_s == 0
            assert (bench.counts.of["hit"], bench.counts.of["miss"]) == (1, 1)
            assert len(bench.engine.passes) == 1

    run(test())


def test_without_a_cache_nothing_is_remembered() -> None:
    async def test() -> None:
        async with running() as bench:
            await bench.answers("w1")
            await bench.answers("w1")
            assert len(bench.engine.passes) == 2
            assert bench.counts.of["miss"] == 0

    run(test())


def test_the_cache_forgets_what_was_asked_for_longest_ago() -> None:
    cache = AnswerCache(2)
    for key in (b"a", b"b"):
        cache.put(key, (1.0,))
    cache.get(b"a")
    cache.put(b"c", (1.0,))
    assert [key for key in (b"a", b"b", b"c") if cache.get(key)] == [b"a", b"c"]
    assert len(cache) == 2
