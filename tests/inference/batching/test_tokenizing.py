"""Models with the same tokenizer: its thread reads the texts of all of them together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from common.text import Encoded
from inference.batching.tokenizing import TEXTS_PER_ROUND, TokenizerThreads
from inference.errors import ForwardError, WorkerDownError
from tests.inference.batching.classifier_bench import LONG, Bench, StandInModel, run
from tests.inference.stand_in_engine import StandInEngine, answer_of


class HeldTokenizer:
    """The tokenizer of stand-in models: it keeps account of its rounds, and holds them until `let_go`."""

    def __init__(self) -> None:
        self.tokenizer = StandInModel(StandInEngine()).tokenizer
        self.threads = TokenizerThreads()
        self.rounds: list[list[str]] = []
        self.begun = threading.Event()
        self._may_go = threading.Event()
        self._encode = self.tokenizer.encode_cleaned

    def serve(self) -> Bench:
        model = StandInModel(StandInEngine())
        model.tokenizer = self.tokenizer
        return Bench(model, self.threads)

    def hold(self) -> None:
        self.tokenizer.encode_cleaned = self._encode_when_let_go

    def let_go(self) -> None:
        self._may_go.set()

    def _encode_when_let_go(self, texts: Sequence[str]) -> list[Encoded]:
        self.rounds.append(list(texts))
        self.begun.set()
        assert self._may_go.wait(LONG)
        return self._encode(texts)


@asynccontextmanager
async def in_a_round(num_models: int) -> AsyncIterator[tuple[HeldTokenizer, list[Bench]]]:
    """Models whose common tokenizer has begun a round, with a text of the first one, and is held."""
    held = HeldTokenizer()
    benches = [held.serve() for _ in range(num_models)]
    held.hold()
    benches[0].submit("w89")
    await asyncio.to_thread(held.begun.wait)
    try:
        yield held, benches
    finally:
        held.let_go()
        for bench in benches:
            await asyncio.to_thread(bench.classifier.close)


def test_texts_of_models_with_the_same_tokenizer_are_tokenized_in_the_same_round() -> None:
    async def test() -> None:
        async with in_a_round(5) as (held, benches):
            futures = [bench.submit(f"w{i}", f"w{i} w1") for i, bench in enumerate(benches, 2)]
            held.let_go()
            for i, (bench, own) in enumerate(zip(benches, futures, strict=True), 2):
                answers = [answer.values for answer in await asyncio.gather(*own)]
                assert answers == [pytest.approx(answer_of(ids)) for ids in [(i,), (i, 1)]]
                await bench.all_tokenized()
            assert held.rounds[0] == ["w89"]
            assert sorted(held.rounds[1]) == sorted([f"w{i}{more}" for i in range(2, 7) for more in ("", " w1")])
            assert [bench.counts.of["tokenized"] for bench in benches] == [3, 2, 2, 2, 2]
            assert not any(bench.classifier.queued_tokens for bench in benches)

    run(test())


def test_many_calls_for_one_model_do_not_delay_a_text_for_another_one_at_their_tokenizer() -> None:
    async def test() -> None:
        async with in_a_round(2) as (held, (first, second)):
            for i in range(3 * TEXTS_PER_ROUND):
                first.submit(f"w{i % 80} w{i // 80}")
            (future,) = second.submit("w88")
            held.let_go()
            await future
            assert "w88" in held.rounds[1]

    run(test())


def test_a_text_that_the_tokenizer_fails_on_fails_none_for_another_model() -> None:
    async def test() -> None:
        async with in_a_round(2) as (held, (first, second)):
            (bad,), (good,) = first.submit("unencodable"), second.submit("w1")
            held.let_go()
            with pytest.raises(ForwardError, match="the tokenizer failed on this text"):
                await bad
            assert (await good).values == pytest.approx(answer_of((1,)))

    run(test())


def test_a_model_that_is_closed_leaves_the_tokenizer_to_the_others_and_the_last_one_ends_it() -> None:
    async def test() -> None:
        async with in_a_round(2) as (held, (first, second)):
            (left,), (answered,) = first.submit("w1"), second.submit("w2")
            first.classifier.close()
            with pytest.raises(WorkerDownError):
                await left
            held.let_go()
            assert (await answered).values == pytest.approx(answer_of((2,)))
            assert held.rounds[1] == ["w2"]
            assert second.classifier.is_alive
            thread = held.threads.thread_of(held.tokenizer)
            await asyncio.to_thread(second.classifier.close)
            assert not thread.thread.is_alive
            third = held.serve()
            assert (await third.answers("w3"))[0].values == pytest.approx(answer_of((3,)))
            await asyncio.to_thread(third.classifier.close)

    run(test())
