"""What waiting for more texts gains and costs: the real queue in this process, asked with and without a wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import median, quantiles
from typing import Any

from inference.batching.batcher import Observer
from inference.batching.calls import Answer
from inference.batching.classifier import Classifier, QueueLimits
from inference.engines.model_loader import ModelLoader

LONG = 600.0  # seconds; nobody is to be turned away here
# Clients that ask again as soon as they are answered.
CLIENTS = (1, 8, 64)
# Texts that come at random instants, as a share of what 64 clients get.
ARRIVALS = {"light": 0.2, "heavy": 0.85}


class Passes(Observer):
    """Counts passes and the texts in them."""

    def __init__(self) -> None:
        self.passes = self.texts = 0

    def batch_done(self, texts: int, tokens: int, seconds: float) -> None:
        """Count a pass."""
        self.passes += 1
        self.texts += texts


class Window:
    """Hands texts on once the oldest has waited so long; the queue itself never waits.

    While all slots are busy this costs nothing that the queue would not: it differs where a slot is free.
    """

    def __init__(self, classifier: Classifier, wait_s: float) -> None:
        self._classifier = classifier
        self._wait_s = wait_s
        self._held: list[tuple[str, asyncio.Future[asyncio.Future[Answer]]]] = []

    async def ask(self, text: str) -> None:
        """Wait for a text's answer."""
        if self._wait_s:
            loop = asyncio.get_running_loop()
            submitted: asyncio.Future[asyncio.Future[Answer]] = loop.create_future()
            self._held.append((text, submitted))
            if len(self._held) == 1:
                loop.call_later(self._wait_s, self._hand_on)
            await (await submitted)
        else:
            await self._classifier.submit([text], LONG)[0]

    def _hand_on(self) -> None:
        held, self._held = self._held, []
        for text, submitted in held:
            submitted.set_result(self._classifier.submit([text], LONG)[0])


class Load:
    """Asks for texts in turn and takes the time of each answer."""

    def __init__(self, window: Window, texts: Sequence[str]) -> None:
        self._window = window
        self._texts = texts
        self._next = 0
        self.latencies: list[float] = []

    async def ask(self) -> None:
        """Ask for the next text."""
        text = f"{self._texts[self._next % len(self._texts)]} {self._next}"  # no two alike
        self._next += 1
        started = time.perf_counter()
        await self._window.ask(text)
        self.latencies.append(time.perf_counter() - started)

    async def closed_loop(self, clients: int, seconds: float) -> None:
        """So many clients, each asking again once it is answered."""
        end = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                await self.ask()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def arrivals(self, rate: float, seconds: float) -> None:
        """Texts at random instants, so many a second, however long the answers take."""
        generator = Random(7)
        started = time.perf_counter()
        due = 0.0
        tasks = []
        while (due := due + generator.expovariate(rate)) < seconds or not tasks:
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask()))
        await asyncio.gather(*tasks)


def measure_wait(
    model: ModelLoader, limits: QueueLimits, texts: Sequence[str], wait_s: float, capacity: float | None, seconds: float
) -> dict[str, Any]:
    """Ask in every way with one wait.

    Args:
        model: Loaded anew for nothing: its engine serves one classifier after another.
        limits: Of the queue.
        texts: Asked for in turn.
        wait_s: How long the oldest text waits for others.
        capacity: Texts a second that 64 clients get without a wait; None to take this measurement's own.
        seconds: Of each way.
    """

    async def measure() -> dict[str, Any]:
        found = {}
        for clients in CLIENTS:
            found[f"{clients} clients"] = await one(lambda load, clients=clients: load.closed_loop(clients, seconds))
        full = capacity or found["64 clients"]["texts_per_second"]
        for name, share in ARRIVALS.items():
            found[name] = await one(lambda load, rate=share * full: load.arrivals(rate, seconds))
        return found

    async def one(way: Callable[[Load], Any]) -> dict[str, Any]:
        passes = Passes()
        classifier = Classifier(model, limits, passes)
        load = Load(Window(classifier, wait_s), texts)
        started = time.perf_counter()
        await way(load)
        elapsed = time.perf_counter() - started
        await asyncio.to_thread(classifier.close)
        return {
            "texts_per_second": len(load.latencies) / elapsed,
            "texts_per_pass": passes.texts / max(1, passes.passes),
            "p50_s": median(load.latencies),
            "p99_s": quantiles(load.latencies, n=100, method="inclusive")[98] if len(load.latencies) > 1 else 0.0,
        }

    return asyncio.run(measure())
