"""The newest whole checkpoint is found by all ranks together, and each reads its own part of it."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.errors import TrainingFailure, UserError
from tests.processes import here, run_on_ranks
from tests.training.checkpointing.small_saves import ALONE, save_now, saver_into
from tests.training.parallelism.cases import Case
from tests.training.parallelism.small_runs import take_steps
from training.checkpointing import open_location, open_storage
from training.checkpointing.local_storage import LocalStorage
from training.checkpointing.resume import (
    Resumed,
    find_resume_point,
    find_shared_damage,
    newest_checkpoint,
    open_checkpoint,
)
from training.config import TrainConfig
from training.data.batching import DataShard
from training.distributed.ranks import Ranks
from training.distributed.restarts import begin
from training.parallelism.state import StrategyState
from training.run.finish import _load_best_or_fail

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


def test_an_empty_folder_has_no_newest_checkpoint(tmp_path: Path) -> None:
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


def test_ranks_share_the_hashing_and_all_learn_of_damage(tmp_path: Path) -> None:
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
        ["ddp", "3d", "pp", "zero3"],
        pytest.param(["zero1", "copied", "pp", "zero1", "3d", "copied", "ddp"], marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_from_layout_to_layout_through_its_checkpoints(tmp_path: Path, names: list[str]) -> None:
    losses, expected = run_on_ranks(4, _go_from_layout_to_layout, tmp_path, names)[0]

    assert losses == pytest.approx(expected, rel=1e-5)


def _config(folder: Path, resume: str = "auto") -> TrainConfig:
    return TrainConfig(output_dir=folder / "model", resume=resume)


def _save_run(place: Path, *steps: int) -> str:
    """Checkpoints of one run; returns the path of the last."""
    saver, config = saver_into(place, ALONE), TrainConfig()
    saver.config = config.model_copy(update={"keep_last": 9})
    run = {"config": config.model_dump(mode="json"), "global_batch_size": config.batch_size, "data_key": "texts"}
    run["epochs"] = []
    return [save_now(saver, step, STATE, **run) for step in steps][-1]


def _find(config: TrainConfig, ranks: Ranks = ALONE) -> Resumed | None:
    sources = {"data_key": "texts", "frozen_hash": None, "teacher_key": None}
    return find_resume_point(config, ranks, DataShard(0, 1), open_storage(config), sources, lambda line: None)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "model.run/checkpoints").glob("step_*"))


def _begin(launch: Path) -> None:
    """Be in a later attempt of a launcher whose first has begun."""
    launch.mkdir()
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(launch / "attempt_1/0/error.json")
    begin()


@pytest.fixture
def later_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is of a launcher's later attempt."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    _begin(tmp_path / "launch")


@pytest.mark.usefixtures("later_attempt")
def test_a_later_attempt_resumes_from_what_was_saved_since_a_named_checkpoint(tmp_path: Path) -> None:
    named = _save_run(tmp_path / "archive", 5)
    _save_run(tmp_path / "model.run/checkpoints", 3)
    before = _find(_config(tmp_path, named))
    _save_run(tmp_path / "model.run/checkpoints", 7, 9)

    after = _find(_config(tmp_path, named))

    assert (before.path, before.state["step"]) == (named, 5)
    assert (Path(after.path).name, after.state["step"]) == ("step_00000009", 9)
    assert _names(tmp_path) == ["step_00000003", "step_00000007", "step_00000009"]


@pytest.mark.parametrize("place", ["archive", "link"])
def test_checkpoints_after_a_named_one_are_moved_aside_wherever_that_one_is(tmp_path: Path, place: str) -> None:
    _save_run(tmp_path / "archive", 5)
    own = tmp_path / "model.run/checkpoints"
    _save_run(own, 3, 5, 7)
    (tmp_path / "link").symlink_to(own)

    resumed = _find(_config(tmp_path, str(tmp_path / place / "step_00000005")))

    assert resumed.state["step"] == 5
    assert _names(tmp_path) == ["step_00000003", "step_00000005", "step_00000007.1"]


def test_a_run_folder_that_cannot_be_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.run/.lock").mkdir(parents=True)

    with pytest.raises(UserError, match=r"model\.run: cannot be written \(Is a directory\); use another --output_dir$"):
        _find(_config(tmp_path))


class GoneStorage(LocalStorage):
    """A storage that has stopped answering."""

    def steps(self) -> dict[int, str]:
        raise ConnectionError("no route to host")


def _what_one_rank_knows(folder: Path) -> list[str]:
    """What this rank comes to where ranks differ: an attempt, a folder, a storage."""
    ranks, said = here(), []
    if ranks.rank == 1:
        _begin(folder / "launch")
    resumed = _find(_config(folder, "none"), ranks)
    said.append(Path(resumed.path).name if resumed else "anew")
    named = resumed.path if ranks.is_first else str(folder / "elsewhere")
    try:
        _find(_config(folder, named), ranks)
    except UserError as error:
        said.append(str(error))
    trainer = SimpleNamespace(ranks=ranks, state=None, storage=GoneStorage(folder / "model.run/checkpoints"))
    try:
        _load_best_or_fail(trainer)
    except TrainingFailure as error:
        said.append(str(error))
    return said


def test_all_ranks_agree_on_what_only_one_of_them_can_see(tmp_path: Path) -> None:
    _save_run(tmp_path / "model.run/checkpoints", 5)

    first, second = run_on_ranks(2, _what_one_rank_knows, tmp_path)

    assert first == second
    began, unseen, gone = first
    assert began == "step_00000005"
    assert unseen.startswith(f"rank 1: --resume {tmp_path}/elsewhere: no such folder on {socket.gethostname()}; ")
    assert gone.endswith("/checkpoints: does not answer (no route to host); rerun the same command when it does")
