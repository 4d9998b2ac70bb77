"""Compare a new model with the one that serves: `python -m loop.verdict OLD NEW --rows FILE`."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from common.commands import run_module
from common.credentials import without_password
from common.errors import OneLineParser, UserError, run_command
from common.escaping import printable, some_of
from common.model_folder import Manifest
from common.rows import Columns, hash_of, parse_json, public_name, read_labelled_rows
from common.seen_texts import unseen
from common.text import Text, counted
from loop.comparison import EXIT_CODES, Answers, ClassChange, Comparison, compare
from loop.new_rows import Reviewed, drawn_for_verdict, reviewed_in_store
from loop.record import Artefact, write_verdict

# A new model may be so many times as slow, and as large.
MOST_TIMES = 2.0
_RATE = re.compile(r"([\d,]+) rows per second")  # in the last line of inference.score
_WIDTH = 80
# Classes in the table: those that lose most.
_MOST_CLASSES = 20

_DESCRIPTION = """
Classify labelled rows with the exported artefacts of two models, compare the answers row by row,
and write into NEW's manifest whether it may take the place of OLD: PROMOTE (exit code 0), HOLD (10)
or REJECT (11). Rows that one of the models was trained on are left out.
"""


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m loop.verdict", description=_DESCRIPTION.strip())
    flag = parser.add_argument
    flag("old", type=Path, metavar="OLD", help="the model that serves: its folder or artefact")
    flag("new", type=Path, metavar="NEW", help="the model that may take its place")
    flag(
        "--rows",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="labelled rows: a file, or a folder with test.csv; may be given several times",
    )
    flag(
        "--store",
        metavar="ADDRESS",
        help="compare them on the texts too that the server drew uniformly and people reviewed: "
        "what its OBSERVE names, an SQLite file or postgresql://...",
    )
    flag("--model", metavar="NAME", help="name of the model in the store (default: that of OLD)")
    flag("--text_column", default="text", metavar="NAME", help="column of the text (default: text)")
    flag(
        "--label_column",
        default="label",
        metavar="NAME",
        help="column of the label (default: label)",
    )
    options = parser.parse_args(arguments)
    if not (options.rows or options.store):
        parser.error("give --rows, --store or both: there is nothing to compare the models on")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = _parse_arguments(arguments)
    # By default, Python would end at once, and leave behind the command that it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    old, new = Artefact.at(options.old), Artefact.at(options.new)
    if old.identity == new.identity and old.manifest.calibration == new.manifest.calibration:
        raise UserError(
            f"{options.new}: is the same artefact as {options.old}", code="flags-conflict"
        )
    rows = _read_rows(options, old, new)
    notes = [*rows.notes, *_about_labels(old, new, rows)]
    (before, old_rate), (after, new_rate) = (_answers(model, rows) for model in (old, new))
    doubts, more = _doubts(old.manifest, new.manifest, (old_rate, new_rate))
    found = compare(before, after, rows.targets, rows.labels, doubts)
    record = write_verdict(new, _record(found, rows, old))
    console = Console(width=_WIDTH, highlight=False, markup=False)
    console.print(_table(found, old, new))
    for line in (*notes, *more, line_of(record)):
        print(printable(line))
    return EXIT_CODES[found.verdict]


# ---------------------------------------------------------------- rows


@dataclass(frozen=True, slots=True)
class _Rows:
    """``targets``: indices into ``labels``, which are those of both models."""

    names: list[str]
    texts: list[Text]
    targets: list[int]
    labels: list[str]
    left_out: dict[str, int]
    of_store: list[str]

    @property
    def notes(self) -> list[str]:
        lines = [*self.of_store]
        if why := [f"{n:,} {what.replace('_', ' ')}" for what, n in self.left_out.items() if n]:
            lines.append(f"Rows left out: {', '.join(why)}.")
        if "seen_in_training" not in self.left_out:
            who = "Only one of the models" if "seen_by_one_model" in self.left_out else "No model"
            lines.append(f"{who} knows what it has seen in training; other rows may be among that.")
        return lines


def _read_rows(options: argparse.Namespace, old: Artefact, new: Artefact) -> _Rows:
    """The rows that neither model was trained on, each text once.

    Raises:
        UserError: a file cannot be used, or no row is left.
    """
    labels = [*old.saved.labels]
    labels += [label for label in new.saved.labels if label not in labels]
    columns = Columns(options.text_column, options.label_column)
    texts: list[Text] = []
    targets: list[int] = []
    for path in options.rows:
        found = read_labelled_rows(path, labels, columns=columns)
        texts += found.texts
        targets += found.targets
    names, of_store = [public_name(str(path)) for path in options.rows], []
    if options.store:
        model = options.model or old.manifest.source["name"]
        drawn, of_store = _drawn_in_store(options.store, model, labels)
        # Behind the golden rows: of equal texts the first counts.
        texts += [one.text for one in drawn]
        targets += [labels.index(one.label) for one in drawn]
        names.append(f"reviews of {model}")
    kept, _, left_out = unseen([old.folder, new.folder], texts)
    if not len(kept):
        given = [f"--rows {path}" for path in options.rows]
        given += [f"--store {without_password(options.store)}"] if options.store else []
        raise UserError(
            f"{' '.join(given)}: a model has seen all {counted(len(texts), 'row')} in training; "
            "give others",
            code="data-empty",
        )
    return _Rows(
        names=names,
        texts=[texts[i] for i in kept],
        targets=[targets[i] for i in kept],
        labels=labels,
        left_out=left_out,
        of_store=of_store,
    )


def _drawn_in_store(
    address: str, model: str, labels: Sequence[str]
) -> tuple[list[Reviewed], list[str]]:
    """The reviews that count, and what has to be said of them.

    Both models classify these texts again, as they do the golden rows. What they had answered in
    the server is not used, although the store has it of the texts that the candidate read in
    shadow: those are a few percent of the texts, drawn without looking at them, so the others are
    as good; and their answers are those of the revisions that were served then.
    """
    reviewed, note = reviewed_in_store(address, model, labels)
    drawn = drawn_for_verdict(reviewed)
    if not drawn:
        what = "has no reviews of uniformly drawn texts; python -m loop.review serve asks for them"
        raise UserError(f"--store {without_password(address)}: {what}", code="data-empty")
    lines = [f"{counted(len(drawn), 'uniformly drawn and reviewed text')} from the store."]
    return drawn, [*lines, *filter(None, [note])]


def _about_labels(old: Artefact, new: Artefact, rows: _Rows) -> list[str]:
    counts = np.bincount(rows.targets, minlength=len(rows.labels))
    sets = {
        "Only the new model has": set(new.saved.labels) - set(old.saved.labels),
        "Only the old model has": set(old.saved.labels) - set(new.saved.labels),
        "No rows, so nothing is known of": {
            label for label, count in zip(rows.labels, counts, strict=True) if not count
        },
    }
    return [f"{what} {some_of(sorted(labels))}." for what, labels in sets.items() if labels]


def _answers(model: Artefact, rows: _Rows) -> tuple[Answers, float]:
    """What an artefact answers, and its rows per second, by the command that people score files
    with.
    """
    rate = 0.0

    def say(line: str) -> None:
        nonlocal rate
        print(line, file=sys.stderr, flush=True)
        if found := _RATE.search(line):
            rate = float(found[1].replace(",", ""))

    with tempfile.TemporaryDirectory(prefix="verdict") as folder:
        asked, answered = Path(folder) / "rows.jsonl", Path(folder) / "answers.jsonl"
        lines = (json.dumps({"text": text}) for text in rows.texts)
        asked.write_text("\n".join(lines) + "\n", encoding="utf-8")
        flags = ["--model", str(model.folder)]
        run_module(
            "inference.score",
            [str(asked), str(answered), *flags],
            str(model.path),
            say,
            quiet=True,
        )
        found = [parse_json(line) for line in answered.read_text(encoding="utf-8").splitlines()]
    wanted = [rows.labels[target] for target in rows.targets]
    right = [one["label"] == label for one, label in zip(found, wanted, strict=True)]
    confidence = [one["confidence"] for one in found]
    return Answers(np.array(right, dtype=bool), np.array(confidence, dtype=np.float64)), rate


# ---------------------------------------------------------------- what is said and kept


def _doubts(
    old: Manifest, new: Manifest, rates: tuple[float, float]
) -> tuple[list[str], list[str]]:
    """What speaks against the new artefact besides its answers, and what has to be known of that.

    ``rates``: rows per second of both, one right after the other; 0: not known.
    """
    doubts, notes = [], []
    size = new.size["after_bytes"] / max(1, old.size["after_bytes"])
    if size > MOST_TIMES:
        doubts.append(f"it is {size:.1f} times as large; {MOST_TIMES:g} times are allowed")
    speeds = [one.speed["after_texts_per_second"] for one in (old, new)]
    machines = [(one.speed.get("processor"), one.speed.get("threads")) for one in (old, new)]
    if machines[0] != machines[1]:
        where = " and ".join(f"{name} with {counted(n or 0, 'thread')}" for name, n in machines)
        notes.append(f"Their speeds were measured on {where}, so they are not compared.")
    elif MOST_TIMES * speeds[1] < speeds[0]:
        slow = f"it is {speeds[0] / max(speeds[1], 1e-9):.1f} times as slow"
        # The exports may have measured weeks apart, one of them on a busy machine.
        if min(rates) > 0 and MOST_TIMES * rates[1] >= rates[0]:
            notes.append(f"By what the exports measured, {slow}, but not on these rows.")
        else:
            doubts.append(slow)
    return doubts, notes


def _record(found: Comparison, rows: _Rows, old: Artefact) -> dict[str, Any]:
    labelled = zip(rows.texts, rows.targets, strict=True)
    return {
        **_rounded(asdict(found)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parent": old.identity,
        "dataset": rows.names,
        "rows_sha256": hash_of([text, rows.labels[target]] for text, target in labelled),
        "left_out": rows.left_out,
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _table(found: Comparison, old: Artefact, new: Artefact) -> Table:
    table = Table(title=f"{counted(found.rows, 'row')} that neither has seen", title_justify="left")
    for name in ("", "old", "new", "change"):
        table.add_column(name, justify="left" if not name else "right", overflow="ellipsis")
    add = table.add_row

    def shares(name: str, before: float, after: float, digits: int = 2) -> None:
        change = f"{100 * (after - before):+.{digits}f} points"
        add(name, f"{before:.{digits}%}", f"{after:.{digits}%}", change)

    shares("accuracy", found.accuracy_before, found.accuracy_after)
    add("  of that, certain (95%)", "", "", f"{100 * found.low:+.2f} to {100 * found.high:+.2f}")
    add("only this one is right", f"{found.lost:,}", f"{found.gained:,}", "")
    for one in _shown_classes(found.classes):
        name = f"recall {printable(one.label, keep='')[:24]}"
        shares(f"{name} ({one.rows:,})", one.before, one.after, 1)
    shares("calibration error", found.calibration.before, found.calibration.after)
    speeds = old.texts_per_second, new.texts_per_second
    add("texts per second", *(f"{speed:,.0f}" for speed in speeds), _times(*speeds))
    sizes = old.num_bytes, new.num_bytes
    add("size", *(f"{size / 1e6:.1f} MB" for size in sizes), _times(*sizes))
    return table


def _shown_classes(classes: Sequence[ClassChange]) -> list[ClassChange]:
    most_lost = sorted(classes, key=lambda one: one.after - one.before)[:_MOST_CLASSES]
    return [one for one in classes if one in most_lost]


def _times(before: float, after: float) -> str:
    return f"{after / before:.2f} times" if before else ""


def line_of(record: dict[str, Any]) -> str:
    """A verdict in one line, from its record."""
    line = f"{record['verdict']}: {'; '.join(record['reasons'])}."
    if record["rows_needed"]:
        line += f" About {record['rows_needed']:,} rows like these would probably decide."
    return line


if __name__ == "__main__":
    run_command(main)
