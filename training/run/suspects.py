"""Suspects: training rows whose label the run itself disbelieves.

Every training step finds out how probable the model finds the label of each of its rows, so this needs no pass of its
own. Averaged over the epochs, a wrong label stays improbable, because the other rows teach the model something else.
That is the area under the margin (Pleiss et al., arXiv 2001.10528) with log-probabilities instead of margins; the
threshold is that of confident learning (Northcutt et al., arXiv 1911.00068). ``benchmarks/label_errors.py`` measures
what they find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from training.config import TASKS_WITH_ONE_LABEL, TrainConfig
from training.parallelism.distributed import Ranks
from training.parallelism.state import SavedState

REDUCED_WEIGHT = 0.1
TENSOR = "suspects/rows"
# Its columns: the sum of the log-probabilities of a row's label, how many they are, the strongest other label in the
# last of them, and the row's weight in the loss.
LOG_PROBABILITIES, COUNT, OTHER, WEIGHT = range(4)


@dataclass(frozen=True)
class Suspect:
    """A training row, the label that it has and the one that the run proposes.

    ``doubt``: 1 minus the probability of the label, averaged over the epochs, above 0.5; ``is_flagged``: it is high
    enough to call the label wrong.
    """

    row: int
    label: int
    proposed: int
    doubt: float
    is_flagged: bool


class Suspects:
    """What the steps so far say about the labels of the training rows.

    Args:
        index: the row numbers of the training rows, ascending.
        labels: the label of each of them.
        action: what becomes of flagged rows when an epoch has ended.
    """

    def __init__(self, index: np.ndarray, labels: np.ndarray, action: Literal["list", "drop", "reweight"]) -> None:
        self.index = index
        self.labels = labels
        self.action = action
        self.tensor = torch.zeros(len(index), 4)
        self.tensor[:, WEIGHT] = 1
        self._rows = self.tensor.numpy()  # the same memory
        self._new: list[np.ndarray] = []

    def add(self, step: int, rows: np.ndarray, checks: np.ndarray) -> None:
        """Take what this rank found in a step: row numbers, -1 for a dummy row, and what ``check_labels`` returned."""
        is_real = rows >= 0
        self._new.append(np.column_stack([np.full(is_real.sum(), step), rows[is_real], checks[is_real, :2]]))

    def merge(self, ranks: Ranks) -> None:
        """Tell all ranks what each has taken since the last call; a collective call."""
        new, self._new = np.concatenate([np.zeros((0, 4)), *self._new]), []
        found = np.concatenate(ranks.gather(new))
        # By step, then by row: the sums are the same on any number of ranks, to the last bit.
        found = found[np.lexsort(found.T[::-1])]
        place = self._places(found[:, 1].astype(np.int64))
        np.add.at(self._rows, (place, LOG_PROBABILITIES), found[:, 2].astype(np.float32))
        np.add.at(self._rows, (place, COUNT), 1)
        self._rows[place, OTHER] = found[:, 3]

    def end_epoch(self) -> None:
        """From now on, leave out the rows that are flagged, or lower their weight."""
        reduced = {"list": 1, "drop": 0, "reweight": REDUCED_WEIGHT}[self.action]
        self._rows[:, WEIGHT] = np.where(self._flagged(), reduced, 1)

    def remaining(self, batch: np.ndarray) -> np.ndarray:
        """The rows of a batch that are not left out."""
        return batch[self._rows[self._places(batch), WEIGHT] > 0] if self.action == "drop" else batch

    def weights(self, batch: np.ndarray) -> np.ndarray | None:
        """The weights of rows in the loss; None if all are 1."""
        return self._rows[self._places(batch), WEIGHT] if self.action == "reweight" else None

    def ranking(self) -> list[Suspect]:
        """The rows whose label is improbable, the most suspicious first."""
        doubts, flagged, other = 1 - self._probabilities(), self._flagged(), self._rows[:, OTHER].astype(int)
        return [
            Suspect(*map(int, (self.index[i], self.labels[i], other[i])), float(doubts[i]), bool(flagged[i]))
            for i in np.argsort(-doubts, kind="stable")
            if doubts[i] > 0.5
        ]

    def read(self, saved: SavedState) -> None:
        """Go back to what was saved; a checkpoint of an older version has nothing."""
        self._new = []
        if TENSOR in saved.tensors:
            saved.read({TENSOR: self.tensor})

    def _places(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.index, rows)

    def _probabilities(self) -> np.ndarray:
        """The probability of each row's label, the geometric mean over the epochs; 1 for a row that was in no step."""
        return np.exp(self._rows[:, LOG_PROBABILITIES] / np.maximum(self._rows[:, COUNT], 1))

    def _flagged(self) -> np.ndarray:
        """Whether the label is as improbable as the other one is probable, on average, for rows that do have it."""
        probabilities, other = self._probabilities(), self._rows[:, OTHER].astype(int)
        believed = (probabilities > 0.5) & (self._rows[:, COUNT] > 0)
        num_labels = 1 + max(self.labels.max(), other.max())
        counts = np.bincount(self.labels[believed], minlength=num_labels)
        sums = np.bincount(self.labels[believed], probabilities[believed], minlength=num_labels)
        thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
        return 1 - probabilities >= thresholds[other]


def suspects_of(config: TrainConfig, labels: np.ndarray, index: np.ndarray) -> Suspects | None:
    """Those of a run; None if nobody asked, or if a row does not have one label. ``labels``: of the whole split."""
    if config.suspects == "none" or config.task not in TASKS_WITH_ONE_LABEL:
        return None
    return Suspects(index, labels[index], config.suspects)
