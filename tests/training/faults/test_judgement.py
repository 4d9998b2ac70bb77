"""The judge of the faults: what it lets pass has kept what was promised."""

import json
from pathlib import Path

import pytest

from tests.training.faults.faults import Fault
from tests.training.faults.judgement import Reference, judge, lineage, state_of
from tests.training.faults.table import merge_ranks

STEPS = range(1, 7)


def _made_up(folder: Path, *starts: tuple[int, range, list[int]]) -> Path:
    """A finished run of one rank whose attempts did these steps, each after it had found these checkpoints."""
    (folder / "model.run").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    records = [{"kind": "step", "step": step} for step in STEPS]
    (folder / "model.run" / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    notes = []
    for restart, steps, saved in starts:
        (folder / f"attempt_0_{restart}").write_text(json.dumps({"injections": restart, "saved": saved}))
        place = {"launch": 0, "restart": restart, "world_size": 1, "first_step": steps[0]}
        notes += [place | {"time": 100 * restart + step, "step": step, "rows": [step]} for step in steps]
    (folder / "rows_0.jsonl").write_text("".join(f"{json.dumps(note)}\n" for note in notes))
    return folder


def _judged(folder: Path, second_start: int, *, damages_newest: bool = False) -> tuple[int, int, float]:
    """A run that was killed after step 5, with the checkpoints of steps 2 and 4, and began anew with this step."""
    untouched = _made_up(folder / "reference", (0, STEPS, []))
    reference = Reference(untouched, state_of(untouched), lineage(untouched))
    killed = _made_up(folder / "killed", (0, range(1, 6), []), (1, range(second_start, 7), [2, 4]))
    fault = Fault("killed", "", damages_newest=damages_newest)
    found = judge(fault, killed, [0], "", [5.5], reference)
    return found.lost, found.repeated, found.difference


def test_a_run_that_goes_on_from_its_newest_whole_checkpoint_passes(tmp_path: Path) -> None:
    assert _judged(tmp_path / "whole", 5) == (0, 0, 0.0)
    assert _judged(tmp_path / "damaged", 3, damages_newest=True) == (0, 0, 0.0)


@pytest.mark.parametrize("second_start", [1, 3, 6])
def test_a_run_that_goes_on_from_elsewhere_fails_though_its_weights_are_right(
    tmp_path: Path, second_start: int
) -> None:
    with pytest.raises(AssertionError, match=rf"start 0\.1 found step 4 and began with {second_start}$"):
        _judged(tmp_path, second_start)


def test_the_same_fault_on_either_rank_is_one_row_of_the_table() -> None:
    said = ("restarts", "restarted from step 4")
    rows = [(f"rank {rank} killed in a save", *said, f"5.{rank}") for rank in (0, 1)]
    of_rank_0 = ("rank 0 killed before a rename", *said, "4.0")

    assert merge_ranks([*rows, of_rank_0]) == [("either rank killed in a save", *said, "5.0 / 5.1"), of_rank_0]
