"""A classifier over a stand-in engine, and what its tests do with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from common.text import Encoded, TextTokenizer
from inference.batching.calls import Answer
from inference.batching.classifier import Classifier, QueueLimits
from inference.batching.tokenizing import TokenizerThreads
from inference.engines.answering import OneLabelAnswering
from inference.engines.model_loader import ModelLoader
from inference.metrics import ServerMetrics
from tests.inference.stand_in_engine import ANSWERS_NAN, DIES, NUM_LABELS, RAISES, StandInEngine

MAX_LENGTH = 16
LONG = 60.0  # seconds; nobody waits so long
WORDS = {f"w{i}": i for i in range(90)} | {"raises": RAISES, "dies": DIES, "nan": ANSWERS_NAN, "unencodable": 93}


class PickyTokenizer(TextTokenizer):
    """Fails on texts with a certain word."""

    def encode_cleaned(self, texts: Sequence[str]) -> list[Encoded]:
        if any("unencodable" in text for text in texts):
            raise RuntimeError("a text that cannot be encoded")
        return super().encode_cleaned(texts)


class StandInModel:
    """A stand-in engine behind a tokenizer of which each word is one token."""

    cascade = None
    encoder = None
    stages = ModelLoader.stages

    def __init__(
        self, engine: StandInEngine, max_length: int = MAX_LENGTH, tokens_per_second: float | None = None
    ) -> None:
        self.engine = engine
        self.max_length = max_length
        self.answering = OneLabelAnswering([str(number) for number in range(NUM_LABELS)])
        self.tokens_per_second = tokens_per_second
        tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.tokenizer = PickyTokenizer(tokenizer, max_length)


class Counts(ServerMetrics):
    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def tokenized(self, texts: int, seconds: float) -> None:
        self.of["tokenized"] += texts

    def waited(self, seconds: float) -> None:
        assert seconds >= 0
        self.of["waited"] += 1

    def deduplicated(self) -> None:
        self.of["deduplicated"] += 1

    def cache_hit(self) -> None:
        self.of["hit"] += 1

    def cache_miss(self) -> None:
        self.of["miss"] += 1

    def dropped(self, reason: str) -> None:
        self.of[reason] += 1


class Bench:
    def __init__(self, model: Any, tokenizers: TokenizerThreads | None = None, **limits: float) -> None:
        self.engine = model.engine
        self.counts = Counts()
        self.num_submitted = 0
        all_limits = QueueLimits(**{"max_batch_tokens": 64, "max_wait_seconds": LONG} | limits)
        self.classifier = Classifier(model, all_limits, self.counts, tokenizers=tokenizers)

    def submit(self, *texts: str, timeout_s: float = LONG) -> list[asyncio.Future[Answer]]:
        futures = self.classifier.submit(texts, timeout_s)
        self.num_submitted += len(texts)
        return futures

    async def answers(self, *texts: str) -> list[Answer]:
        return await asyncio.gather(*self.submit(*texts))

    async def pass_begun(self) -> None:
        await asyncio.to_thread(self.engine.begun.acquire)

    async def occupy(self) -> asyncio.Future[Answer]:
        """Hold the engine in a pass, so that what comes next waits."""
        self.engine.hold()
        (future,) = self.submit("w89")
        await self.pass_begun()
        return future

    async def all_tokenized(self) -> None:
        while self.counts.of["tokenized"] < self.num_submitted:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(
    engine: StandInEngine | None = None, model: StandInModel | None = None, **limits: float
) -> AsyncIterator[Bench]:
    bench = Bench(model or StandInModel(engine or StandInEngine()), **limits)
    try:
        yield bench
    finally:
        bench.engine.let_go()
        await asyncio.to_thread(bench.classifier.close)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; what the event loop would only log fails the test."""
    problems: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        await test

    asyncio.run(watched())
    assert not problems


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(WORDS[word] for word in text.split())
