from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from common.model_folder import ModelLoadError
from tests.training.test_export import write_tiny
from training.data.rough_text import KINDS
from training.evaluate import main

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = ("Oil, and gas: prices rise", "A late goal; the cup is won", "Peace talks begin. Again", "Shares fall")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, arguments), "--device", "cpu"])
    main()


def write_rows(path: Path, labels: list[str]) -> Path:
    rows = ({"title": TEXTS[i % 4], "body": f"number {i}", "label": label} for i, label in enumerate(labels))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_robustness_measures_every_kind_of_rough_text_by_the_same_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_tiny(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", ["World", "Sports", "Business", "Sci/Tech"] * 3)
    flags = (tmp_path / "model", "--dataset", data, "--text_column", "title,body", "--robustness")

    run(monkeypatch, *flags, "--json")
    found = json.loads(capsys.readouterr().out)
    run(monkeypatch, *flags)
    printed = capsys.readouterr().out

    kinds = found["robustness"]["kinds"]
    assert list(kinds) == ["whole rows", *KINDS]
    assert kinds["whole rows"]["accuracy"] == found["accuracy"]
    assert kinds["title or first clause alone"]["rows_changed"] == 12
    assert "robustness: accuracy on 12 test rows" in printed
    for kind, figures in kinds.items():
        (line,) = [line for line in printed.splitlines() if line.startswith(kind)]
        assert f"{figures['accuracy']:.2%}" in line


def test_of_many_classes_the_most_frequent_confusions_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = [f"intent_{number}" for number in range(20)]
    write_tiny(tmp_path / "model", names)
    data = write_rows(tmp_path / "rows.jsonl", names * 2)

    run(monkeypatch, tmp_path / "model", "--dataset", data, "--text_column", "title")
    printed = capsys.readouterr().out

    assert "predicted instead (the most frequent confusions)" in printed
    assert max(map(len, printed.splitlines()[1:])) < 120  # the first line has the paths


def test_a_model_that_was_published_without_its_weights_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ModelLoadError, match=r"news: has only the exported artefact, .* name the folder that training"):
        run(monkeypatch, REPOSITORY / "checkpoints" / "news", "--dataset", "sample")
