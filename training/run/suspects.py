"""Suspects: training rows whose label the run itself disbelieves.

Two witnesses are asked, and neither needs a pass of its own over the rows.

The steps: each finds out how probable the model finds the label of each of its rows. Averaged over
the epochs, a wrong label stays improbable, because the other rows teach the model something else.
That is the area under the margin (Pleiss et al., arXiv 2001.10528) with log-probabilities instead
of margins; the threshold is that of confident learning (Northcutt et al., arXiv 1911.00068).

The words: a naive Bayes classifier that has not seen the row, and so cannot have memorised its
label as the model can. It reads single tokens and pairs of neighbouring ones.

The ranking compares a row with the others of its label. A label that is easily confused has many
rows that are improbable and still right, so they must not crowd out those of a label whose rows are
all easy.

Tried while fine-tuning MiniLM on 4,000 rows of AG News, and left out because no more was found:
other weights of the epochs (the first, in which the model has not seen the row, says least), their
median or maximum, margins of logits instead of log-probabilities, and out-of-fold linear probes on
vectors of the encoder. Those of the steps are no witness of their own, because the model that makes
them has seen the label. Those of the encoder before training (averages of the token embeddings, or
of a layer's output over the first 12 to 40 tokens) judge about as well as the words, but beside the
steps and the words they add nothing. ``benchmarks/label_errors.py`` measures what is found, and
shows rows that it counts as mistakes although their label is wrong or arguable in the data itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from training.config import TrainConfig
from training.data.tokenized import TokenizedRows
from training.distributed.ranks import Ranks
from training.parallelism.state import SavedState
from training.tasks.classification import log_softmax

REDUCED_WEIGHT = 0.1
WORDS_SHARE = 0.75  # weight of the words beside the steps, which know more
SHARPNESS = 0.6  # of the words' answers; words repeat each other, so naive Bayes is too sure
SMOOTHING = 0.1  # of each word under each label, in rows
# With which pairs of tokens are sorted too, in about 2 GiB; with more, single tokens say enough.
MOST_TOKENS = 2**24
MOST_SUMS = 2**26  # of words by label: half a GiB
# A label's usual doubt is that of its rows and of so many of all labels, because it may have few.
USUAL_ROWS = 20
TENSOR = "suspects/rows"
# Its columns: the sum of the log-probabilities of a row's label, how many they are, the strongest
# other label in the last of them, and the row's weight in the loss.
LOG_PROBABILITIES, COUNT, OTHER, WEIGHT = range(4)


@dataclass(frozen=True)
class Suspect:
    """A training row, the label that it has and the one that the run proposes.

    ``doubt``: 1 minus the probability of the label, averaged over epochs and words, above 0.5;
    ``is_flagged``: both the steps and the words call the label wrong.
    """

    row: int
    label: int
    proposed: int
    doubt: float
    is_flagged: bool


class Suspects:
    """What the words of the training rows, and the steps so far, say about their labels.

    Args:
        index: the row numbers of the training rows, ascending.
        labels: the label of each of them.
        action: what becomes of flagged rows when an epoch has ended.
        words: the log-probability of each label by the words of each row, (rows, labels); see
            :func:`ask_words`.
    """

    def __init__(
        self,
        index: np.ndarray,
        labels: np.ndarray,
        action: Literal["list", "drop", "reweight"],
        words: np.ndarray,
    ) -> None:
        self.index = index
        self.labels = labels
        self.action = action
        self.words = words
        self.tensor = torch.zeros(len(index), 4)
        self.tensor[:, WEIGHT] = 1
        self._rows = self.tensor.numpy()  # the same memory
        self._new: list[np.ndarray] = []

    def add(self, step: int, rows: np.ndarray, checks: np.ndarray) -> None:
        """Take what this rank found in a step: row numbers, -1 for a dummy row, and what
        ``label_logprobs`` returned.
        """
        is_real = rows >= 0
        self._new.append(
            np.column_stack([np.full(is_real.sum(), step), rows[is_real], checks[is_real, :2]])
        )

    def merge(self, ranks: Ranks) -> None:
        """Tell all ranks what each has taken since the last call; a collective call."""
        new, self._new = np.concatenate([np.zeros((0, 4)), *self._new]), []
        found = np.concatenate(ranks.gather(new))
        # By step, then by row: the sums are the same on any number of ranks, to the last bit.
        found = found[np.lexsort(found.T[::-1])]
        # A row may be in several of these steps: add.at counts each of them, where += would count
        # one. Of the last column the last step's value stays, since it comes last.
        position = self._places(found[:, 1].astype(np.int64))
        np.add.at(self._rows, (position, LOG_PROBABILITIES), found[:, 2].astype(np.float32))
        np.add.at(self._rows, (position, COUNT), 1)
        self._rows[position, OTHER] = found[:, 3]

    def end_epoch(self) -> None:
        """From now on, leave out the rows that are flagged, or lower their weight."""
        reduced = {"list": 1, "drop": 0, "reweight": REDUCED_WEIGHT}[self.action]
        self._rows[:, WEIGHT] = np.where(self._flagged(), reduced, 1)

    def is_left(self, batch: np.ndarray) -> np.ndarray:
        """Whether each row of a batch is still trained on; bool, (rows,)."""
        return self._rows[self._places(batch), WEIGHT] > 0

    def weights(self, batch: np.ndarray) -> np.ndarray | None:
        """The weights of rows in the loss; None if all are 1."""
        return self._rows[self._places(batch), WEIGHT] if self.action == "reweight" else None

    def ranking(self) -> list[Suspect]:
        """The rows whose label is improbable, the most suspicious first, compared with others of the same label."""
        of_words = np.take_along_axis(self.words, self.labels[:, None], axis=1)[:, 0]
        log_probabilities = (self._log_probabilities() + WORDS_SHARE * of_words) / (1 + WORDS_SHARE)
        # A row that no step had yet has only the words against it, which is not enough.
        log_probabilities[self._rows[:, COUNT] == 0] = 0
        doubts = 1 - np.exp(log_probabilities)
        # How improbable rows of each label are on the whole: the root of their mean square,
        # (labels,). By it a row's own is divided.
        squares, counts = log_probabilities**2, np.bincount(self.labels)
        usual = (np.bincount(self.labels, squares) + USUAL_ROWS * squares.mean()) / (
            counts + USUAL_ROWS
        )
        order = np.argsort(
            log_probabilities / np.sqrt(np.maximum(usual, 1e-12))[self.labels], kind="stable"
        )
        flagged, other = self._flagged(), self._rows[:, OTHER].astype(int)
        return [
            Suspect(
                *map(int, (self.index[i], self.labels[i], other[i])),
                float(doubts[i]),
                bool(flagged[i]),
            )
            for i in order
            if doubts[i] > 0.5 or flagged[i]
        ]

    def read(self, saved: SavedState) -> None:
        """Go back to what was saved; a checkpoint of an older version has nothing."""
        self._new = []
        if TENSOR in saved.tensors:
            saved.read({TENSOR: self.tensor})

    def _places(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.index, rows)

    def _log_probabilities(self) -> np.ndarray:
        """Of each row's label, the mean over the steps that had the row; 0 for a row that was in none."""
        return self._rows[:, LOG_PROBABILITIES] / np.maximum(self._rows[:, COUNT], 1)

    def _flagged(self) -> np.ndarray:
        """Whether the label is as improbable as the other one is probable, on average, for rows
        that do have it, and the words favour another label too.
        """
        probabilities, other = np.exp(self._log_probabilities()), self._rows[:, OTHER].astype(int)
        believed = (probabilities > 0.5) & (self._rows[:, COUNT] > 0)
        num_labels = 1 + max(self.labels.max(), other.max())
        counts = np.bincount(self.labels[believed], minlength=num_labels)
        sums = np.bincount(self.labels[believed], probabilities[believed], minlength=num_labels)
        thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
        return (1 - probabilities >= thresholds[other]) & (self.words.argmax(axis=1) != self.labels)


def ask_words(rows: TokenizedRows, index: np.ndarray, num_labels: int) -> np.ndarray:
    """How probable each label is by the words of each row, from all other rows: log-probabilities,
    (rows, labels).

    Naive Bayes over tokens and pairs of neighbouring ones, each with its weight in a row: rarer
    ones count more, and the weights of a row have length 1.
    """
    labels, num_rows = rows.labels[index], len(index)
    ids = np.concatenate([rows.ids[rows.offsets[i] : rows.offsets[i + 1]] for i in index]).astype(
        np.int64
    )
    positions = np.repeat(np.arange(num_rows), rows.lengths[index])  # of the row that a token is in

    # Features are tokens, and pairs of them under numbers above those of all tokens. Each counts
    # once per row.
    is_pair = (positions[1:] == positions[:-1]) & (len(ids) <= MOST_TOKENS)
    pairs = ((1 + ids[:-1]) * (1 + ids.max()) + ids[1:])[is_pair]
    found, features = np.unique(np.concatenate([ids, pairs]), return_inverse=True)
    features += np.concatenate([positions, positions[1:][is_pair]]) * len(found)
    positions, features = np.divmod(np.unique(features), len(found))

    # A feature that occurs in one row only says nothing about others. Of the rest, the most
    # frequent are kept, as many as fit into memory.
    counts = np.bincount(features)
    kept = np.argsort(-counts, kind="stable")[: MOST_SUMS // num_labels]
    kept = kept[counts[kept] > 1]
    number, counts = np.full(len(found), -1), counts[kept]
    number[kept] = np.arange(len(kept))
    is_kept = number[features] >= 0
    positions, features = positions[is_kept], number[features[is_kept]]

    weights = np.log((1 + num_rows) / (1 + counts))[features]
    squares = np.bincount(positions, weights**2, minlength=num_rows)
    weights /= np.sqrt(np.maximum(squares, 1e-12))[positions]

    answers, own = np.zeros((num_rows, num_labels)), labels[positions]
    sums = np.bincount(
        own * len(kept) + features, weights, minlength=num_labels * len(kept)
    ).reshape(num_labels, -1)
    totals = np.bincount(positions, weights, minlength=num_rows)
    for label in range(num_labels):
        # Without what the row itself has added, and smoothed.
        others = sums[label, features] - weights * (own == label) + SMOOTHING
        total = sums[label].sum() - totals * (labels == label) + SMOOTHING * len(kept)
        answers[:, label] = np.bincount(
            positions, weights * np.log(others / total[positions]), minlength=num_rows
        )
    return log_softmax(SHARPNESS * answers)


def notes_on_suspects(config: TrainConfig) -> Iterator[str]:
    """What the report says about the rows that were doubted."""
    if done := {"drop": "were left out", "reweight": "had less weight in the loss"}.get(
        config.suspects
    ):
        yield f"Training rows with a doubtful label {done} from the second epoch on."


def suspects_of(
    config: TrainConfig, rows: TokenizedRows, index: np.ndarray, num_labels: int
) -> Suspects | None:
    """Those of a run; None if nobody asked for them. ``rows``: the whole split."""
    if config.suspects == "none":
        return None
    return Suspects(index, rows.labels[index], config.suspects, ask_words(rows, index, num_labels))
