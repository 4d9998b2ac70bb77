"""``--from MODEL``: an earlier model learns more rows, or labels that it does not know yet, in
seconds.

Its encoder stays as it is. The head begins as the earlier one, with nothing for the new labels, and
is pulled back there while it learns: what the rows do not ask for does not change. Whoever shows a
model new rows alone makes it forget the others (catastrophic forgetting; McCloskey & Cohen, 1989).
So rows of the data that the model was trained on are read again, and its test rows say in the end
what each of its labels has lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.text import counted
from training.config import TrainConfig
from training.data.earlier import read_earlier
from training.data.tokenized import TokenizedRows
from training.distributed.ranks import Ranks
from training.evaluation.evaluator import ModelOnRanks, evaluate
from training.model.classifier import NewsClassifier
from training.monitoring.records import format_percent
from training.run.fitted_head import Linear

LABELS_SHOWN = 8


def earlier_head(config: TrainConfig) -> Linear:
    """The head of the earlier model."""
    model = NewsClassifier.from_saved(read_earlier(config))
    head = model.network.get_submodule(model.head)
    return Linear(
        *(part.detach().float().numpy().astype(np.float64) for part in (head.weight, head.bias))
    )


@dataclass(frozen=True)
class Change:
    """What the earlier model's labels have lost or won on the test rows that have one of them.

    ``recalls``: of each of these labels before and after, None for one without a test row.
    """

    model: str
    rows: int
    before: float
    after: float
    recalls: dict[str, tuple[float, float] | None]

    @property
    def in_words(self) -> str:
        """One line: all test rows of these labels, then the labels that lost most."""
        moved = [(name, *pair) for name, pair in self.recalls.items() if pair]
        moved = sorted(moved, key=lambda one: one[2] - one[1])[:LABELS_SHOWN]
        each = ", ".join(f"{name} {100 * (after - before):+.1f}" for name, before, after in moved)
        more = len(self.recalls) - len(moved)
        return (
            f"{format_percent(self.before)} right before, {format_percent(self.after)} now, on "
            f"{counted(self.rows, 'test row')}; points of recall by label: {each}"
            + (f", and {more} more" if more else "")
        )


def measure_change(
    config: TrainConfig, ranks: Ranks, rows: TokenizedRows, logits: np.ndarray
) -> Change | None:
    """Compare with the earlier model on the test rows of its labels; a collective call. None if
    there is no such row.

    Args:
        rows: the tokenized test rows.
        logits: what the new model says of them, (rows, labels).
    """
    saved = read_earlier(config)
    known = np.flatnonzero(rows.labels < len(saved.labels))  # the earlier labels come first
    if not len(known):
        return None
    # The earlier model answers now, with the same texts, cut and cleaned as they are here: its old
    # figures may be of other test rows.
    _, earlier = evaluate(ModelOnRanks.whole(saved, ranks), rows, known)
    truth = rows.labels[known]
    before, after = earlier.argmax(axis=1) == truth, logits[known].argmax(axis=1) == truth
    recalls = {
        name: (float(before[truth == label].mean()), float(after[truth == label].mean()))
        if label in truth
        else None
        for label, name in enumerate(saved.labels)
    }
    return Change(config.from_model, len(known), float(before.mean()), float(after.mean()), recalls)
