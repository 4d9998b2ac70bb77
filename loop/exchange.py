"""Labels in and out of files: CSV and JSON Lines as training reads them, and what Label Studio and
Argilla read and write.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import write_csv, write_whole
from common.text import folded
from inference.observing.feedback import REVIEW, storable
from inference.observing.store import Feedback

# The column, and the task or the question, that has the label.
_LABEL = "label"
_COLUMNS = ("text", _LABEL, "answered", "by", "kind", "why", "request", "revision")
FORMATS = ("plain", "labelstudio", "argilla")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text with its right label, None if nobody has said it yet; the rest as in `Feedback`."""

    text: str
    label: str | None
    answered: str = ""
    by: str = ""
    kind: str = ""
    why: str = ""
    request: str = ""
    revision: str = ""

    @classmethod
    def of(cls, one: Feedback) -> Labelled:
        return cls(
            *(one.text, one.label, one.answered, one.author, one.kind, one.why),
            *(one.request, one.revision),
        )

    @property
    def row(self) -> Row:
        return {name: getattr(self, name) for name in _COLUMNS}

    @property
    def about(self) -> dict[str, str]:
        """What must come back with the label, so that it is known what was asked and why."""
        names = ("answered", "by", "kind", "why", "request", "revision")
        return {name: value for name in names if (value := getattr(self, name))}


def decided(statements: Sequence[Feedback]) -> list[Feedback]:
    """The statement that counts for each text: the newest review, otherwise the newest correction.

    Args:
        statements: the oldest first.
    """
    found: dict[str, Feedback] = {}
    for one in statements:
        before = found.get(folded(one.text))
        if before is None or one.kind == REVIEW or before.kind != REVIEW:
            found[folded(one.text)] = one
    return list(found.values())


# ------------------------------------------------------------------ out


def write(path: Path, found: Sequence[Labelled], form: str) -> None:
    """Write a ``.csv`` file, a ``.jsonl`` file, or a ``.json`` file with one list.

    Raises:
        UserError: the name ends otherwise, or the format is not one of such a file.
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".jsonl", ".json"):
        raise UserError(f"{path}: must end in .csv, .jsonl or .json", code="review-file")
    if suffix == ".csv":
        if form != "plain":
            line = f"--format {form}: is JSON; name a file that ends in .json or .jsonl"
            raise UserError(line, code="review-file")
        write_csv(path, _COLUMNS, [list(one.row.values()) for one in found])
        return
    shape = {"plain": _plain, "labelstudio": _task, "argilla": _record}[form]
    rows = [json.dumps(shape(one), ensure_ascii=False) for one in found]
    text = "[" + ",\n".join(rows) + "]\n" if suffix == ".json" else "".join(f"{r}\n" for r in rows)
    write_whole(path, text.encode())


def _plain(one: Labelled) -> Row:
    # Without a label it is a row all the same, for somebody to fill in.
    return {name: value for name, value in one.row.items() if name == _LABEL or value}


def _choice(label: str) -> list[Row]:
    value = {"choices": [label]}
    return [{"from_name": _LABEL, "to_name": "text", "type": "choices", "value": value}]


def _task(one: Labelled) -> Row:
    """https://labelstud.io/guide/task_format, for a config with <Choices name="label"
    toName="text"> and <Text name="text" value="$text">.
    """
    task: Row = {"data": {"text": one.text, **one.about}}
    if one.answered:
        version = one.revision or "model"
        task["predictions"] = [{"model_version": version, "result": _choice(one.answered)}]
    if one.label is not None:
        task["annotations"] = [{"result": _choice(one.label)}]
    return task


def _record(one: Labelled) -> Row:
    """https://docs.argilla.io/latest/reference/argilla/records/records, as its to_json writes
    them, of a dataset with the field text and the question label.
    """
    record: Row = {"fields": {"text": one.text}, "metadata": one.about}
    if one.answered:
        agent = one.revision or "model"
        record["suggestions"] = {_LABEL: {"value": one.answered, "score": None, "agent": agent}}
    if one.label is not None:
        record["responses"] = {_LABEL: [{"value": one.label, "user_id": one.by}]}
    return record


# ------------------------------------------------------------------ in


def read(path: Path) -> list[Labelled]:
    """What a file of any of these formats says; texts without a label are left out.

    Raises:
        UserError: it cannot be read, or a row is none of these formats; it names the row.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{path}: cannot be read ({reason})", code="review-file") from None
    if (suffix := path.suffix.lower()) not in _ROWS:
        line = f"{path}: must end in {', '.join(_ROWS)}"
        raise UserError(line, code="review-file")
    found = []
    try:
        for where, row in _ROWS[suffix](content):
            found += [one for one in _labels_of(row, f"{path} {where}") if one.label]
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({error})", code="review-file") from None
    return found


def _csv_rows(content: str) -> Iterator[tuple[str, Row]]:
    rows = csv.DictReader(io.StringIO(content, newline=""))
    for row in rows:
        yield f"line {rows.line_num}", row


def _line_rows(content: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines: a text may hold one of the other characters that it takes for a line's end.
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield f"line {number}", json.loads(line)


def _list_rows(content: str) -> Iterator[tuple[str, Any]]:
    rows = json.loads(content)
    if not isinstance(rows, list):
        raise ValueError("not a list")
    for number, row in enumerate(rows, 1):
        yield f"entry {number}", row


_ROWS: dict[str, Callable[[str], Iterator[tuple[str, Any]]]] = {
    ".csv": _csv_rows,
    ".jsonl": _line_rows,
    ".json": _list_rows,
}


def _labels_of(row: Any, where: str) -> list[Labelled]:
    try:
        if "data" in row:
            return [_labelled(row["data"], *one) for one in _annotations(row)]
        if "fields" in row:
            about = {**(row.get("metadata") or {}), "text": row["fields"]["text"]}
            answers = (row.get("responses") or {}).get(_LABEL) or []
            return [_labelled(about, one["value"], one.get("user_id")) for one in answers]
        return [_labelled(row, row[_LABEL], row.get("by"))]
    except (KeyError, TypeError, AttributeError, IndexError, ValueError):
        what = "is no row with text and label, no task of Label Studio and no record of Argilla"
        raise UserError(f"{where}: {what}", code="review-file") from None


def _annotations(task: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for one in task.get("annotations") or ():
        if one.get("was_cancelled") or not one["result"]:
            continue
        author = one.get("completed_by")
        # A number, or what Label Studio shows of the person.
        yield (
            one["result"][0]["value"]["choices"][0],
            author.get("email") if isinstance(author, dict) else author,
        )


def _labelled(row: Mapping[str, Any], label: Any, author: Any) -> Labelled:
    text = row["text"]
    if not isinstance(text, str) or not (text := storable(text)).strip():
        raise ValueError("no text")
    if not isinstance(label, str | None):
        raise ValueError("no label")
    names = ("answered", "kind", "why", "request", "revision")
    about = {name: storable(str(row.get(name) or "")) for name in names}
    return Labelled(text, label, by=storable(str(author or row.get("by") or "")), **about)
