"""The figures of data parallelism by hand are those of its rounds, and its variants differ only in communication."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import profile

from benchmarks import by_hand
from benchmarks.by_hand import (
    Case,
    conclusion,
    endless_batches,
    measure,
    profiled,
    run_and_follow,
    step_table,
    variants_of,
)
from common.errors import TrainingFailure, run_command
from learn.by_hand.cnn import CNN
from tests.processes import here, run_on_ranks

LATE = 0.5  # seconds
NO_CALLS = {"calls": 0.0, "seconds": 0.0, "hidden": 0.0}
SILENT = {"seconds": [0.1, 0.1, 0.1], "profiles": [NO_CALLS] * 3, "gap": 0.1}


def small() -> CNN:
    return CNN(width=8)


def measured(seconds: list[float], gap: float = 0.0, calls: float = 11.0, in_calls: float = 0.02) -> dict[str, Any]:
    profiles = [{"calls": calls, "seconds": factor * in_calls, "hidden": 0.25} for factor in (1, 1, 5)]
    return {"seconds": seconds, "profiles": profiles, "gap": gap}


def _measure() -> dict[str, dict[str, Any]]:
    return measure(here(), Case(small, rows=4), rounds=2, steps=2)


class _LateOnRank1(profile):
    """A profiler that takes long to start."""

    def __enter__(self) -> profile:
        entered = super().__enter__()
        time.sleep(LATE * here().rank)
        return entered


def _profiled_by_hand() -> float:
    """Seconds in calls of two steps of which rank 1 begins late."""
    by_hand.profile = _LateOnRank1
    batches = endless_batches(here(), rows=4)
    return 2 * profiled(variants_of(Case(small, rows=4))["by hand"], [next(batches), next(batches)], here())["seconds"]


def test_a_row_has_the_slower_rank_of_each_round_and_the_ratio_within_rounds() -> None:
    ranks = [
        {"no communication": SILENT, "by hand": measured([0.1, 0.2, 0.4]), "DDP": measured([0.1, 0.1, 0.1])},
        {"no communication": SILENT, "by hand": measured([0.2, 0.1, 0.3]), "DDP": measured([0.1, 0.2, 0.3], gap=2e-7)},
    ]

    lines = step_table(ranks).splitlines()[2:]
    silent, by_hand, ddp = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)

    assert silent == ["no communication", "0", "100.0", "100.0 to 100.0", "1.00", "0.50", "0.0", "–", "1e-01"]
    assert by_hand == ["by hand", "11", "200.0", "200.0 to 400.0", "2.00", "1.00", "20.0", "25%", "0e+00"]
    assert ddp == ["DDP", "11", "200.0", "100.0 to 300.0", "2.00", "0.75", "20.0", "25%", "2e-07"]


@pytest.mark.parametrize(
    ("ddp", "buckets", "said"),
    [
        ([0.1, 0.1, 0.1], 4, "DDP's 4 buckets take 0.50 times as long as one bucket (faster in 3 of 3 rounds: a gain)"),
        ([0.1, 0.3, 0.3], 4, "1.50 times as long as one bucket (faster in 1 of 3 rounds: no clear gain or loss)"),
        ([0.3, 0.3, 0.2], 2, "DDP's 2 buckets take 1.50 times as long as one bucket (faster in 0 of 3 rounds: a loss)"),
        ([0.1, 0.1, 0.1], 1, "Overlap: none is possible, because DDP has only one bucket too."),
    ],
)
def test_the_conclusion_is_that_of_the_rounds(ddp: list[float], buckets: int, said: str) -> None:
    rank = {
        "no communication": SILENT,
        "by hand": measured([0.4, 0.4, 0.4]),
        "by hand, in one call": measured([0.2, 0.2, 0.2], calls=1),
        "DDP, one bucket": measured([0.2, 0.2, 0.2], calls=1),
        "DDP": measured(ddp, calls=buckets),
    }

    found = conclusion([rank, rank])

    assert "one call takes 0.50 times as long as 11 calls (faster in 3 of 3 rounds: a gain)" in found
    assert said in found


@pytest.mark.slow
def test_a_profile_begins_once_all_ranks_have_arrived() -> None:
    assert max(run_on_ranks(2, _profiled_by_hand)) < LATE


def test_a_path_without_images_ends_it_before_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(by_hand, "run_ranks", lambda *_, **__: pytest.fail("a rank was started"))
    monkeypatch.setattr(sys, "argv", ["by_hand", "--cifar10", str(tmp_path / "gone")])

    with pytest.raises(SystemExit) as ended:
        run_command(by_hand.main)

    assert ended.value.code == 2
    assert "gone: no such file or folder" in capsys.readouterr().err


@pytest.mark.slow
def test_all_variants_that_communicate_end_with_the_same_weights_after_different_numbers_of_calls() -> None:
    for found in run_on_ranks(2, _measure):
        assert all(len(way["seconds"]) == 2 for way in found.values())
        assert all(len(way["profiles"]) == 2 for way in found.values())
        calls = {name: way["profiles"][0]["calls"] for name, way in found.items()}
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
