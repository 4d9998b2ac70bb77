"""Labels go out in three shapes and come back the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import UserError
from inference.observing.store import Feedback
from loop.exchange import FORMATS, Labelled, decided, read, write

LABELLED = [
    Labelled(
        'A "quoted" text, with commas;\u2028 and\nlines',
        *("World", "Sports", "ann", "review", "uniform", "r1:0", "abc"),
    ),
    Labelled("=1+1", "Sci/Tech", by="bob", kind="correction"),
]
QUEUED = Labelled("Which one?", None, "Sports", why="uncertain", request="r2:0", revision="abc")


@pytest.mark.parametrize(
    ("name", "form"),
    [("out.csv", "plain"), *((f"out.{end}", form) for end in ("jsonl", "json") for form in FORMATS)],
)
def test_labels_come_back_as_they_went_out(tmp_path: Path, name: str, form: str) -> None:
    path = tmp_path / name
    write(path, [*LABELLED, QUEUED], form)

    assert read(path) == LABELLED  # and nobody has labelled the last one


def test_label_studio_gets_tasks_with_predictions_and_gives_back_annotations(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    write(path, [QUEUED], "labelstudio")
    [task] = json.loads(path.read_text())
    [prediction] = task["predictions"]

    assert task["data"]["text"] == QUEUED.text
    assert prediction["result"][0]["value"] == {"choices": ["Sports"]}
    assert "annotations" not in task

    # As its export has them: with the model's own fields, one that was skipped, and two people.
    result = [{"id": "x", "from_name": "topic", "to_name": "text", "type": "choices", "value": {"choices": ["World"]}}]
    annotation = {"id": 1, "result": result, "was_cancelled": False, "lead_time": 4.2}
    task["annotations"] = [
        annotation | {"completed_by": 10},
        annotation | {"completed_by": {"id": 11, "email": "bob@example.org"}},
        annotation | {"was_cancelled": True},
        annotation | {"result": []},
    ]
    path.write_text(json.dumps([task | {"id": 7, "project": 1}]))

    found = read(path)

    assert [(one.label, one.by) for one in found] == [("World", "10"), ("World", "bob@example.org")]
    assert {(one.text, one.why, one.request) for one in found} == {(QUEUED.text, "uncertain", "r2:0")}


def test_argilla_gets_records_with_suggestions_and_gives_back_responses(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, [QUEUED], "argilla")
    record = json.loads(path.read_text())

    assert record["fields"] == {"text": QUEUED.text}
    assert record["suggestions"]["label"]["value"] == "Sports"

    record["responses"] = {"label": [{"value": "World", "user_id": "ann"}, {"value": "Sports", "user_id": "bob"}]}
    path.write_text(json.dumps(record | {"id": "1", "vectors": {}, "status": "completed", "_server_id": "2"}) + "\n")

    assert [(one.label, one.by, one.why) for one in read(path)] == [
        ("World", "ann", "uncertain"),
        ("Sports", "bob", "uncertain"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("rows.csv", "text,label\nShares fall,Business\n,World\n", "rows.csv line 3: is no row with text and label"),
        ("rows.csv", "headline,label\nShares fall,Business\n", "rows.csv line 2: is no row"),
        ("rows.jsonl", '{"text": "Shares fall", "label": 3}\n', "rows.jsonl line 1: is no row"),
        ("rows.jsonl", "[1]\n", "rows.jsonl line 1: is no row"),
        ("rows.jsonl", "{\n", "rows.jsonl: cannot be read"),
        ("rows.json", "{}", "rows.json: cannot be read"),
        ("rows.json", '[{"data": {"text": "a"}, "annotations": [{"result": [3]}]}]', "rows.json entry 1: is no row"),
        ("rows.json", '[{"fields": {}}]', "rows.json entry 1: is no row"),
        ("rows.txt", "a", "rows.txt: must end in .csv, .jsonl, .json"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str, line: str) -> None:
    (tmp_path / name).write_text(content)

    with pytest.raises(UserError) as caught:
        read(tmp_path / name)
    assert line in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("gone.csv", "No such file"), ("binary.csv", "not UTF-8")):
        with pytest.raises(UserError, match=reason):
            read(tmp_path / name)


def test_an_export_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name, form, line in (("out.txt", "plain", "must end in"), ("out.csv", "argilla", "--format argilla: is JSON")):
        with pytest.raises(UserError, match=line):
            write(tmp_path / name, LABELLED, form)
    assert not list(tmp_path.iterdir())


def test_the_newest_review_counts_and_without_one_the_newest_correction() -> None:
    def said(number: int, text: str, label: str, kind: str) -> Feedback:
        return Feedback(str(number), float(number), "news", "abc", "", text, "", label, "", "ann", kind, "")

    found = decided(
        [
            said(1, "A text", "World", "review"),
            said(2, "a  TEXT", "Sports", "review"),
            said(3, "A text", "Business", "correction"),
            said(4, "Another", "World", "correction"),
            said(5, "Another", "Sports", "correction"),
        ]
    )

    assert [one.label for one in found] == ["Sports", "Sports"]
