"""Runs the reference and an artefact on the same rows, in turns: which answers changed, and how fast each was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.engines.base import Engine, probabilities_of

# Long enough that a turn is more than warming up, short enough that both engines see the same machine load.
TURN_TEXTS = 64
_SHOWN_CHARS = 70


@dataclass(frozen=True, slots=True)
class Comparison:
    """The classes that the reference (before) and the artefact (after) gave the same rows, and the time they took."""

    class_ids: NDArray[np.int64]  # the right ones
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    before_seconds: float
    after_seconds: float

    @property
    def drop_points(self) -> float:
        """Percentage points of accuracy that the artefact loses; negative if it gains."""
        lost = int((self.before == self.class_ids).sum()) - int((self.after == self.class_ids).sum())
        return 100 * lost / len(self.class_ids)

    def accuracy(self, dataset: str) -> dict[str, Any]:
        """Return what the manifest notes about the accuracy on these rows."""
        was_right, is_right = self.before == self.class_ids, self.after == self.class_ids
        changed = self.before != self.after
        return {
            # Of a path only the end: the folder above it says nothing to others, and a published model shows this.
            "dataset": "/".join(Path(dataset).parts[-2:]),
            "rows": len(self.class_ids),
            "before": round(float(was_right.mean()), 6),
            "after": round(float(is_right.mean()), 6),
            "drop_points": round(self.drop_points, 4),
            "disagreement_percent": round(100 * float(changed.mean()), 4),
            "flipped": {
                "right_to_wrong": int((was_right & changed).sum()),
                "wrong_to_right": int((is_right & changed).sum()),
                "wrong_to_wrong": int((changed & ~was_right & ~is_right).sum()),
            },
        }

    @property
    def texts_per_second(self) -> tuple[float, float]:
        return len(self.before) / self.before_seconds, len(self.after) / self.after_seconds

    def changed_lines(self, texts: Sequence[str], labels: Sequence[str], limit: int) -> list[str]:
        """Return one line for each of the first texts whose label changed, beginning with those that were right."""
        changed = np.flatnonzero(self.before != self.after)
        worst_first = sorted(changed, key=lambda i: self.before[i] != self.class_ids[i])
        return [
            f"{labels[self.before[i]]} -> {labels[self.after[i]]} (right: {labels[self.class_ids[i]]}): "
            f"{_shortened(texts[i])}"
            for i in worst_first[:limit]
        ]


def compare(
    reference: Engine,
    artefact: Engine,
    token_ids: Sequence[Sequence[int]],
    class_ids: Sequence[int],
    advance: Callable[[int], None],
) -> Comparison:
    """Classify all rows with both engines; ``advance`` is called with the number of rows done since its last call."""
    engines = {"before": reference, "after": artefact}
    answers: dict[str, list[NDArray[np.int64]]] = {"before": [], "after": []}
    seconds = {"before": 0.0, "after": 0.0}
    for engine in engines.values():
        probabilities_of(engine, token_ids[:TURN_TEXTS])  # the first pass prepares what later ones reuse
    for turn, start in enumerate(range(0, len(token_ids), TURN_TEXTS)):
        texts = token_ids[start : start + TURN_TEXTS]
        # Alternate which engine goes first, so that neither always finds the caches warm.
        for name in sorted(engines, reverse=bool(turn % 2)):
            began = time.perf_counter()
            answers[name].append(probabilities_of(engines[name], texts).argmax(axis=1))
            seconds[name] += time.perf_counter() - began
        advance(len(texts))
    return Comparison(
        class_ids=np.asarray(class_ids, dtype=np.int64),
        before=np.concatenate(answers["before"]),
        after=np.concatenate(answers["after"]),
        before_seconds=seconds["before"],
        after_seconds=seconds["after"],
    )


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 1] + "…"
