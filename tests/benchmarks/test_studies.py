"""A study measures every variant with every seed, and its page compares them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import harness, studies
from benchmarks.studies import Figures, Study, Trial
from training.data.dataset import load_news


def measure(trial: Trial) -> Figures:
    """Half of what the seed says, or a quarter without flags."""
    rows = trial.write_rows(train=trial.data.train, test=trial.data.test)
    assert load_news(str(rows)).test.texts == trial.data.test.texts
    trial.output.mkdir()
    return {"accuracy": trial.seed / 2 if trial.flags else 0.25, "seconds": 3.0, "place": str(trial.output)}


def test_every_variant_is_measured_with_every_seed_and_its_model_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(
        "some",
        "What for?",
        "Some study",
        "{rows} of the {tests} rows of {name}, {seeds} seeds, {why}.",
        variants=lambda options: {"plain": (), "long": ("--long", options.long)},
        measure=measure,
        flags={"dataset": studies.dataset(), "rows": studies.number(7, "rows"), "long": {"default": "cut"}},
        words=lambda run: {"why": "for fun"},
        columns={"variant": studies.row_name, "%": studies.mean_percent("accuracy"), "s": studies.median_seconds},
    )
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["some", "--dataset", "sample", "--seeds", "2", "--output", str(page)])

    study.main()

    run = harness.read_results(page.with_suffix(".json"))
    assert [list(found) for found in run["rounds"]] == [["plain", "long"]] * 2
    assert not any(Path(figures["place"]).exists() for found in run["rounds"] for figures in found.values())
    text = page.read_text()
    assert text == study.page(run)
    assert "`python -m benchmarks.some`.\n7 of the 432 rows of sample, 2 seeds, for fun.\n" in text
    assert "| plain | 25.0 (25.0 to 25.0) | 3 (3 to 3) |\n| long | 25.0 (0.0 to 50.0) | 3 (3 to 3) |\n" in text
