"""The rows of a retraining: what is trained on, what the export calibrates on, and what the verdict
is about. No text is in two of them.

A text's place follows from its hash, so that it stays the same in all later retrainings: a row that
one model was compared on is never among those that the next one is trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.credentials import without_password
from common.errors import UserError
from common.escaping import printable, some_of
from common.files import write_csv, write_json, writing_folder
from common.problem_types import UnusableRow
from common.rows import LabelledRows, parse_json
from common.seen_texts import text_hash
from common.text import Text, counted
from inference.observing.feedback import CORRECTION, REVIEW
from inference.observing.store import Feedback, Store, is_postgres

TRAINING, CALIBRATION, VERDICT = "train.csv", "calibration.csv", "test.csv"
COUNTS = "rows.json"
# One of so many golden rows is for the calibration: a model that was calibrated on the rows of the
# verdict would look better on them than it is.
_CALIBRATES = 5

# By the hash of its text, a row's text and label.
_Rows = dict[int, tuple[Text, str]]


@dataclass(frozen=True, slots=True)
class Reviewed:
    """``is_uniform``: the text was drawn like every other one, whatever the model answered."""

    text: str
    label: str
    is_uniform: bool


def read_reviewed(path: Path, labels: Sequence[str]) -> list[Reviewed]:
    """Reviewed rows from JSON lines with `text`, `label` and, if known, `why`, the oldest first.

    Raises:
        UserError: the file cannot be read, or a line is not such a row.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "is not UTF-8"
        raise UserError(f"--reviewed {path}: {what}", code="data-not-found") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_reviewed_row(parse_json(line), labels))
        except UnusableRow as error:
            where = f"--reviewed {path}, line {number}"
            raise UserError(f"{where}: {error}", code="row-unusable") from error
    return found


def _reviewed_row(row: object, labels: Sequence[str]) -> Reviewed:
    if not isinstance(row, dict):
        raise UnusableRow("must be an object with text and label")
    text, label = row.get("text"), row.get("label")
    if not isinstance(text, str) or not text.strip():
        raise UnusableRow("text must be a text that is not empty")
    if label not in labels:
        shown = printable(str(label), keep="")[:60]
        raise UnusableRow(f"label {shown!r} is not one of the model's: {some_of(list(labels))}")
    return Reviewed(text, str(label), row.get("why") == "uniform")


def reviewed_in_store(
    address: str, model: str, labels: Sequence[str]
) -> tuple[list[Reviewed], str]:
    """What reviewers have said of a model's texts, the oldest first; and what was not used.

    Raises:
        UserError: there is no such store, it cannot be read, or it has nothing of this model.
    """
    if not is_postgres(address) and not Path(address).is_file():
        raise UserError(f"--store {address}: no such file", code="data-not-found")
    store = Store(address)
    try:
        if model not in (names := store.models()):
            known = f"there are {some_of(names)}" if names else "there are no texts yet"
            named = f"--store {without_password(address)}"
            what = f"{named}: has nothing of a model {printable(model)}; {known}"
            raise UserError(what, code="review-store")
        said = [one for one in store.feedback(model) if one.text.strip()]
    finally:
        store.close()
    reviews = [one for one in said if one.kind == REVIEW and one.label in labels]
    # What users send may be wrong, or meant to harm, so it waits for a reviewer.
    known = {text_hash(one.text) for one in reviews}
    waiting = {text_hash(one.text) for one in said if one.kind == CORRECTION} - known
    notes = []
    if waiting:
        notes.append(f"{counted(len(waiting), 'correction')} that nobody has reviewed: not used.")
    if strange := [one for one in said if one.kind == REVIEW and one.label not in labels]:
        names = some_of(sorted({one.label for one in strange}))
        what = f"{counted(len(strange), 'review')} with a label that the model lacks ({names})"
        notes.append(f"{what}: not used.")
    return [_from_store(one) for one in reviews], " ".join(notes)


def drawn_for_verdict(reviewed: Iterable[Reviewed]) -> list[Reviewed]:
    """The reviews that two models can be compared on: of texts that were drawn uniformly, and not
    among those that calibrate a retrained model.
    """
    # Of several reviews of one text the last counts.
    newest = {text_hash(one.text): one for one in reviewed}
    return [one for key, one in newest.items() if one.is_uniform and key % _CALIBRATES]


def _from_store(one: Feedback) -> Reviewed:
    return Reviewed(one.text, one.label, one.why == "uniform")


@dataclass(frozen=True, slots=True)
class NewRows:
    """The three parts, and ``counts`` of how they came about."""

    training: _Rows
    calibration: _Rows
    verdict: _Rows
    counts: dict[str, int]

    @classmethod
    def split(
        cls,
        old: LabelledRows,
        reviewed: Iterable[Reviewed],
        golden: LabelledRows,
        labels: Sequence[str],
    ) -> NewRows:
        held_out = _by_hash(golden, labels)
        is_golden = set(held_out)
        training = _by_hash(old, labels)
        counts = {
            "old": len(training),
            "golden": len(held_out),
            "golden_among_old": len(is_golden & training.keys()),
        }
        training = {key: row for key, row in training.items() if key not in is_golden}
        # Of several reviews of one text the last counts, so a dictionary it is.
        by_hash = {text_hash(one.text): one for one in reviewed}
        of_golden = by_hash.keys() & is_golden
        learned = changed = kept_back = 0
        for key, one in by_hash.items():
            if key in of_golden:
                continue
            # A text that the old model was trained on says nothing in the verdict.
            if one.is_uniform and key not in training and (key // _CALIBRATES) % 2:
                held_out[key] = (one.text, one.label)
                kept_back += 1
                continue
            learned += 1
            changed += key in training and training[key][1] != one.label
            training[key] = (one.text, one.label)
        counts |= {
            "reviewed": len(by_hash),
            "reviewed_of_golden": len(of_golden),
            "reviewed_trained": learned,
            "labels_corrected": changed,
            "uniform_for_verdict": kept_back,
        }
        calibrates = {key: row for key, row in held_out.items() if not key % _CALIBRATES}
        judges = {key: row for key, row in held_out.items() if key % _CALIBRATES}
        return cls(training, calibrates, judges, counts)

    def write(self, folder: Path) -> None:
        """Write the folder, whole or not at all."""
        parts = {TRAINING: self.training, CALIBRATION: self.calibration, VERDICT: self.verdict}
        with writing_folder(folder) as aside:
            for name, rows in parts.items():
                write_csv(aside / name, ("text", "label"), rows.values())
            write_json(aside / COUNTS, self.counts)


def _by_hash(rows: LabelledRows, labels: Sequence[str]) -> _Rows:
    """Each text once, as it was first."""
    found: _Rows = {}
    for text, target in zip(rows.texts, rows.targets, strict=True):
        found.setdefault(text_hash(text), (text, labels[target]))
    return found


def lines_about(counts: dict[str, int]) -> list[str]:
    """For people."""
    lines = [
        f"{counted(counts['old'], 'old row')}; {counted(counts['reviewed_trained'], 'reviewed row')} "
        f"to train on, of which {counts['labels_corrected']:,} replace an old label."
    ]
    lines.append(
        f"Held out: {counted(counts['golden'], 'golden row')} and "
        f"{counted(counts['uniform_for_verdict'], 'uniformly reviewed row')}, a fifth of them for "
        "the calibration and the others for the verdict."
    )
    if counts["golden_among_old"]:
        lines.append(
            f"{counted(counts['golden_among_old'], 'golden row')} were among the old rows: not "
            "trained on, and left out of the verdict if the old model has seen them."
        )
    return lines
