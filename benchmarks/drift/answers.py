"""What a served model answers, as the server would count it; and a model of the first months of current events."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import ROOT, report
from benchmarks.honest.texts import LABEL_OF, SEED, Event, read_events
from common.errors import UserError
from common.model_folder import MANIFEST_FILE
from common.problem_types import SINGLE_LABEL
from inference.engines.answering import Answering
from inference.engines.base import TokenBatch, scores_of
from inference.engines.selection import load_model
from inference.observing.estimates import Reviewed
from inference.observing.reference import BINS, Floats, Reference

Ids = NDArray[np.int64]
FIRST_MONTH = "2011-07"  # that is monitored; the model knows nothing later than the month before
_UNFAMILIAR = 0.01
_MAX_LENGTH = 96


@dataclass(frozen=True)
class Answers:
    """``scores``: calibrated, (texts, labels); ``right``: the label of each text, -1 if no label is right for it."""

    scores: Floats
    familiarity: Floats
    num_tokens: Ids
    right: Ids

    def __getitem__(self, which: Ids | NDArray[np.bool_]) -> Answers:
        return Answers(
            self.scores[which], self.familiarity[which], self.num_tokens[which], self.right[which]
        )

    def __len__(self) -> int:
        return len(self.right)

    @cached_property
    def probabilities(self) -> Floats:
        return SINGLE_LABEL.answers(self.scores)

    @cached_property
    def label(self) -> Ids:
        return self.probabilities.argmax(axis=1)

    @cached_property
    def confidence(self) -> Floats:
        return self.probabilities.max(axis=1)

    @cached_property
    def is_right(self) -> NDArray[np.bool_]:
        return self.label == self.right

    @property
    def unfamiliar(self) -> int:
        return int((self.familiarity < _UNFAMILIAR).sum())

    def cells(self, reference: Reference) -> Ids:
        """`Reference.cell` of each text."""
        return self.label * BINS + np.searchsorted(np.array(reference.edges), self.confidence)

    def counted(self, reference: Reference) -> dict[int, tuple[int, float]]:
        """As the server counts them: by cell, the texts and the sum of their confidences."""
        cells = self.cells(reference)
        totals = np.bincount(cells, self.confidence)
        return {
            int(c): (int(n), float(totals[c]))
            for c, n in zip(*np.unique(cells, return_counts=True), strict=True)
        }

    def reviewed(self, reference: Reference, which: Ids) -> list[Reviewed]:
        """What somebody who knows the right labels makes of some of the texts."""
        some = self[which]
        found = zip(some.cells(reference), some.confidence, some.is_right, strict=True)
        return [(int(cell), float(sure), bool(right), 1.0) for cell, sure, right in found]


class Served:
    """An artefact and its reference; its answers are kept in a folder, since they take minutes."""

    def __init__(self, artefact: Path, kept: Path) -> None:
        self._loaded = load_model(artefact)
        self._kept = kept
        self.labels = list(self._loaded.saved.labels)
        self._manifest = (artefact / MANIFEST_FILE).read_bytes()
        if (reference := Reference.of(json.loads(self._manifest))) is None:
            raise UserError(
                f"{artefact}: has no reference; export it again", code="benchmark-input"
            )
        self.reference: Reference = reference

    def answer(self, texts: Sequence[str], right: Sequence[int] | None = None) -> Answers:
        digest = hashlib.sha256(self._manifest + "\0".join(map(str, texts)).encode()).hexdigest()
        path = self._kept / f"answers_{digest[:16]}.npz"
        if not path.exists():
            self._kept.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".unfinished.npz")
            np.savez(unfinished, *self._answered(texts))
            unfinished.replace(path)
        with np.load(path) as found:
            scores, familiarity, num_tokens = found.values()
        known = np.full(len(texts), -1) if right is None else np.asarray(right)
        return Answers(scores, familiarity, num_tokens, known)

    def _answered(self, texts: Sequence[str]) -> tuple[Floats, Floats, Ids]:
        encoded = self._loaded.tokenizer.encode(texts)
        ids = [one.ids for one in encoded]
        answering = Answering.of(self._loaded.saved, self._loaded.calibration)
        scores = answering.scores(scores_of(self._loaded.engine, ids))
        familiarity = np.array(answering.familiarity(TokenBatch.of(ids), scores))
        return scores, familiarity, np.array([one.num_tokens for one in encoded])


def dated_events(path: Path) -> list[Event]:
    """Those that one of AG News' labels is right for."""
    return [one for one in read_events(path) if one.category in LABEL_OF]


def trained_on_first_months(options: Namespace) -> Path:
    """The artefact of a model that has learned from half of the events before FIRST_MONTH, with the other half as
    held-out rows; trained if it is not there yet.
    """
    folder = options.work
    model = folder / "model"
    if (model / "native").exists():
        report(f"{model}: is there already")
        return model / "native"
    early = [one for one in dated_events(options.events) if one.date < FIRST_MONTH]
    random.Random(SEED).shuffle(early)
    folder.mkdir(parents=True, exist_ok=True)
    half = len(early) // 2
    for name, part in (("train", early[:half]), ("test", early[half:])):
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            rows.writerows((one.text, LABEL_OF[one.category]) for one in part)
    training = [
        "training.train_single",
        "--model",
        options.encoder,
        "--method",
        "head",
        "--dataset",
        folder,
    ]
    training += ["--max_length", _MAX_LENGTH, "--output_dir", model]
    for command in (training, ["inference.export", model, "--engine", "native", "--rows", folder]):
        subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, check=True)
    return model / "native"
