"""Texts like those that a model was trained on, and texts that are not, with the model's scores."""

from __future__ import annotations

import csv
import random
import string
import sysconfig
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import ROOT
from common import calibration, familiarity
from common.calibration import Calibration, Floats
from common.errors import UserError
from common.familiarity import Familiarity
from common.rows import LabelledRows, read_labelled_rows
from inference.engines.answering import Answering
from inference.engines.base import TokenBatch, scores_of
from inference.engines.selection import LoadedModel, load_model

SEED = 0
# What AG News calls the categories of Wikipedia's editors; arts and health have no label there.
LABEL_OF = {
    **dict.fromkeys(("conflict", "politics", "law", "disasters", "international"), "World"),
    "business": "Business",
    "sports": "Sports",
    "science": "Sci/Tech",
}
# The kinds of texts that are foreign beyond doubt; their mean is the figure to compare by.
POOLED = ("topics without a label", "code", "other languages", "nonsense")
_NUM_CODE, _NUM_NONSENSE, _NUM_OF_A_DOMAIN = 800, 500, 1500
_FEWEST_CHARS_OF_CODE = 60
_MOST_BEGINNINGS = 4000  # as at export
_KEYS = "asdfjkl;qweruiop "


@dataclass(frozen=True)
class Scored:
    """Texts as token ids, and the engine's scores for them, (texts, labels)."""

    ids: Sequence[Sequence[int]]
    logits: NDArray[np.float32]

    def __getitem__(self, which: slice | NDArray[np.int64]) -> Scored:
        places = np.arange(len(self.ids))[which]
        return Scored([self.ids[i] for i in places], self.logits[which])

    @cached_property
    def batch(self) -> TokenBatch:
        return TokenBatch.of(self.ids)


@dataclass(frozen=True)
class Fitted:
    """What an export would fit; ``record`` and ``table`` are those of the familiarity."""

    answering: Answering
    record: dict[str, Any]
    table: bytes

    def strangeness(self, by_length: list[list[float]]) -> Callable[[Scored], Floats]:
        """How strange texts are, if this is what is usual at each length."""
        known = Familiarity(
            self.record | {"by_length": by_length}, self.table, self.answering.problem_type
        )

        def strange(one: Scored) -> Floats:
            batch = one.batch
            return known.strangeness(batch.ids, batch.lengths, self.answering.scores(one.logits))

        return strange

    def is_unfamiliar(self, one: Scored) -> NDArray[np.bool_]:
        """Whether the product flags each text."""
        shares = self.answering.familiarity(one.batch, self.answering.scores(one.logits))
        return np.array(shares) < self.record["limit"]


class Model:
    """The served model, and rows that it has not been trained on."""

    def __init__(self, options: Namespace) -> None:
        self.loaded: LoadedModel = load_model(options.model)
        self.labels = list(self.loaded.saved.labels)
        self.rows: LabelledRows = read_labelled_rows(options.dataset, self.labels)
        self.right = np.asarray(self.rows.targets)
        self.scored = self.score(self.rows.texts)

    def score(self, texts: Sequence[str]) -> Scored:
        ids = [one.ids for one in self.loaded.tokenizer.encode(texts)]
        return Scored(ids, scores_of(self.loaded.engine, ids))

    @property
    def titles(self) -> list[str]:
        """Of each row."""
        return [text.first for text in self.rows.texts]

    def fit_on_half(self) -> Fitted:
        """Fit on every other row, so that the others can judge it."""
        kind, half = self.loaded.saved.problem_type, self.scored[1::2]
        record = calibration.fit(kind, half.logits, self.right[1::2], self.labels)
        calibrated = Calibration(record, self.labels).scores
        cut = familiarity.beginnings(half.ids[:_MOST_BEGINNINGS])
        held_out = [
            (half.ids, calibrated(half.logits)),
            (cut, calibrated(scores_of(self.loaded.engine, cut))),
        ]
        tokenizer = self.loaded.tokenizer
        training_ids = [one.ids for one in tokenizer.encode(self.rows.calibration_texts)]
        found = familiarity.fit(kind, training_ids, held_out, tokenizer.highest_id + 1)
        fitted = Calibration(record, self.labels, Familiarity(*found, kind))
        return Fitted(Answering.of(self.loaded.saved, fitted), *found)


@dataclass(frozen=True)
class Event:
    """A sentence of Wikipedia's current events."""

    date: str
    category: str
    text: str

    @property
    def year(self) -> str:
        return self.date[:4]


def add_text_flags(parser: ArgumentParser) -> None:
    """Add ``--dataset`` and ``--events``, where the texts come from."""
    data = ROOT / "data"
    parser.add_argument(
        "--dataset",
        type=Path,
        default=data / "ag_news",
        help="folder in AG News' layout, with the rows that the model was trained on, and test rows "
        "(default: data/ag_news)",
    )
    parser.add_argument(
        "--events",
        type=Path,
        default=data / "current_events.csv",
        help="dated sentences of Wikipedia's Current Events: date, category and text (default: "
        "data/current_events.csv)",
    )


def read_events(path: Path) -> list[Event]:
    return [Event(one["date"], one["category"], one["text"]) for one in _table(path, ",")]


def foreign_texts(options: Namespace, rows: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """By kind, and within it by group; ``rows``: whose words the nonsense is made of."""
    draw = random.Random(SEED)
    events = read_events(options.events)
    return {
        POOLED[0]: {
            category: [one.text for one in events if one.category == category]
            for category in sorted({one.category for one in events} - LABEL_OF.keys())
        },
        POOLED[1]: {"Python's standard library": _code(draw)},
        POOLED[2]: {
            path.stem: [one["text"] for one in _table(path, "\t")]
            for path in _files(options.languages, "*.tsv")
        },
        POOLED[3]: _nonsense(rows, draw),
        "other domains": {
            folder.name: [one["text"] for one in _table(folder / "test.csv", ",")][
                :_NUM_OF_A_DOMAIN
            ]
            for folder in options.domains
        },
    }


def _code(draw: random.Random) -> list[str]:
    """Pieces of 3 to 12 lines."""
    pieces = []
    for path in _files(Path(sysconfig.get_path("stdlib")), "*.py"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        starts = range(0, len(lines) - 12, 40)
        pieces += ["\n".join(lines[i : i + draw.randint(3, 12)]).strip() for i in starts]
    pieces = [piece for piece in pieces if len(piece) > _FEWEST_CHARS_OF_CODE]
    return draw.sample(pieces, min(_NUM_CODE, len(pieces)))


def _nonsense(rows: Sequence[str], draw: random.Random) -> dict[str, list[str]]:
    words = sorted({word for row in rows for word in row.split() if word.isalpha()})

    def letters() -> str:
        sizes = [draw.randint(2, 10) for _ in range(draw.randint(5, 40))]
        return " ".join("".join(draw.choices(string.ascii_lowercase, k=size)) for size in sizes)

    makers = {
        "random letters": letters,
        "random keys": lambda: "".join(draw.choices(_KEYS, k=draw.randint(20, 200))),
        "random words of the rows": lambda: " ".join(draw.choices(words, k=draw.randint(8, 45))),
    }
    return {name: [make() for _ in range(_NUM_NONSENSE)] for name, make in makers.items()}


def _files(folder: Path, pattern: str) -> list[Path]:
    if not (found := sorted(folder.glob(pattern))):
        raise UserError(f"{folder}: holds no {pattern}", code="benchmark-input")
    return found


def _table(path: Path, separator: str) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
            rows = list(csv.DictReader(file, delimiter=separator, quoting=quoting))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", code="benchmark-input") from error
    if not rows or "text" not in rows[0]:
        raise UserError(f"{path}: has no rows with a column text", code="benchmark-input")
    return rows
