"""What an export keeps of the held-out rows, so that a server can compare its texts with them.

Only counts and thresholds are kept, no texts. A **cell** is a label that was answered and a tenth of
the confidences: 10 cells per label. Each cell knows how many of its rows were answered right, which
is what an estimate of a stream's accuracy is made of. A **tail** is a threshold that a given share
of the rows reaches, for each of four scores of a text, which is what the alarm bets on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_VERSION = 1
BINS = 10  # of the confidence, within each answered label
TAILS = (0.01, 0.02, 0.05, 0.1, 0.2)
UNFAMILIAR = "unfamiliar"
# What is looked at in a text: the higher the score, the less it is like most of the rows.
SCORES = ("uncertain", UNFAMILIAR, "short", "long")
# A table of all pairs grows with the square of the labels, and most of its cells would be empty.
_MOST_LABELS_CONFUSED = 50


class Cell(NamedTuple):
    """The rows of the reference that were answered with one label and about as surely."""

    rows: int
    right: int
    total: float  # of the confidences


@dataclass(frozen=True, slots=True)
class Reference:
    """The held-out rows of one model, as its artefact's manifest describes them."""

    rows: int
    accuracy: float
    confidence: float  # the mean
    edges: tuple[float, ...]  # between the tenths of the confidence
    cells: Mapping[int, Cell]
    confusion: NDArray[np.float64] | None  # (label that is right, label answered): rows
    tails: Mapping[str, tuple[float | None, ...]]  # by score: a threshold for each of TAILS
    unfamiliar_rows: int  # those that the tail of familiarity was taken from

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Reference | None:
        """What the manifest of an artefact says; None for one without, such as an older one.

        Raises:
            ValueError: it is damaged, or of a newer version.
        """
        if not (record := manifest.get("reference")):
            return None
        if (version := record.get("version")) != _VERSION:
            what = f"the reference in manifest.json has version {version!r:.80}"
            raise ValueError(f"{what}, this program reads version {_VERSION}; export again")
        try:
            return cls(
                int(record["rows"]),
                float(record["accuracy"]),
                float(record["confidence"]),
                tuple(map(float, record["edges"])),
                {
                    int(a) * BINS + int(b): Cell(int(n), int(r), float(t))
                    for a, b, n, r, t in record["cells"]
                },
                np.array(record["confusion"], dtype=np.float64) if "confusion" in record else None,
                {name: tuple(tails) for name, tails in record["tails"].items()},
                int(record.get("unfamiliar_rows", 0)),
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"the reference in manifest.json is damaged ({type(error).__name__}: {error})"
            raise ValueError(f"{what}; export again") from error

    @staticmethod
    def fit(
        probabilities: Floats,
        right: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        familiarity: Floats | None = None,
    ) -> dict[str, Any]:
        """What the manifest keeps of held-out rows.

        Args:
            probabilities: calibrated, (rows, labels).
            right: the label that is right for each row, (rows,).
            num_tokens: the length of each whole text, (rows,).
            familiarity: of those rows that the table of familiarity has not read; None if the model
                has no such table.
        """
        num_labels = probabilities.shape[1]
        answered, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
        is_right = answered == right
        edges = np.quantile(confidence, np.arange(1, BINS) / BINS)
        # As `cell` below: a confidence on an edge belongs to the lower tenth.
        cells = answered * BINS + np.searchsorted(edges, confidence)
        sums = (np.bincount(cells, one) for one in (None, is_right, confidence))
        found: dict[str, Any] = {
            "version": _VERSION,
            "rows": len(right),
            "accuracy": float(is_right.mean()),
            "confidence": float(confidence.mean()),
            "edges": edges.tolist(),
            "cells": [
                [cell // BINS, cell % BINS, int(n), int(k), float(total)]
                for cell, (n, k, total) in enumerate(zip(*sums, strict=True))
                if n
            ],
        }
        if num_labels <= _MOST_LABELS_CONFUSED:
            pairs = np.bincount(right * num_labels + answered, minlength=num_labels**2)
            found["confusion"] = pairs.reshape(num_labels, num_labels).tolist()
        tails = {"uncertain": 1 - confidence, "short": -num_tokens, "long": num_tokens}
        if familiarity is not None:
            tails[UNFAMILIAR] = 1 - familiarity
            found["unfamiliar_rows"] = len(familiarity)
        found["tails"] = {
            name: [_tail(np.sort(tails[name]), share) for share in TAILS]
            for name in SCORES
            if name in tails
        }
        return found

    def cell(self, label: int, confidence: float) -> int:
        """The number of a text's cell, by the label that was answered."""
        return label * BINS + bisect_left(self.edges, confidence)

    def rows_behind(self, score: str) -> int:
        return self.unfamiliar_rows if score == UNFAMILIAR else self.rows

    def answered(self) -> dict[int, int]:
        """How many rows were answered with each label."""
        counts: dict[int, int] = {}
        for cell, one in self.cells.items():
            counts[cell // BINS] = counts.get(cell // BINS, 0) + one.rows
        return counts


def most_in_tail(rows: int, share: float) -> int:
    """How many of the rows may lie in a tail: a new text and they are at most ``share`` of all."""
    # Rounded first, or 0.2 x 5 could be less than 1.
    return math.floor(round(share * (rows + 1), 9)) - 1


def _tail(ascending: NDArray[Any], share: float) -> float | None:
    """The least value that at most so many rows reach; None if there is none, because the rows are
    too few, or too many of them have the same value.
    """
    most = most_in_tail(len(ascending), share)
    if most < 1:
        return None
    least = ascending[-most]
    if most < len(ascending) and ascending[-most - 1] == least:
        above = np.searchsorted(ascending, least, side="right")
        if above == len(ascending):
            return None
        least = ascending[above]
    return float(least)
