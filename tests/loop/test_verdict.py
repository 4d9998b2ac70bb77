"""`python -m loop.verdict` on two real artefacts, and its record in the manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from common.model_folder import read_manifest
from common.seen_texts import SeenTexts, text_hash
from common.verdicts import NotPromoted, verdict_in
from inference import export
from inference.observing.store import Feedback, Store
from loop import verdict
from loop.record import Artefact
from tests.processes import run_python

MakeModel = Callable[[float], Path]


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def make_model(model_folder: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """The tiny model, with so much added to the score of its first label, and its artefact."""

    def make(shift: float) -> Path:
        folder = Path(shutil.copytree(model_folder, tmp_path_factory.mktemp("models") / f"tiny{shift:g}"))
        weights = load_file(folder / "model.safetensors")
        weights["classifier.bias"][0] += shift
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        few = ["--rows", str(rows_file), "--limit", "99", "--max_drop", "100"]
        export.main([str(folder), *few])
        return folder

    return make


@pytest.fixture(scope="module")
def old(make_model: MakeModel) -> Path:
    return make_model(0.0)


@pytest.fixture(scope="module")
def worse(make_model: MakeModel) -> Path:
    """Answers with the first label too often."""
    return make_model(1.5)


@pytest.fixture(scope="module")
def rejected(old: Path, worse: Path, rows_file: Path) -> Any:
    return run_python(["-m", "loop.verdict", old, worse, "--rows", rows_file])


def test_a_worse_model_is_rejected_with_a_table_a_line_and_a_code(rejected: Any) -> None:
    assert rejected.returncode == 11, rejected.stderr
    *table, line = rejected.stdout.splitlines()
    assert line.startswith("REJECT: ")
    assert "less accurate, which is not by chance" in line
    assert max(map(len, table[: next(i for i, one in enumerate(table) if one.startswith("└")) + 1])) <= 80
    assert "No model knows what it has seen in training" in rejected.stdout


def test_the_record_names_both_artefacts_and_the_rows_and_is_hashed(rejected: Any, old: Path, worse: Path) -> None:
    record = verdict_in(Artefact.at(worse).folder)

    assert record["verdict"] == "REJECT"
    assert record["parent"] == Artefact.at(old).identity
    assert record["artefact"] == Artefact.at(worse).identity
    assert record["parent"]["weights_sha256"] != record["artefact"]["weights_sha256"]
    assert record["rows"] + record["left_out"]["repeated"] == 400
    assert len(record["rows_sha256"]) == len(record["sha256"]) == 64


def test_a_record_that_was_changed_or_moved_is_refused(rejected: Any, old: Path, worse: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(Artefact.at(worse).folder, tmp_path / "artefact"))
    manifest = json.loads((folder / "manifest.json").read_text())

    def refusal(**changed: Any) -> str:
        (folder / "manifest.json").write_text(json.dumps(manifest | changed))
        with pytest.raises(NotPromoted) as caught:
            verdict_in(folder)
        return str(caught.value)

    assert "was changed" in refusal(verdict=manifest["verdict"] | {"verdict": "PROMOTE"})
    source = json.loads((Artefact.at(old).folder / "manifest.json").read_text())["source"]
    assert "is about another artefact" in refusal(source=source)


def test_an_artefact_with_a_verdict_is_loaded_and_a_new_export_drops_it(
    rejected: Any, worse: Path, rows_file: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(worse, tmp_path / "model"))
    folder = Artefact.at(model).folder
    assert read_manifest(folder).verdict

    export.main([str(folder), "--rows", str(rows_file)])  # only the calibration

    assert read_manifest(folder).calibration
    assert verdict_in(folder) == {}


def test_rows_that_a_model_was_trained_on_are_left_out(old: Path, worse: Path, rows_file: Path, tmp_path: Path) -> None:
    texts = [row["text"] for row in _rows(rows_file)]
    new = Path(shutil.copytree(worse, tmp_path / "new"))
    SeenTexts.of(texts[:100]).write(new)
    options = verdict._parse_arguments([str(old), str(new), "--rows", str(rows_file)])

    rows = verdict._read_rows(options, Artefact.at(old), Artefact.at(new))

    assert not {*rows.texts} & {*texts[:100]}
    assert rows.left_out["seen_by_one_model"] >= 100
    assert "Only one of the models knows what it has seen" in rows.notes[-1]


@pytest.fixture
def reviews(old: Path, worse: Path, rows_file: Path, tmp_path: Path) -> str:
    """A store with reviews of 200 texts, of which every other one was drawn uniformly."""
    store = Store(str(tmp_path / "observed.sqlite"))
    name = Artefact.at(old).manifest.source["name"]
    store.append(
        [
            Feedback(
                *(str(i), float(i), name, "r1", f"{i}:0", row["text"], "", row["label"], "anonymous", "ann"),
                *("review", ("uniform", "shadow")[i % 2]),
            )
            for i, row in enumerate(_rows(rows_file)[:200])
        ]
    )
    store.close()
    return store.address


def test_reviews_of_uniformly_drawn_texts_are_compared_on_and_no_others(
    old: Path, worse: Path, rows_file: Path, reviews: str
) -> None:
    options = verdict._parse_arguments([str(old), str(worse), "--store", reviews])

    rows = verdict._read_rows(options, Artefact.at(old), Artefact.at(worse))

    reviewed = _rows(rows_file)[:200]
    drawn = {row["text"] for row in reviewed[::2] if text_hash(row["text"]) % 5}  # a fifth calibrates retrained models
    assert {*rows.texts} == drawn
    labels = {row["text"]: row["label"] for row in reviewed}
    assert [rows.labels[target] for target in rows.targets] == [labels[text] for text in rows.texts]
    assert "uniformly drawn and reviewed texts from the store" in rows.notes[0]


def test_a_text_of_the_golden_rows_has_their_label_whatever_a_review_says(
    old: Path, worse: Path, rows_file: Path, reviews: str, tmp_path: Path
) -> None:
    golden = tmp_path / "golden.jsonl"
    drawn = [row for row in _rows(rows_file)[:200:2] if text_hash(row["text"]) % 5]
    text, said = drawn[0]["text"], drawn[0]["label"]
    other = next(row["label"] for row in drawn if row["label"] != said)
    golden.write_text(json.dumps({"text": text, "label": other}) + "\n")
    options = verdict._parse_arguments([str(old), str(worse), "--rows", str(golden), "--store", reviews])

    rows = verdict._read_rows(options, Artefact.at(old), Artefact.at(worse))

    assert rows.labels[rows.targets[rows.texts.index(text)]] == other
    assert rows.left_out["repeated"] >= 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["gone", "NEW", "--rows", "ROWS"], "gone: no such model"),
        (["OLD", "OLD", "--rows", "ROWS"], "is the same artefact as"),
        (["BARE", "NEW", "--rows", "ROWS"], "has no exported artefact"),
        (["OLD", "NEW", "--rows", "gone.csv"], "gone.csv: no such file"),
        (["OLD", "NEW", "--rows", "BAD"], "Weather"),
        (["OLD", "NEW"], "--rows, --store or both"),
        (["OLD", "NEW", "--store", "gone.sqlite"], "gone.sqlite: no such file"),
        (["OLD", "NEW", "--store", "REVIEWS", "--model", "other"], "has nothing of a model other; there are "),
    ],
)
def test_bad_input_ends_in_one_line(
    arguments: list[str],
    error: str,
    old: Path,
    worse: Path,
    model_folder: Path,
    rows_file: Path,
    reviews: str,
    tmp_path: Path,
) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("text,label\nRain until noon,Weather\n")
    places = {"OLD": old, "NEW": worse, "BARE": model_folder, "ROWS": rows_file, "BAD": bad, "REVIEWS": reviews}

    with pytest.raises(verdict.UserError) as caught:
        verdict.main([str(places.get(one, one)) for one in arguments])

    assert error in caught.value.line
    assert "\n" not in caught.value.line


def test_a_slower_or_larger_model_is_doubted_but_not_by_figures_of_another_machine(old: Path, worse: Path) -> None:
    before, after = (read_manifest(Artefact.at(one).folder) for one in (old, worse))
    before.speed.update(after_texts_per_second=300.0)
    after.speed.update(after_texts_per_second=100.0)
    after.size.update(after_bytes=3 * before.size["after_bytes"])

    doubts, notes = verdict._doubts(before, after, (250.0, 90.0))
    assert doubts == ["it is 3.0 times as large; 2 times are allowed", "it is 3.0 times as slow"]
    assert notes == []

    assert verdict._doubts(before, after, (250.0, 0.0))[0] == verdict._doubts(before, after, (0.0, 0.0))[0] == doubts

    # The export of one was on a busy machine: on the same rows, one after the other, both are alike.
    doubts, [note] = verdict._doubts(before, after, (250.0, 240.0))
    assert doubts == ["it is 3.0 times as large; 2 times are allowed"]
    assert "but not on these rows" in note

    after.speed.update(processor="another")
    doubts, [note] = verdict._doubts(before, after, (250.0, 90.0))
    assert doubts == ["it is 3.0 times as large; 2 times are allowed"]
    assert "so they are not compared" in note
