"""What a model answers: one label, several labels, or a number. How rows say it, and how scores become it.

Training and serving must agree on both, so both take them from here. The names are those of transformers
(``problem_type`` in config.json).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# As a row gives it: one label, the labels that apply, or a number.
Label = str | tuple[str, ...] | float

# The key of config.json with the probability from which on each label applies, in the order of the labels.
THRESHOLDS_KEY = "label_thresholds"
DEFAULT_THRESHOLD = 0.5
_MOST_NAMED = 10


class UnusableRow(ValueError): ...


class ProblemType:
    """One kind of answer.

    ``name``: what transformers calls it.
    """

    name: str

    def read_label(self, cell: Any, known: Collection[str] = ()) -> Label:
        """The label of a row from its cell in the file; ``known``: the labels allowed, empty to allow any.

        Raises:
            UnusableRow: it is no such label.
        """
        raise NotImplementedError

    def answers(self, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        """What the model's scores (logits) mean: (texts, labels) to (texts, labels)."""
        raise NotImplementedError


class SingleLabel(ProblemType):
    """Exactly one label applies; the answers are the labels' probabilities, which add up to 1."""

    name = "single_label_classification"

    def read_label(self, cell: Any, known: Collection[str] = ()) -> str:
        if cell == "":
            raise UnusableRow("the label is empty")
        if isinstance(cell, bool | float) or not isinstance(cell, str | int) or not str(cell).strip():
            raise UnusableRow(f"label {cell!r} must be a name or a whole number")
        if isinstance(cell, int) and cell < 0:
            raise UnusableRow(f"label {cell} is out of range (unlabelled rows cannot be trained on)")
        return _one_of(known, str(cell).strip())

    def answers(self, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        import numpy as np  # not at the top: whoever only reads flags need not wait for it

        shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
        exponentials = np.exp(shifted)
        return exponentials / exponentials.sum(axis=1, keepdims=True)


class MultiLabel(ProblemType):
    """Any number of labels applies, none included; each answer is a probability of its own."""

    name = "multi_label_classification"

    def read_label(self, cell: Any, known: Collection[str] = ()) -> tuple[str, ...]:
        """A list of names, or text with the names separated by commas, semicolons or vertical bars."""
        if isinstance(cell, str) and cell.lstrip().startswith("["):
            try:
                cell = json.loads(cell)
            except json.JSONDecodeError as error:
                raise UnusableRow(f"labels {cell!r}: not a valid JSON list") from error
        elif isinstance(cell, str):
            cell = [name for name in re.split(r"[,;|]", cell) if name.strip()]
        if not isinstance(cell, list | tuple):
            raise UnusableRow(f"labels {cell!r} must be a list of names, or names separated by , ; or |")
        single = SingleLabel()
        return tuple(dict.fromkeys(single.read_label(name, known) for name in cell))

    def answers(self, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        import numpy as np

        # 1 / (1 + exp(-score)) would overflow. A broken model's infinite score is no certainty.
        return np.where(np.isfinite(scores), (1 + np.tanh(scores.astype(np.float64) / 2)) / 2, np.nan)


class Regression(ProblemType):
    """A number; the answer is the score itself."""

    name = "regression"

    def read_label(self, cell: Any, known: Collection[str] = ()) -> float:
        try:
            number = math.nan if isinstance(cell, bool) or cell is None else float(cell)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UnusableRow(f"label {cell!r} must be a number")
        return number

    def answers(self, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        return scores.astype("float64")


class PlainText(ProblemType):
    """Rows without a label, for language models. No model folder has this type."""

    name = "plain_text"

    def read_label(self, cell: Any, known: Collection[str] = ()) -> str:
        return ""


SINGLE_LABEL, MULTI_LABEL, REGRESSION, PLAIN_TEXT = SingleLabel(), MultiLabel(), Regression(), PlainText()
PROBLEM_TYPES = {kind.name: kind for kind in (SINGLE_LABEL, MULTI_LABEL, REGRESSION)}


def _one_of(known: Collection[str], name: str) -> str:
    if known and name not in known:
        raise UnusableRow(f"label {name!r} is not one of the training labels {', '.join(list(known)[:_MOST_NAMED])}")
    return name
