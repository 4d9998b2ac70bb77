"""The newest whole checkpoint is found by all ranks together, and each reads its own part of it."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from tests.training.checkpointing.small_saves import ALONE, save_now, saver_into
from tests.training.parallelism.cases import Case
from tests.training.parallelism.ranks import here, run_on_ranks
from tests.training.parallelism.small_runs import take_steps
from training.checkpointing import open_location
from training.checkpointing.resume import find_shared_damage, newest_checkpoint, open_checkpoint
from training.errors import UserError
from training.parallelism.state import StrategyState

# One process saves as one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = StrategyState({"model/weight": torch.arange(12.0).view(3, 4), "model/bias": torch.ones(5)}, {})


def _flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of steps 1, 2 and 3."""
    saver = saver_into(tmp_path, ALONE)
    saver.config = saver.config.model_copy(update={"keep_last": 9})
    for step in (1, 2, 3):
        save_now(saver, step, STATE)
    return tmp_path


def test_the_newest_whole_one_is_taken_with_a_line_for_each_one_passed_over(saved: Path) -> None:
    _flip_a_bit(saved / "step_00000003" / "__0_0.distcp")
    (saved / "step_00000002" / "manifest.json").unlink()
    said: list[str] = []

    found = newest_checkpoint(ALONE, open_location(str(saved)), said.append)

    assert found == f"{saved}/step_00000001"
    assert said == [
        f"Skipping the damaged checkpoint {saved}/step_00000003: __0_0.distcp does not match its SHA-256",
        f"Skipping the damaged checkpoint {saved}/step_00000002: manifest.json is missing",
    ]


def test_where_none_is_whole_the_run_is_refused_and_nothing_is_moved(saved: Path) -> None:
    for file in saved.glob("step_*/state.json"):
        file.unlink()
    before = sorted(saved.rglob("*"))

    with pytest.raises(UserError, match=r"none of the 3 checkpoints in .* is whole; use --resume none"):
        newest_checkpoint(ALONE, open_location(str(saved)), lambda line: None)

    assert sorted(saved.rglob("*")) == before


def test_where_nothing_was_saved_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert newest_checkpoint(ALONE, open_location(str(tmp_path / "none")), pytest.fail) is None


def test_a_checkpoint_at_an_address_is_opened_as_one_in_a_folder_is() -> None:
    storage = open_location(f"memory://bucket-{uuid.uuid4().hex}/run")
    path = save_now(saver_into(storage, ALONE), 4, STATE)

    opened = open_checkpoint(path, ALONE)
    weight = torch.zeros(3, 4)
    opened.tensors.read({"model/weight": weight})

    assert opened.state["step"] == 4
    assert torch.equal(weight, STATE.tensors["model/weight"])


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"model/other": torch.zeros(3)}, "Missing key in checkpoint state_dict: model/other"),
        ({"model/weight": torch.zeros(3, 5)}, "Size mismatch between saved"),
    ],
)
def test_a_state_that_does_not_fit_the_model_is_refused_in_one_line(
    saved: Path, wanted: dict[str, torch.Tensor], reason: str
) -> None:
    tensors = open_checkpoint(f"{saved}/step_00000003", ALONE).tensors

    with pytest.raises(UserError, match=rf"^checkpoint {saved}/step_00000003: cannot be read \({reason}.*\)$"):
        tensors.read(wanted)


def _damage_of_two(folder: Path) -> list[str | None]:
    saver, state = saver_into(folder), StrategyState({f"model/{i}": torch.full((100,), i) for i in range(9)}, {})
    paths = [save_now(saver, step, state) for step in (1, 2)]
    saver.close()
    if here().is_first:
        _flip_a_bit(Path(paths[1], "__2_0.distcp"))
    here().barrier()
    return [find_shared_damage(path, here()) for path in paths]


def test_ranks_share_the_hashing_and_all_hear_of_what_one_finds(tmp_path: Path) -> None:
    assert run_on_ranks(3, _damage_of_two, tmp_path) == [[None, "__2_0.distcp does not match its SHA-256"]] * 3


LAYOUTS = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero3": {"strategy": "zero3"},
    "copied": {"strategy": "zero3", "dp_shard": 2},
    "pp": {"strategy": "pp"},
    "3d": {"strategy": "3d", "tp": 2},
}


def _go_from_layout_to_layout(folder: Path, names: list[str]) -> tuple[list[float], list[float]] | None:
    """The losses of a run that goes through checkpoints, a step on each layout; and those of one process."""
    case, path, losses = Case(4, {}, accumulation=4), None, []
    for step, name in enumerate(names, start=1):
        strategy = case.strategy(here(), **LAYOUTS[name])
        if path:
            strategy.load_state_dict(open_checkpoint(path, here()).tensors)
        losses += take_steps(strategy, [step], accumulation=case.accumulation)
        saver = saver_into(folder)
        path = save_now(saver, step, strategy.state_dict())
        saver.close()
    if not here().is_first:
        return None
    alone = case.strategy(ALONE)
    return losses, take_steps(alone, range(1, len(names) + 1), accumulation=case.accumulation, ranks=ALONE)


@pytest.mark.parametrize(
    "names",
    [
        ["ddp", "3d", "zero3"],
        pytest.param(["zero1", "copied", "pp", "zero1", "3d", "copied", "ddp"], marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_from_layout_to_layout_through_its_checkpoints(tmp_path: Path, names: list[str]) -> None:
    losses, expected = run_on_ranks(4, _go_from_layout_to_layout, tmp_path, names)[0]

    assert losses == pytest.approx(expected, rel=1e-5)
