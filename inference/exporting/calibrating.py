"""Fits what an artefact's probabilities are worth, on rows that the model has not seen: with the
scores of the artefact itself, since it is what will answer.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import calibration, familiarity
from common.calibration import Bounds, CalibrationError, Floats
from common.familiarity import Familiarity
from common.files import writing_folder
from common.model_folder import (
    FAMILIARITY_FILE,
    MANIFEST_FILE,
    PRECISIONS,
    SavedModel,
    describe_files,
    is_artefact,
    read_manifest,
    write_manifest,
)
from common.problem_types import SINGLE_LABEL
from common.rows import Columns, LabelledRows, evenly_spread
from common.seen_texts import SeenTexts
from common.text import Text, TextTokenizer, counted, folded, texts_in
from inference.engines.base import Engine, TokenBatch, scores_of
from inference.engines.selection import load_model
from inference.observing.reference import Reference

# More would take minutes to tokenise, and change next to nothing in what is familiar.
_MOST_TRAINING_TEXTS = 100_000
_MOST_BEGINNINGS = 4_000
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Answered:
    """An artefact, and its scores for labelled rows, (rows, labels)."""

    saved: SavedModel
    engine: Engine
    tokenizer: TextTokenizer
    rows: LabelledRows
    scores: NDArray[np.float32]


def calibrate(answered: Answered, bounds: Bounds, folder: Path) -> dict[str, Any]:
    """Fit a calibration on the rows that the model has not seen, write the table that it needs into
    the artefact's folder, and return the fields of the manifest: ``calibration``, and of a model
    that gives one label ``reference``.

    Raises:
        CalibrationError: there are too few rows, or one of the bounds cannot be promised.
    """
    saved, rows = answered.saved, answered.rows
    kept, seen, left_out = unseen([saved.path], rows.texts)
    dataset = public_name(rows.name)
    if left_out.get("seen_in_training") and len(kept) < calibration.FEWEST_ROWS:
        what = f"{counted(left_out['seen_in_training'], 'row')} of {dataset} were seen in training"
        what += f", and the other {len(kept):,} are too few to calibrate on"
        raise CalibrationError(f"{what}; give rows with --rows that the model has not seen")
    texts, targets = [rows.texts[i] for i in kept], [rows.targets[i] for i in kept]
    scores = answered.scores[kept]
    record = {
        "fitted": datetime.now(UTC).date().isoformat(),
        "dataset": dataset,
        "rows_sha256": hash_of(
            [*texts_in(text), target] for text, target in zip(texts, targets, strict=True)
        ),
        "left_out": left_out,
        **calibration.fit(saved.problem_type, scores, targets, saved.labels, bounds),
    }
    fitted = calibration.Calibration(record, saved.labels)
    # Of a single file, the rows that were seen in training are the training texts.
    known = rows.training_texts or [rows.texts[i] for i in seen]
    described, table = _familiarity(answered, known, texts, fitted.scores)
    if described:
        (folder / FAMILIARITY_FILE).write_bytes(table)
        record["familiarity"] = described
    if saved.problem_type is not SINGLE_LABEL:
        return {"calibration": record}
    encoded, right = answered.tokenizer.encode(texts), np.array(targets)
    # Without training texts, the table has read every other one of these.
    unread = slice(None) if known else slice(1, None, 2)
    familiar = None
    if described:
        compared = Familiarity(described, table, saved.problem_type)
        batch = TokenBatch.of([one.ids for one in encoded[unread]])
        familiar = compared.of(batch.ids, batch.lengths, fitted.scores(scores[unread]))
    probabilities = SINGLE_LABEL.answers(fitted.scores(scores))
    num_tokens = np.array([one.num_tokens for one in encoded])
    reference = Reference.fit(probabilities, right, num_tokens, familiar)
    return {"calibration": record, "reference": reference}


def fitted_factors(answered: Answered) -> tuple[Floats, Floats]:
    """The factor and the offset of each label's score, (labels,).

    Raises:
        CalibrationError: there are too few rows that the model has not seen.
    """
    saved, rows = answered.saved, answered.rows
    kept, _, _ = unseen([saved.path], rows.texts)
    targets = [rows.targets[i] for i in kept]
    record = calibration.fit(saved.problem_type, answered.scores[kept], targets, saved.labels)
    fitted = calibration.Calibration(record, saved.labels)
    return fitted.scale, fitted.offset


def calibrate_again(artefact: Path, bounds: Bounds, rows: LabelledRows) -> dict[str, Any]:
    """Calibrate an artefact that is there, on other rows; its weights stay as they are.

    Raises:
        CalibrationError: as above; nothing changes.
        ModelLoadError: it is damaged.
    """
    loaded, manifest = load_model(artefact), read_manifest(artefact)
    token_ids = [one.ids for one in loaded.tokenizer.encode(rows.texts)]
    scores = scores_of(loaded.engine, token_ids)
    answered = Answered(loaded.saved, loaded.engine, loaded.tokenizer, rows, scores)
    with writing_folder(artefact) as folder:
        for path in artefact.iterdir():
            if path.is_dir():  # such as a cascade, which has a copy of its own of all it needs
                shutil.copytree(path, folder / path.name)
            elif path.name not in (MANIFEST_FILE, FAMILIARITY_FILE):
                shutil.copyfile(path, folder / path.name)
        found = calibrate(answered, bounds, folder)
        # Whatever else lies there, such as a card or what the model has seen, is no part of it.
        files = {
            name: described
            for name, described in describe_files(folder).items()
            if name in {*manifest.files, FAMILIARITY_FILE}
        }
        write_manifest(folder, replace(manifest, **found, files=files))
        load_model(folder)  # the same checks as at every later start
    return found["calibration"]


def unseen(
    models: Sequence[Path], texts: Sequence[Text]
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, int]]:
    """The places of the texts that none of the models has seen, of equal ones the first; of those
    that one has; and how many are left out, by why. Only if every model knows what it has seen is
    there a number for `seen_in_training`.
    """
    known = [seen for model in models if (seen := _seen_by(model))]
    is_seen = np.zeros(len(texts), dtype=bool)
    for seen in known:
        is_seen |= seen.which_seen(texts)
    # A text that is there twice would count as two witnesses.
    first_at: dict[Any, int] = {}
    for i, text in enumerate(texts):
        first_at.setdefault(folded(text), i)
    is_first = np.zeros(len(texts), dtype=bool)
    is_first[list(first_at.values())] = True
    left_out = {"repeated": int((~is_first & ~is_seen).sum())}
    if known:
        name = "seen_in_training" if len(known) == len(models) else "seen_by_one_model"
        left_out[name] = int(is_seen.sum())
    return np.flatnonzero(is_first & ~is_seen), np.flatnonzero(is_seen), left_out


def _seen_by(path: Path) -> SeenTexts | None:
    """What a model has seen in training; None if nobody knows."""
    # X.pt and its artefact X.native lie beside the model folder X; other artefacts lie inside it.
    # An artefact may also have a copy of the file itself.
    folders = [path]
    if is_artefact(path):
        folders.append(path.parent)
    if path.is_file() or path.suffix.removeprefix(".") in PRECISIONS:
        folders.append(path.with_suffix(""))
    return next(filter(None, map(SeenTexts.read, folders)), None)


def _familiarity(
    answered: Answered,
    known: Sequence[Text],
    texts: Sequence[Text],
    calibrated: Callable[[NDArray[np.float32]], Floats],
) -> tuple[dict[str, Any], bytes]:
    """What is familiar, for the manifest and the file; nothing if there are too few texts.

    ``known``: training texts, if any are here; ``texts``: held-out ones.
    """
    saved, tokenizer = answered.saved, answered.tokenizer
    known = [known[i] for i in evenly_spread(len(known), _MOST_TRAINING_TEXTS)]
    if not known:
        # Every other held-out text stands for them: what is usual must come from texts that the
        # table has not read.
        known, texts = texts[::2], texts[1::2]
    if len(known) < familiarity.FEWEST_TEXTS or len(texts) < calibration.FEWEST_ROWS:
        return {}, b""
    whole = [one.ids for one in tokenizer.encode(texts)]
    samples = [whole]
    if not saved.reads_pairs:  # the beginning of a pair may be all of its first text
        samples.append(familiarity.beginnings(whole[:_MOST_BEGINNINGS]))
    held_out = [(ids, calibrated(scores_of(answered.engine, ids))) for ids in samples]
    training_ids = [one.ids for one in tokenizer.encode(known) if not one.blank]
    return familiarity.fit(saved.problem_type, training_ids, held_out, tokenizer.highest_id + 1)


def hash_of(rows: Iterable[Sequence[Any]]) -> str:
    """SHA-256 of rows in their order, one JSON list per line: the text or texts, and what is right
    if that is known.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, ensure_ascii=True).encode() + b"\n")
    return digest.hexdigest()


def public_name(dataset: str) -> str:
    """Of a path only the end: the folder above it is nobody's business in a published model."""
    return "/".join(Path(dataset).parts[-2:])


def columns_of(metadata: Mapping[str, Any], *, reads_pairs: bool) -> Columns:
    """The columns that training read, which the model's metrics name."""
    text, label = (str(metadata.get(f"{name}_column", name)) for name in ("text", "label"))
    return Columns(text, label, str(metadata.get("pair_column", "text_pair")) * reads_pairs)


def error_row(record: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """For the table of what an export measured."""
    if not (error := record.get("calibration_error")):
        return []
    before, after = error["before"], error["after"]
    change = f"{100 * (after - before):+.2f} points"
    return [("calibration error", f"{before:.2%}", f"{after:.2%}", change)]


def lines_about(record: dict[str, Any]) -> list[str]:
    """For people: what can be promised from here on."""
    rows = f"Calibrated on {counted(record['rows'], 'row')}"
    lines = lines_about_texts(rows, record)
    if missing := record.get("labels_without_rows"):
        lines.append(f"No row has {_named(missing)}: nothing is known about such texts.")
    if accuracy := record.get("accuracy"):
        change = f"{accuracy['before']:.2%} to {accuracy['after']:.2%}"
        lines.append(f"Each label has a factor and an offset, which changes accuracy: {change}.")
    lines += [*_about_sets(record), *_about_points(record["operating_points"])]
    if "familiarity" not in record:
        lines.append(
            "Too few texts to tell how familiar a text is: "
            f"{familiarity.FEWEST_TEXTS:,} training texts are needed."
        )
    return lines


def lines_about_texts(used: str, record: dict[str, Any]) -> list[str]:
    """Which texts were used for what, and which were left out."""
    left_out = record["left_out"]
    lines = [f"{used} of {record['dataset']}"]
    if why := [f"{n:,} {what.replace('_', ' ')}" for what, n in left_out.items() if n]:
        lines[0] += f" (left out: {', '.join(why)})"
    if "seen_in_training" not in left_out:
        lines.append(
            "The model does not say which texts it has seen in training; if these are among them, "
            "the promises below do not hold."
        )
    return lines


def _about_sets(record: dict[str, Any]) -> list[str]:
    by_level = {one["coverage"]: one for one in record["coverage"]}
    shown = [by_level[level] for level in (0.9, 0.95, 0.99) if level in by_level]
    lines = []
    for one in shown:
        if "mean_size" in one:
            what = f"sets of {one['mean_size']:.2f} labels on average"
        elif "half_width" in one:
            what = f"intervals of the number plus or minus {one['half_width']:.4g}"
        else:
            what = f"sets of the labels with at least {one['threshold']:.1%}"
        lines.append(f"Coverage {one['coverage']:.0%}: {what}")
        if rare := one.get("too_few_rows"):
            lines[-1] += f"; too few rows to promise it for {_named(rare)} alone"
    return lines


def _about_points(points: dict[str, Any]) -> list[str]:
    lines = []
    for name, one in points.items():
        if one.get("threshold", 0) is None:
            continue
        if "max_error" in one and (one["max_error"] in (0.01, 0.02, 0.05) or not _is_level(name)):
            called = "" if _is_level(name) else f", called {name}"
            lines.append(
                f"At most {100 * one['max_error']:g}% wrong{called}: answers {one['answered']:.1%}"
            )
        elif "max_error" not in one:
            share = f": answers {one['answered']:.1%}" if "answered" in one else ""
            lines.append(f"Operating point {name}{share}")
    return lines


def _is_level(name: str) -> bool:
    return name.replace(".", "").isdigit()


def _named(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _MOST_NAMED} more" if len(labels) > _MOST_NAMED else ""
    return ", ".join(labels[:_MOST_NAMED]) + more
