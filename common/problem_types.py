"""What a model answers: one label, several labels, or a number. How rows say it, and how scores
become it.

Training and serving must agree on both, so both take them from here. The names are those of
transformers (``problem_type`` in config.json).
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import tokenize
from collections.abc import Collection
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from common.escaping import some_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# As a row gives it: one label, the labels that apply, or a number.
Label = str | tuple[str, ...] | float

# The key of config.json with the probability from which on each label applies, in the order of the
# labels.
THRESHOLDS_KEY = "label_thresholds"
DEFAULT_THRESHOLD = 0.5
# Training computes in fp32, and squares of the largest numbers still have to fit.
_LARGEST_NUMBER = 1e18


class UnusableRow(ValueError): ...


class UnknownLabel(UnusableRow): ...


class ProblemType:
    """One kind of answer.

    ``name``: what transformers calls it.
    """

    name: str

    def read_label(self, cell: Any, known: Collection[str] = ()) -> Label:
        """The label of a row from its cell in the file; ``known``: the labels allowed, empty to
        allow any.

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
        # Once per row, so the usual case comes first: a known label as it is written.
        if isinstance(cell, str) and cell.strip() in known:
            return cell.strip()
        return _one_of(known, label_name(cell))

    def answers(self, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        import numpy as np  # here, because reading flags need not wait for it

        shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
        exponentials = np.exp(shifted)
        return exponentials / exponentials.sum(axis=1, keepdims=True)


class MultiLabel(ProblemType):
    """Any number of labels applies, none included; each answer is a probability of its own."""

    name = "multi_label_classification"

    def read_label(self, cell: Any, known: Collection[str] = ()) -> tuple[str, ...]:
        """A list of names, or text with the names separated by , ; or |."""
        if isinstance(cell, str):
            cell = _listed(cell) if _IS_LIST.match(cell) else _separated(cell)
        if not isinstance(cell, list | tuple):
            what = "must be a list of names, or names separated by , ; or |"
            raise UnusableRow(f"labels {cell!r} {what}")
        single = SingleLabel()
        return tuple(dict.fromkeys(single.read_label(name, known) for name in cell))

    def answers(self, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        import numpy as np

        # 1 / (1 + exp(-score)) would overflow. A broken model's infinite score is no certainty.
        return np.where(
            np.isfinite(scores), (1 + np.tanh(scores.astype(np.float64) / 2)) / 2, np.nan
        )


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
        if abs(number) > _LARGEST_NUMBER:
            raise UnusableRow(f"label {cell!r} is out of range: must be between -1e18 and 1e18")
        return number

    def answers(self, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        return scores.astype("float64")


class PlainText(ProblemType):
    """Rows without a label, for language models. No model folder has this type."""

    name = "plain_text"

    def read_label(self, cell: Any, known: Collection[str] = ()) -> str:
        return ""


SINGLE_LABEL, MULTI_LABEL = SingleLabel(), MultiLabel()
REGRESSION, PLAIN_TEXT = Regression(), PlainText()
PROBLEM_TYPES = {kind.name: kind for kind in (SINGLE_LABEL, MULTI_LABEL, REGRESSION)}


# How a list, tuple or set begins; a name may be in brackets too, such as "(none)".
_IS_LIST = re.compile(r"""\s*(frozenset\(|set\()?(\[|[({]\s*['"\d)}-]|(?<=set\()\)\s*$)""")


def label_name(cell: Any) -> str:
    """The one rule for what a cell with a label means, in every format.

    A name is what stands there without the space around it. Numbers without a fraction are written
    as whole numbers, so 1 and 1.0 are one label, as are the spellings of true and false. A format
    that has numbers and booleans of its own, such as JSON and Parquet, thus means the same as CSV,
    which only has text.

    Raises:
        UnusableRow: it is no label.
    """
    name = _as_name(cell).strip()
    if not name:
        raise UnusableRow("the label is empty")
    if name.lower() in ("true", "false"):
        return name.capitalize()
    if re.fullmatch(r"[+-]?[0-9]+\.0*", name):
        name = name.partition(".")[0]
        return "0" if name == "-0" else name
    return name


def _as_name(cell: Any) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Decimal):
        cell = _int_or_float(cell)
    if isinstance(cell, float) and math.isfinite(cell):
        # From 2**53 on, not every whole number is a float64, so its digits would be a guess.
        return str(int(cell) if cell.is_integer() and abs(cell) < 2**53 else cell)
    if isinstance(cell, bool | int):
        return str(cell)
    # Nothing in the cell is read as None, or as NaN where pandas wrote it.
    is_missing = cell is None or isinstance(cell, float)
    remedy = "; a row without a label cannot be used" if is_missing else ""
    raise UnusableRow(f"label {cell!r} must be a name or a number{remedy}")


def _int_or_float(number: Decimal) -> int | float:
    is_whole = number.is_finite() and number == number.to_integral_value()
    return int(number) if is_whole else float(number)


def _separated(cell: str) -> list[str]:
    names = [name for name in re.split(r"[,;|]", cell) if name.strip()]
    for name in names:
        # A list in a spelling that is not read here, or a name that has a separator in it.
        if any(name.count(begin) != name.count(end) for begin, end in ("()", "[]", "{}")):
            what = "has a bracket without its partner; write a list of names"
            raise UnusableRow(f"label {name.strip()!r} {what}")
    return names


def _listed(cell: str) -> list[Any] | tuple[Any, ...]:
    try:
        return _python_list(cell)
    except (ValueError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise UnusableRow(f"labels {cell!r}: not a valid list, such as ['a', 'b']") from error


def _python_list(text: str) -> list[Any] | tuple[Any, ...]:
    """A list as JSON has it, or a list, tuple, set or NumPy array as Python prints them."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        parts, last = [], tokenize.ENCODING
        for token in tokenize.generate_tokens(io.StringIO(text.strip()).readline):
            # NumPy puts no commas between the items, and Python would join two texts that follow
            # each other.
            if token.type == last == tokenize.STRING or token.type == last == tokenize.NUMBER:
                parts.append(",")
            if token.string.strip():
                parts.append(token.string)
                last = token.type
        # Python prints a set that is empty or frozen with its name.
        items = re.sub(r"^(?:frozen)?set(\(.*\))$", r"\1", "".join(parts))
        found = ast.literal_eval(items)
        return sorted(found, key=str) if isinstance(found, set) else found


def _one_of(known: Collection[str], name: str) -> str:
    if known and name not in known:
        for one in known:  # an older model may have a label 0.0, which is read as 0 now
            if one.strip() and label_name(one) == name:
                return one
        raise UnknownLabel(
            f"label {name!r} is not one of the training labels {some_of(list(known))}"
        )
    return name
