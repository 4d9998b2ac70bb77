"""One process of `benchmarks.many_heads`: without PyTorch, as a server, so that its memory is that of a server.

Reads ``{"artefacts": [...], "heads": n, "texts": [...]}`` and writes the figures, both as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from common.memory import release_free_memory
from inference.engines.base import TokenBatch
from inference.engines.model_loader import ModelLoader

BATCH = 32
NUM_ANSWERS = 8
PASSES = 5  # over the texts, of each measurement of time
MB = 1e6


def main() -> None:
    given = json.load(sys.stdin)
    print(json.dumps(measure(given["artefacts"], given["heads"], given["texts"])))


def measure(artefacts: list[str], num_heads: int, texts: list[str]) -> dict[str, Any]:
    """Load so many models on one encoder.

    Returns their memory, the milliseconds per text of the first one and of all, and whether each
    answers as it did alone.
    """
    models: list[ModelLoader] = []
    alone: list[list[bytes]] = []
    answers: list[Any] = []
    for i in range(num_heads):
        model = ModelLoader(artefacts[i % len(artefacts)], "native")
        scale_head(model, 1 + i // len(artefacts) / 1000)
        batches = batches_of(model, texts)
        alone.append([model.engine.logits(batch).tobytes() for batch in batches])
        answers.append(answers_of(model, texts))
        model.share_encoder(models)
        models.append(model)
    release_free_memory()
    memory = resident_bytes() / MB
    encoder = models[0].encoder
    if encoder is None or any(model.encoder is not encoder for model in models):
        sys.exit(
            "these models do not share an encoder; give artefacts of models that were trained with --method head"
        )
    together = [encoder.read_all(batch) for batch in batches]
    is_equal = all(
        [one[model.engine][0].tobytes() for one in together] == expected
        and [model.engine.logits(batch).tobytes() for batch in batches] == expected
        and answers_of(model, texts) == answer
        for model, expected, answer in zip(models, alone, answers, strict=True)
    )
    found: dict[str, Any] = {
        "memory": memory,
        "equal": is_equal,
        "labels": sum(len(one.labels) for one in models),
    }
    single = [TokenBatch.of([one.ids]) for one in models[0].tokenizer.encode(texts)]
    for name, some in (("single", single), ("batch", batches)):
        found |= {f"{name}_{who}": ms for who, ms in ms_per_text(models[0], some).items()}
    return found


def scale_head(model: ModelLoader, factor: float) -> None:
    """Make another head of a model that is used several times, so that all heads differ."""
    (head,) = model.engine.heads
    for name, array in head.items():
        # A pooler that is a matrix is the base's, which all heads have.
        if name.startswith("classifier.") or head["pooler.weight"].ndim == 1:
            array *= factor


def answers_of(model: ModelLoader, texts: list[str]) -> list[Any]:
    calibration = model.answering.calibration
    is_familiar = calibration is not None and calibration.familiarity is not None
    return model.predict_batch(texts[:NUM_ANSWERS], familiarity=is_familiar)


def batches_of(model: ModelLoader, texts: list[str]) -> list[TokenBatch]:
    ids = [one.ids for one in model.tokenizer.encode(texts)]
    return [TokenBatch.of(ids[start : start + BATCH]) for start in range(0, len(ids), BATCH)]


def ms_per_text(model: ModelLoader, batches: list[TokenBatch]) -> dict[str, float]:
    """Of the first head alone and of all, each batch in turn, so that both see the same machine."""
    times: dict[str, list[float]] = {"one": [], "all": []}
    for batch in batches * PASSES:
        for who, compute in (("one", model.engine.logits), ("all", model.encoder.read_all)):
            start = perf_counter()
            compute(batch, 1)
            times[who].append((perf_counter() - start) / len(batch.lengths) * 1e3)
    return {who: median(values) for who, values in times.items()}


def resident_bytes() -> int:
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index("VmRSS:") + 1]) * 1024


if __name__ == "__main__":
    main()
