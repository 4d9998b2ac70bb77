"""`python -m loop.retrain`: which rows are trained on, and the real commands that follow."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from common.rows import LabelledRows
from common.seen_texts import SeenTexts
from common.verdicts import verdict_in
from inference import export
from inference.observing.store import Feedback, Store
from loop import retrain
from loop.new_rows import NewRows, Reviewed, read_reviewed, reviewed_in_store
from loop.record import Artefact
from tests.processes import run_python

LABELS = ["calm", "storm"]


def labelled(*texts: str, label: int = 0) -> LabelledRows:
    return LabelledRows("rows.csv", list(texts), [label] * len(texts), [])


def texts_of(rows: dict[int, tuple[str, str]]) -> dict[str, str]:
    return dict(rows.values())


def numbered(what: str, count: int) -> list[str]:
    return [f"{what} {i}" for i in range(count)]


# Which rows


def test_a_reviewed_text_replaces_the_old_row_with_the_same_text_and_the_newest_review_counts() -> None:
    reviewed = [Reviewed("old 1", "calm", False), Reviewed("OLD  1", "storm", False), Reviewed("new", "storm", False)]

    rows = NewRows.split(labelled("old 1", "old 2"), reviewed, labelled("golden"), LABELS)

    assert texts_of(rows.training) == {"OLD  1": "storm", "old 2": "calm", "new": "storm"}
    assert rows.counts["labels_corrected"] == 1


def test_no_golden_row_is_trained_on_and_each_part_has_its_own_texts() -> None:
    golden = numbered("golden", 200)
    reviewed = [Reviewed(text, "storm", False) for text in golden[:50]]
    reviewed += [Reviewed(text, "calm", True) for text in numbered("uniform", 200)]

    rows = NewRows.split(labelled(*golden[100:], *numbered("old", 50)), reviewed, labelled(*golden), LABELS)

    parts = [set(texts_of(part)) for part in (rows.training, rows.calibration, rows.verdict)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 50 + 200 + 200
    assert not parts[0] & set(golden)
    assert texts_of(rows.verdict | rows.calibration)[golden[0]] == "calm"  # what the golden row says
    assert rows.counts["golden_among_old"] == 100
    # Half of the uniform ones judge, a fifth of all that are held out calibrates.
    assert 70 < rows.counts["uniform_for_verdict"] < 130
    assert 35 < len(parts[1]) < 90


def test_a_text_is_on_the_same_side_in_every_retraining() -> None:
    uniform = [Reviewed(text, "calm", True) for text in numbered("uniform", 100)]

    first = NewRows.split(labelled("old"), uniform[:60], labelled("golden"), LABELS)
    second = NewRows.split(labelled("old"), uniform, labelled("golden"), LABELS)

    assert first.training.keys() <= second.training.keys()
    assert first.verdict.keys() <= second.verdict.keys()


def test_a_uniform_review_of_a_text_that_the_old_model_was_trained_on_is_trained_on() -> None:
    texts = numbered("text", 40)

    rows = NewRows.split(labelled(*texts), [Reviewed(text, "storm", True) for text in texts], labelled("g"), LABELS)

    assert texts_of(rows.training) == dict.fromkeys(texts, "storm")


def test_reviews_come_from_the_store_and_corrections_wait(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "observed.sqlite"))

    def said(number: int, kind: str, text: str, label: str, why: str = "") -> Feedback:
        about = ("tickets", "r1", "request", text, "calm", label, "anonymous", "ann", kind, why)
        return Feedback(str(number), float(number), *about)

    store.append(
        [
            said(1, "correction", "one", "storm"),
            said(2, "review", "one", "calm", "uncertain"),
            said(3, "review", "two", "storm", "uniform"),
            said(4, "correction", "three", "storm"),
        ]
    )
    store.close()

    reviewed, note = reviewed_in_store(store.address, "tickets", LABELS)

    assert reviewed == [Reviewed("one", "calm", False), Reviewed("two", "storm", True)]
    assert note == "1 correction that nobody has reviewed: not used."
    with pytest.raises(UserError, match="no such file"):
        reviewed_in_store(str(tmp_path / "gone.sqlite"), "tickets", LABELS)
    assert not (tmp_path / "gone.sqlite").exists()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"text": "one", "label": "hail"}', "label 'hail' is not one of the model's: calm, storm"),
        ('{"text": " ", "label": "calm"}', "text must be a text that is not empty"),
        ('{"label": "calm"}', "text must be"),
        ("[1]", "must be an object with text and label"),
        ("{", "not"),
    ],
)
def test_a_reviewed_row_that_cannot_be_used_is_reported_with_its_line(line: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "reviewed.jsonl"
    path.write_text('{"text": "one", "label": "calm"}\n\n' + line)

    with pytest.raises(UserError) as caught:
        read_reviewed(path, LABELS)

    assert "reviewed.jsonl, line 3: " in caught.value.line
    assert error in caught.value.line


# The commands


@pytest.fixture(scope="module")
def inputs(model_folder: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an old model, and its rows divided into old, reviewed and golden ones."""
    folder = tmp_path_factory.mktemp("retrain")
    shutil.copytree(model_folder, folder / "old")
    export.main([str(folder / "old"), "--rows", str(rows_file), "--max_drop", "100"])
    lines = rows_file.read_text().splitlines()
    for name, part in {"rows": lines[:100], "reviewed": lines[100:200], "golden": lines[200:]}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    SeenTexts.of(json.loads(line)["text"] for line in lines[:100]).write(folder / "old")
    return folder


def words(inputs: Path, output: Path, **changed: str) -> list[str]:
    given = {name: str(inputs / f"{name}.jsonl") for name in ("rows", "reviewed", "golden")} | changed
    if "store" in changed:
        del given["reviewed"]
    flags = [word for name, value in given.items() for word in (f"--{name}", value)]
    return [str(inputs / "old"), *flags, "--output_dir", str(output), "--", "--device", "cpu"]


def test_the_address_of_the_store_is_kept_and_compared_without_its_password(inputs: Path, tmp_path: Path) -> None:
    first, second, other = (
        retrain._inputs(retrain._parse_arguments(words(inputs, tmp_path / "new", store=f"postgresql://{where}/seen")))
        for where in ("ann:secret@db", "ann:changed@db", "ann:secret@other")
    )

    assert "secret" not in json.dumps(first)
    assert first == second != other


def test_reviews_are_those_of_the_name_in_the_export_whatever_the_folder_is_called_or_of_model(
    inputs: Path, tmp_path: Path
) -> None:
    label = json.loads((inputs / "rows.jsonl").read_text().splitlines()[0])["label"]
    store = Store(str(tmp_path / "observed.sqlite"))
    for number, model in enumerate(("old", "live", "live")):
        about = (model, "r1", "request", f"review {number}", "", label)
        store.append([Feedback(str(number), 1.0, *about, "anonymous", "ann", "review", "")])
    store.close()
    shutil.copytree(inputs / "old", tmp_path / "renamed")

    def num_reviewed(**flags: str) -> int:
        given = words(inputs, tmp_path / "new", store=store.address, **flags)
        options = retrain._parse_arguments([str(tmp_path / "renamed"), *given[1:]])
        return retrain._split(options, retrain._read_old(options.old)).counts["reviewed"]

    assert num_reviewed() == 1
    assert num_reviewed(model="live") == 2


def test_a_name_in_the_store_without_a_store_is_refused(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model: names the model in a store; give --store too"):
        retrain.main(words(inputs, tmp_path / "new", model="live"))


@pytest.mark.slow
def test_a_retraining_that_is_killed_continues_to_its_verdict(inputs: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    command = [sys.executable, "-m", "loop.retrain", *words(inputs, new)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        for line in process.stdout:
            if line.startswith("$ python -m inference.export"):
                os.killpg(process.pid, signal.SIGKILL)
    weights = (new / "model.safetensors").read_bytes()

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode in (0, 10, 11), done.stderr
    assert done.stdout.startswith(f"Continuing with the rows in {new}.rows\n")
    assert (new / "model.safetensors").read_bytes() == weights
    record = verdict_in(Artefact.at(new).folder)
    assert done.stdout.splitlines()[-1].startswith(f"{record['verdict']}: ")
    assert record["parent"] == Artefact.at(inputs / "old").identity
    assert record["left_out"]["seen_in_training"] == 0
    # Another retraining is not mixed with it.
    with pytest.raises(UserError, match="begun with other rows or flags"):
        retrain.main(words(inputs, new, golden=str(inputs / "rows.jsonl")))


@pytest.mark.slow
def test_fine_tuning_on_two_ranks_weighs_contradicted_rows_and_ends_with_a_verdict(
    inputs: Path, tmp_path: Path
) -> None:
    flags = ["--method", "fine_tune", "--processes", "2"]
    command = ["-m", "loop.retrain", *flags, *words(inputs, tmp_path / "new"), "--epochs", "2"]

    done = run_python(command)

    assert done.returncode in (0, 10, 11), done.stderr
    assert re.search(r"World size +2 ", done.stdout)
    assert "with a doubtful label had less weight" in (tmp_path / "new.run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"golden": "gone.csv"}, "gone.csv: no such file"),
        ({"reviewed": "gone.jsonl"}, "--reviewed gone.jsonl: No such file"),
        ({"reviewed": "GOLDEN"}, "no reviewed row is left to train on"),
    ],
)
def test_bad_input_ends_in_one_line_and_nothing_is_written(
    changed: dict[str, str], error: str, inputs: Path, tmp_path: Path
) -> None:
    changed = {name: str(inputs / "golden.jsonl") if value == "GOLDEN" else value for name, value in changed.items()}

    with pytest.raises(UserError) as caught:
        retrain.main(words(inputs, tmp_path / "new", **changed))

    assert error in caught.value.line
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_trained_or_compared_is_refused(
    inputs: Path, model_folder: Path, tmp_path: Path
) -> None:
    flags = words(inputs, tmp_path / "new")[1:]

    with pytest.raises(UserError, match="has only the exported artefact"):
        retrain.main([str(Artefact.at(inputs / "old").folder), *flags])
    with pytest.raises(UserError, match="has no artefact to compare with"):
        retrain.main([str(model_folder), *flags])


def test_a_review_with_a_label_that_the_model_lacks_is_named_and_so_is_a_model_without_reviews(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "observed.sqlite"))
    about = ("tickets", "r1", "request", "one", "calm", "flood", "anonymous", "ann", "review", "")
    store.append([Feedback("1", 1.0, *about)])
    store.close()

    assert reviewed_in_store(store.address, "tickets", LABELS) == (
        [],
        "1 review with a label that the model lacks (flood): not used.",
    )
    with pytest.raises(UserError, match="has nothing of a model news; there are tickets"):
        reviewed_in_store(store.address, "news", LABELS)
