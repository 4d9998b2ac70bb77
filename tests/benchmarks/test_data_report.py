"""The benchmark of the data report: what it plants are the faults that it says, and no others."""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path

from benchmarks.data_report import changed, judge, similarity, write_rows
from common.rows import SAMPLE_NEWS
from training.config import FAULTS, TrainConfig
from training.data.dataset import load_data
from training.data.duplicates import LEAST_SIMILARITY
from training.data.report import measure_files


def test_all_planted_faults_are_found_and_nothing_else(tmp_path: Path) -> None:
    options = Namespace(seed=3, rows=1600, planted=20)

    planted, (num_train, num_test), num_made = write_rows(load_data(str(SAMPLE_NEWS)), options, tmp_path)
    figures = measure_files(TrainConfig(dataset=str(tmp_path), model="tiny"), lambda line: None)

    assert figures["rows"] == {"training": num_train, "test": num_test}
    assert num_train >= 1600 > num_train - num_made
    found = {fault: judge(figures[fault]["rows"], planted[fault], fault) for fault in FAULTS}
    assert {fault: len(rows) for fault, rows in planted.items()} == dict.fromkeys(FAULTS, 20)
    for figure in found.values():
        assert (figure["equal"], figure["near"], figure["precision"]) == (1, 1, 1)
    # A planted conflict repeats a text too.
    assert (found["leakage"]["found"], found["conflicts"]["found"], found["duplicates"]["found"]) == (20, 20, 40)


def test_changed_texts_are_equal_or_near_but_never_the_same(tmp_path: Path) -> None:
    import numpy as np

    draw = np.random.default_rng(0)
    with (SAMPLE_NEWS / "train.csv").open(encoding="utf-8", newline="") as file:
        texts = [" ".join(" ".join(row[1:]).split()) for row in csv.reader(file)][:50]

    for text in (text for text in texts if len(text.split()) >= 12):
        equal, near = changed(text, "equal", draw), changed(text, "near", draw)
        assert equal != text
        assert " ".join(equal.casefold().split()) == " ".join(text.casefold().split())
        assert near.casefold() != text.casefold()
        assert similarity(text, near) >= LEAST_SIMILARITY
