"""Our server with an engine that costs nothing, to see what all the rest of a request costs.

It runs as `python -m benchmarks.serving.free_engine --port PORT`, with the settings of `python -m
inference.serve`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import run_command
from inference import serve
from inference.engines.base import CPU_BATCH_TOKENS, TokenBatch
from inference.engines.model_loader import ModelLoader


class FreeEngine:
    name = "none"
    num_slots = 1
    batch_tokens = CPU_BATCH_TOKENS
    pads = False
    survives_fork = True

    def __init__(self, num_labels: int) -> None:
        self._scores = np.linspace(0, 1, num_labels, dtype=np.float32)

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        return np.tile(self._scores, (len(batch.lengths), 1))


def _load(path: Path, engine: str) -> ModelLoader:
    model = ModelLoader(path, engine)
    model.engine = FreeEngine(len(model.labels))
    # Otherwise the queue would size its batches and its refusals by the speed that the replaced
    # engine was measured with.
    model.tokens_per_second = 1e7
    return model


if __name__ == "__main__":
    run_command(lambda: serve.main(load_model=_load))
