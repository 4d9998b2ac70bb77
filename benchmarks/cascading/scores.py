"""What a small and a big model answer to the same texts, computed once and kept in files."""

from __future__ import annotations

import hashlib
import io
import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness
from common.calibration import Floats
from common.errors import UserError
from common.files import sha256_of, write_whole
from common.model_folder import MANIFEST_FILE, is_artefact, read_saved_model
from common.rows import LabelledRows, read_labelled_rows
from inference.engines.base import scores_of
from inference.engines.model_loader import ModelLoader

Bools = NDArray[np.bool_]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Both:
    """The answers of both models to the same texts, each (texts,).

    ``confidence``: of the small one in its most probable label, 0 for a text that it truncated,
    because such a text is always passed on. ``small`` and ``big``: the labels' positions.
    """

    confidence: Floats
    small: Ids
    big: Ids

    def __getitem__(self, which: slice | Ids) -> Both:
        return Both(self.confidence[which], self.small[which], self.big[which])

    def __len__(self) -> int:
        return len(self.big)

    @property
    def differs(self) -> Bools:
        return self.small != self.big

    def is_easy(self, threshold: float) -> Bools:
        """Whether the small model answers each text."""
        return self.confidence >= threshold

    def is_other(self, threshold: float) -> Bools:
        """Whether the cascade gives each text another label than the big model does."""
        return self.is_easy(threshold) & self.differs

    def answers(self, threshold: float) -> Ids:
        """The cascade's labels."""
        return np.where(self.is_easy(threshold), self.small, self.big)


def both_models(options: Namespace, texts: Sequence[str]) -> Both:
    values, is_cut = scored(options.small, texts, options.cache)
    big, _ = scored(options.big[0], texts, options.cache)
    confidence = np.where(is_cut, 0.0, values.max(axis=1))
    return Both(confidence, values.argmax(axis=1), big.argmax(axis=1))


def scored(artefact: Path, texts: Sequence[str], cache: Path) -> tuple[Floats, Bools]:
    """Probabilities as they are served, (texts, labels), and whether each text was truncated."""
    path = cache / f"{_key(artefact, texts)}.npz"
    if path.exists():
        with np.load(path) as found:
            return found["values"], found["is_cut"]
    harness.report(f"{artefact.name}: scoring {len(texts):,} texts")
    model = ModelLoader(artefact)
    encoded = model.tokenizer.encode(texts)
    values = model.answering.answers(scores_of(model.engine, [one.ids for one in encoded]))
    is_cut = np.array([one.truncated for one in encoded])
    file = io.BytesIO()
    np.savez(file, values=values, is_cut=is_cut)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, file.getvalue())
    return values, is_cut


def _key(artefact: Path, texts: Sequence[str]) -> str:
    if not is_artefact(artefact):
        what = "is not an exported model; `python -m inference.export` writes one"
        raise UserError(f"{artefact}: {what}", code="benchmark-input")
    parts = (sha256_of(artefact / MANIFEST_FILE), json.dumps(list(texts)))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def read_rows(options: Namespace) -> tuple[LabelledRows, list[str]]:
    """The test rows, and the names of the labels."""
    labels = read_saved_model(options.small).labels
    return read_labelled_rows(options.dataset, labels), list(labels)
