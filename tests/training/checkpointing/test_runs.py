"""Runs that are told where their checkpoints lie, when they are made and which stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common.files import lock_run_folder
from tests.training.checkpointing.saves import names_in

# One epoch of 8 steps, each of which is due to be saved by the clock.
EVERY_STEP = ("--epochs", 1, "--batch_size", 8, "--save_every", 0, "--save_minutes", 1e-6, "--keep_last", 1)


@pytest.mark.slow
def test_a_run_saves_by_the_clock_at_an_address_and_keeps_the_milestones(
    train_here: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    flags = (*EVERY_STEP, "--keep_every", 3, "--checkpoint_dir", "memory://clock/run", "--output_dir")

    assert train_here(*flags, tmp_path / "model") == 0

    kept = ["latest", "step_00000003", "step_00000006", "step_00000008"]
    assert names_in("memory://clock/run") == kept
    assert not (tmp_path / "model.run/checkpoints").exists()
    events = map(json.loads, (tmp_path / "model.run/events.jsonl").read_text().splitlines())
    assert [event["step"] for event in events if event["kind"] == "checkpoint"] == list(range(1, 9))
    capfd.readouterr()
    assert train_here(*flags, tmp_path / "model") == 0
    assert "Resuming from memory://clock/run/step_00000008 " in capfd.readouterr().out


def test_a_second_run_into_the_same_place_is_refused_in_one_line(
    train_here: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = tmp_path / "shared"
    place.mkdir()

    with lock_run_folder(place):
        code = train_here(*EVERY_STEP, "--checkpoint_dir", place, "--output_dir", tmp_path / "model")

    assert code == 2
    assert capfd.readouterr().err.splitlines() == [
        f"error: {place}: another run is training into this folder; use another --checkpoint_dir [folder-in-use]"
    ]
