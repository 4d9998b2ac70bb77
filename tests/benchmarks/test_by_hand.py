"""The page of data parallelism by hand says what its rounds say, and its ways differ in communication alone."""

import sys
from typing import Any

import pytest

from benchmarks.by_hand import run_and_follow, step_rows
from benchmarks.by_hand_worker import measure
from tests.training.parallelism.ranks import here, run_on_ranks
from training.errors import TrainingFailure

SILENT = {"seconds": [0.1, 0.1, 0.1], "profile": {"calls": 0.0, "seconds": 0.0, "hidden": 0.0}, "gap": 0.1}


def measured(seconds: list[float], gap: float = 0.0) -> dict[str, Any]:
    return {"seconds": seconds, "profile": {"calls": 11.0, "seconds": 0.02, "hidden": 0.25}, "gap": gap}


def _measure() -> dict[str, dict[str, Any]]:
    return measure(here(), width=8, rows=4, rounds=2, steps=2)


def test_a_row_has_the_slower_rank_of_each_round_and_the_ratio_within_rounds() -> None:
    ranks = [
        {"no communication": SILENT, "by hand": measured([0.1, 0.2, 0.4]), "DDP": measured([0.1, 0.1, 0.1])},
        {"no communication": SILENT, "by hand": measured([0.2, 0.1, 0.3]), "DDP": measured([0.1, 0.2, 0.3], gap=2e-7)},
    ]

    silent, by_hand, ddp = step_rows(ranks)

    assert silent == ["no communication", "0", "100.0", "100.0 to 100.0", "1.00", "0.50", "0.0", "–", "1e-01"]
    assert by_hand == ["by hand", "11", "200.0", "200.0 to 400.0", "2.00", "1.00", "20.0", "25%", "0e+00"]
    assert ddp == ["DDP", "11", "200.0", "100.0 to 300.0", "2.00", "0.75", "20.0", "25%", "2e-07"]


def test_all_ways_but_the_silent_one_end_with_the_same_weights_after_other_numbers_of_calls() -> None:
    for found in run_on_ranks(2, _measure):
        assert all(len(way["seconds"]) == 2 for way in found.values())
        calls = {name: way["profile"]["calls"] for name, way in found.items()}
        assert calls == {
            "no communication": 0,
            "by hand": 11,
            "by hand, in one call": 1,
            "DDP, one bucket": 1,
            "DDP": 1,
        }
        assert found["no communication"]["gap"] > 1e-4
        assert all(way["gap"] < 1e-6 for name, way in found.items() if name != "no communication")


def test_the_last_epoch_of_a_training_is_read_and_one_that_fails_is_no_measurement(
    capfd: pytest.CaptureFixture[str],
) -> None:
    say = "print('epoch {}/2  loss 1.5000  test accuracy 6{}.25%  1m 10s')".format
    last = run_and_follow([sys.executable, "-c", f"{say(1, 1)}; {say(2, 2)}"])

    assert last == {"epoch": "2", "loss": "1.5000", "accuracy": "62.25"}
    for code in ("pass", f"{say(1, 1)}; raise SystemExit(3)"):
        with pytest.raises(TrainingFailure, match=r"train_cifar10\.py ended with code"):
            run_and_follow([sys.executable, "-c", code])
