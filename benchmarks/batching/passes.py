"""Forward passes of a given size: how long they take, on one slot, on all, and side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from statistics import median
from threading import Barrier
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.batching.scheduler import FairQueue, Flow, QueuedText
from inference.engines.base import Engine, TokenBatch

NEVER = float("inf")
# Passes of one text each; else the number is the tokens that a pass may cost.
ONE_TEXT = 0


def lay_out(token_ids: Sequence[NDArray[np.int32]], max_tokens: int, *, pads: bool, window: int) -> list[TokenBatch]:
    """Group texts, each its own call, as the server's queue groups them."""
    if max_tokens == ONE_TEXT:
        return [TokenBatch.of([ids]) for ids in token_ids]
    queue = FairQueue(max_tokens, pads=pads, length_window=window)
    for ids in token_ids:
        queue.put(Flow(1), QueuedText(ids, NEVER))
    batches = []
    while taken := queue.take():
        batches.append(TokenBatch.of([text.ids for text in taken]))
    return batches[: max(1, len(batches) - 1)]  # the last one is a rest


def measure_passes(
    engine: Engine, batches: Sequence[TokenBatch], threads: int, side_by_side: int, seconds: float
) -> dict[str, Any]:
    """Run passes for a while.

    Args:
        engine: What runs them.
        batches: Taken in turn, from the first again after the last.
        threads: Slots of each pass.
        side_by_side: Passes at the same time.
        seconds: After so many no new pass begins.
    """
    barrier = Barrier(side_by_side)

    def run(number: int) -> tuple[int, int, list[float]]:
        turns = cycle(batches[number::side_by_side] or batches)
        engine.logits(next(turns), threads)
        barrier.wait()
        texts = tokens = 0
        took: list[float] = []
        end = time.perf_counter() + seconds
        while not took or time.perf_counter() < end:
            batch = next(turns)
            started = time.perf_counter()
            engine.logits(batch, threads)
            took.append(time.perf_counter() - started)
            texts += len(batch.lengths)
            tokens += len(batch.ids)
        return texts, tokens, took

    with ThreadPoolExecutor(side_by_side) as pool:
        results = list(pool.map(run, range(side_by_side)))
    return {
        "tokens_per_second": sum(tokens / sum(took) for _, tokens, took in results),
        "texts_per_second": sum(texts / sum(took) for texts, _, took in results),
        "texts_per_pass": sum(texts for texts, _, _ in results) / sum(len(took) for _, _, took in results),
        "pass_s": median(one for _, _, took in results for one in took),
    }


def padding(batches: Sequence[TokenBatch]) -> float:
    """The share of padding among the tokens that an engine which pads computes."""
    cost = sum(len(batch.lengths) * int(batch.lengths.max()) for batch in batches)
    return 1 - sum(len(batch.ids) for batch in batches) / cost
