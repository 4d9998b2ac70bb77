"""A state is saved while training goes on, whole, by ranks that know of each other's failures."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import StorageWriter

from common.errors import TrainingFailure
from tests.processes import here, run_on_ranks
from tests.training.checkpointing.small_saves import ALONE, SAID, read_whole, save_now, saver_into
from tests.training.parallelism.cases import Case
from tests.training.parallelism.saved_states import whole_state
from tests.training.parallelism.small_runs import take_steps
from training.checkpointing.local_storage import LocalStorage
from training.checkpointing.ownership import Ownership
from training.checkpointing.resume import find_shared_damage, open_checkpoint
from training.checkpointing.saver import RETRY_SECONDS, Saver
from training.checkpointing.sharded import Staging
from training.distributed.failures import translate_errors
from training.parallelism.state import StrategyState

# One process saves as one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Tensors = dict[str, torch.Tensor]


def _state(value: float, numbers: int = 1000) -> StrategyState:
    tensors = {"model/weight": torch.full((numbers,), value), "model/bias": torch.full((numbers,), -value)}
    return StrategyState(tensors, {})


def _save_a_layout(folder: Path, fields: dict[str, Any], accumulation: int) -> tuple[Tensors, int, int]:
    """Saved: what all ranks hold together, this rank's bytes of it, and the bytes that it copied."""
    strategy = Case(0, {}, accumulation=accumulation).strategy(here(), **fields)
    take_steps(strategy, [1, 2], accumulation=accumulation)
    saver = saver_into(folder)
    path = save_now(saver, 2, strategy.state_dict())
    assert find_shared_damage(path, here()) is None
    copied = sum(copy.nbytes for copy in saver._staging.copies.values())
    saver.close()
    whole = whole_state(strategy, here()).tensors
    return (whole if here().is_first else {}), sum(t.nbytes for t in whole.values()), copied


LAYOUTS = [
    pytest.param(2, {"strategy": "ddp"}, 1, id="ddp"),
    pytest.param(3, {"strategy": "zero3"}, 1, id="zero3 on 3 ranks, uneven"),
    *(
        pytest.param(world_size, fields, accumulation, id=f"{fields} on {world_size}", marks=pytest.mark.slow)
        for world_size, fields, accumulation in [
            (3, {"strategy": "zero1"}, 1),
            (8, {"strategy": "3d", "pp": 2, "tp": 2}, 2),
            (8, {"strategy": "zero3"}, 1),
            (4, {"strategy": "zero3", "dp_shard": 2}, 1),
            (4, {"strategy": "3d", "tp": 2}, 1),
            (4, {"strategy": "3d", "tp": 2, "dp_shard": 1}, 1),
            (8, {"strategy": "3d", "tp": 2, "dp_shard": 2}, 1),
            (4, {"strategy": "pp"}, 4),
        ]
    ),
]


@pytest.mark.parametrize(("world_size", "fields", "accumulation"), LAYOUTS)
def test_every_layout_is_saved_whole_and_each_rank_writes_its_share_once(
    tmp_path: Path, world_size: int, fields: dict[str, Any], accumulation: int
) -> None:
    results = run_on_ranks(world_size, _save_a_layout, tmp_path, fields, accumulation)

    expected, num_bytes, _ = results[0]
    found = read_whole(f"{tmp_path}/step_00000002").tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    copied = [copied for _, _, copied in results]
    assert sum(copied) == num_bytes
    assert max(copied) <= 1.5 * num_bytes / world_size


class SlowStorage(LocalStorage):
    """A folder in which a save goes no further than its beginning until it is let; ``seen`` is the order of things."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.let = threading.Event()
        self.seen: list[str] = []

    def begin(self, step: int) -> None:
        self.let.wait()
        super().begin(step)

    def commit(self, step: int, files: dict[str, dict[str, Any]]) -> str:
        path = super().commit(step, files)
        self.seen.append(f"step {step} stands")
        return path

    def let_once_waited_for(self, thread: threading.Thread) -> None:
        """Let it go on when somebody waits for its thread, not before; ``waited``: how long that took, in seconds."""
        join = thread.join

        def joined(timeout: float | None = None) -> None:
            began = time.perf_counter()
            self.seen.append("waited for")
            self.let.set()
            join(timeout)
            self.waited = time.perf_counter() - began

        thread.join = joined


def test_what_training_changes_while_a_save_is_under_way_is_not_in_it(tmp_path: Path) -> None:
    storage, state = SlowStorage(tmp_path), _state(1.0)
    saver = saver_into(storage, ALONE)

    saver.save(1, lambda: state, {"step": 1}, None)
    for tensor in state.tensors.values():
        tensor.fill_(9.0)
    was_under_way = not saver.done and not storage.steps()
    storage.let.set()
    [saved] = saver.wait()

    assert was_under_way
    assert saved.step == 1
    assert saved.num_bytes == sum(file["bytes"] for file in _manifest(tmp_path, 1)["files"].values())
    found = read_whole(f"{tmp_path}/step_00000001").model
    assert found["weight"].unique().tolist() == [1.0]
    assert found["bias"].unique().tolist() == [-1.0]


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"step_{step:08d}" / "manifest.json").read_text())


def test_a_save_that_finds_another_under_way_waits_for_it(tmp_path: Path) -> None:
    storage = SlowStorage(tmp_path)
    saver = saver_into(storage, ALONE)
    saver.save(1, lambda: _state(1.0), {}, None)
    storage.let_once_waited_for(saver._thread)

    def copied() -> StrategyState:
        storage.seen.append("step 2 is copied")
        return _state(2.0)

    finished = saver.save(2, copied, {}, None)

    storage.let.set()
    assert [saved.step for saved in finished] == [1]
    assert finished[0].blocked_seconds >= storage.waited
    assert [saved.step for saved in saver.wait()] == [2]
    assert storage.seen == ["waited for", "step 1 stands", "step 2 is copied", "step 2 stands"]


def test_staging_buffers_are_reused_and_freed(tmp_path: Path) -> None:
    saver = saver_into(tmp_path, ALONE)
    save_now(saver, 1, _state(1.0))
    rooms = {copy.data_ptr() for copy in saver._staging.copies.values()}

    more = StrategyState(_state(2.0).tensors | {"optimizer/weight/step": torch.tensor(2.0)}, {})
    path = save_now(saver, 2, more)

    assert rooms < {copy.data_ptr() for copy in saver._staging.copies.values()}
    assert read_whole(path).tensors["optimizer/weight/step"] == 2.0
    save_now(saver, 3, _state(3.0))
    assert len(saver._staging.copies) == 2
    saver.release()
    assert saver._staging.copies == {}


def test_plain_values_are_saved_beside_the_tensors_and_every_file_is_in_the_manifest(tmp_path: Path) -> None:
    state = StrategyState({"model/weight": torch.ones(3)}, {"loss_scale": {"scale": 2.0}})
    path = save_now(saver_into(tmp_path, ALONE), 7, state, data_key="k")

    opened = open_checkpoint(path, ALONE)

    assert opened.state == {"step": 7, "data_key": "k", "strategy": {"loss_scale": {"scale": 2.0}}}
    assert opened.tensors.plain == {"loss_scale": {"scale": 2.0}}
    assert set(_manifest(tmp_path, 7)["files"]) == {"__0_0.distcp", ".metadata", "state.json"}
    assert sorted(file.name for file in Path(path).iterdir()) == [
        *(".metadata", "__0_0.distcp", "manifest.json", "state.json")
    ]


def test_no_thread_is_left_when_a_saver_is_closed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    storage = SlowStorage(tmp_path)
    saver = saver_into(storage, ALONE)
    saver.save(1, lambda: _state(1.0), {}, None)
    storage.let_once_waited_for(saver._thread)

    saver.close()

    assert all(thread.name != "checkpoint" for thread in threading.enumerate())
    assert list(storage.steps()) == [1]


def _files_may_have(num_bytes: int) -> None:
    """Of this process alone: a write beyond them fails, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def _hear(saver: Saver) -> list[int]:
    """Go on until all ranks know how the save ended, as training does; returns the steps that stand."""
    while here().sum_(torch.tensor(float(saver.done))) < here().world_size:
        time.sleep(0.001)
    return [saved.step for saved in saver.collect()]


def _fail_on_rank_1(folder: Path) -> dict[str, Any]:
    saver, heard = saver_into(folder), []
    save_now(saver, 1, _state(1.0, 1_000_000))
    if here().rank == 1:
        _files_may_have(100_000)
    saver.save(2, lambda: _state(2.0, 1_000_000), {"step": 2}, None)
    heard.append(_hear(saver))
    stands = sorted(path.name for path in folder.iterdir())
    saver.retry_seconds = 0.0
    due = saver.retry_due
    _files_may_have(resource.RLIM_INFINITY)
    saver.retry()
    heard.append(_hear(saver))
    return {"heard": heard, "said": list(SAID), "stands": stands, "due": due}


def test_a_full_disk_on_one_rank_is_reported_in_one_line_and_the_save_retried(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, _fail_on_rank_1, tmp_path)

    assert first["heard"] == second["heard"] == [[], [2]]
    assert first["stands"] == ["latest", "step_00000001"]
    [line] = first["said"]
    where = f"the checkpoint of step 2 could not be written to {tmp_path}"
    assert line.startswith(f"Training continues, but {where} (rank 1: File too large)")
    assert line.endswith("; attempt 1 of 3, the next within a minute")
    assert (first["due"], second["due"]) == (True, False), "rank 0's clock counts"
    assert read_whole(f"{tmp_path}/step_00000002").model["weight"].unique().tolist() == [2.0]


class UnwritableOnce(LocalStorage):
    """A folder whose first save fails on this rank with an error of a driver, which cannot be pickled."""

    def __init__(self, folder: Path, method: str) -> None:
        super().__init__(folder)
        self.fails_in = method

    def _fail(self) -> NoReturn:
        self.fails_in = ""
        error = RuntimeError("the connection broke")
        error.connection = threading.Lock()
        raise error

    def writer(self, step: int) -> StorageWriter:
        if self.fails_in == "writer":
            self._fail()
        writer = super().writer(step)
        if self.fails_in:
            setattr(writer, self.fails_in, lambda *arguments, **named: self._fail())
        return writer


def _fail_in(method: str, failing: int, folder: Path) -> tuple[list[list[int]], str]:
    saver = saver_into(UnwritableOnce(folder, method if here().rank == failing else ""))
    saver.save(1, lambda: _state(1.0), {"step": 1}, None)
    heard = [_hear(saver)]
    saver.retry()
    return [*heard, _hear(saver)], " ".join(SAID)


@pytest.mark.parametrize(("method", "failing"), [("writer", 1), ("write_data", 1), ("finish", 0)])
def test_all_ranks_learn_of_an_error_anywhere_in_a_save_and_the_retry_works(
    tmp_path: Path, method: str, failing: int
) -> None:
    (heard, said), (same, _) = run_on_ranks(2, _fail_in, method, failing, tmp_path, seconds=20)

    assert heard == same == [[], [1]]
    assert f"(rank {failing}: the connection broke)" in said
    assert read_whole(f"{tmp_path}/step_00000001").model["weight"].unique().tolist() == [1.0]


def _never_succeed(folder: Path) -> tuple[str, bool]:
    saver = saver_into(folder, retry_seconds=0.0)
    with pytest.raises(TrainingFailure) as failure:
        save_now(saver, 1, _state(1.0))
    saver.close()
    return str(failure.value), failure.value.quiet


def test_the_third_failure_in_a_row_ends_the_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    (line, first_quiet), (same, second_quiet) = run_on_ranks(2, _never_succeed, tmp_path / "file" / "checkpoints")

    assert line == same
    assert "(rank 0: Not a directory" in line
    assert "3 times in a row" in line
    assert (first_quiet, second_quiet) == (False, True)


class FullOnce(LocalStorage):
    """A folder that has no room for the first save."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tried: list[float] = []  # when

    def begin(self, step: int) -> None:
        self.tried.append(time.monotonic())
        if len(self.tried) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().begin(step)


def test_a_last_save_that_keeps_failing_counts_its_attempts_and_ends_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    saver = saver_into(tmp_path / "file" / "checkpoints", ALONE, retry_seconds=0.0)
    saver.save(1, lambda: _state(1.0), {}, None)

    with pytest.raises(TrainingFailure, match="3 times in a row; there is no earlier checkpoint: free some space"):
        saver.wait()

    assert [line.partition("; ")[2] for line in SAID] == [
        "attempt 1 of 3, the next in 0 s",
        "attempt 2 of 3, the next in 0 s",
    ]
    assert all(line.startswith("Waiting, because the checkpoint of step 1 could not be written") for line in SAID)


def test_tensors_on_the_cpu_are_copied_without_touching_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: pytest.fail("this makes a context on GPU 0"))
    tensors = _state(1.0).tensors

    Staging().take(tensors, Ownership(ALONE).pieces(tensors))


def test_waiting_for_a_failed_save_allows_a_short_outage_to_pass(
    tmp_path: Path,
) -> None:
    storage, looked = FullOnce(tmp_path), []  # at the clock, in the pause
    saver = saver_into(
        storage, ALONE, stop_agreed=lambda: looked.append(time.perf_counter()) is not None, retry_seconds=0.3
    )
    saver.save(1, lambda: _state(1.0), {}, None)

    [saved] = saver.wait()

    failed, again = storage.tried
    assert again - failed >= 0.3
    assert saved.blocked_seconds >= looked[-1] - looked[0], "the pause counts"


def _wait_until_rank_1_is_asked_to_stop(folder: Path) -> tuple[list[int], int]:
    asked: list[bool] = []

    def stop_agreed() -> bool:
        asked.append(here().rank == 1 and len(asked) == 1)
        return here().any(asked[-1])

    saver = saver_into(FullOnce(folder), stop_agreed=stop_agreed)
    saver.save(1, lambda: _state(1.0), {}, None)
    return [saved.step for saved in saver.wait()], len(asked)


def test_a_stop_asked_of_one_rank_ends_the_pause_before_the_next_try_on_all(tmp_path: Path) -> None:
    assert run_on_ranks(2, _wait_until_rank_1_is_asked_to_stop, tmp_path, seconds=20) == [([1], 2)] * 2


def test_a_run_asked_to_stop_tries_its_failed_save_again_at_once(
    train_here: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, begin = [], LocalStorage.begin

    def failing_once(storage: LocalStorage, step: int) -> None:
        tried.append(time.monotonic())
        if len(tried) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            raise OSError(errno.ENOSPC, "No space left on device")
        begin(storage, step)

    monkeypatch.setattr(LocalStorage, "begin", failing_once)

    assert train_here("--epochs", "1", "--batch_size", "8", "--output_dir", tmp_path / "model") == 0

    failed, again = tried
    assert again - failed < RETRY_SECONDS
    assert (tmp_path / "model.run/checkpoints/step_00000008/manifest.json").exists()


def test_a_failed_save_of_the_best_step_is_written_before_the_next_overwrites_its_copy(
    tmp_path: Path,
) -> None:
    saver = saver_into(FullOnce(tmp_path), ALONE, retry_seconds=0.0)
    saver.save(1, lambda: _state(1.0), {}, 1)

    finished = saver.save(2, lambda: _state(2.0), {}, 1)

    assert [saved.step for saved in finished] == [1]
    assert [saved.step for saved in saver.wait()] == [2]
    for step in (1, 2):
        assert read_whole(f"{tmp_path}/step_{step:08d}").model["weight"].unique().tolist() == [float(step)]


class LeavingStorage(LocalStorage):
    """A folder whose writer goes away in the middle of a save."""

    saver: Saver

    def writer(self, step: int) -> NoReturn:
        dist.destroy_process_group(self.saver.group)
        self.saver.group = None
        raise SystemExit


def _leave_in_the_middle(folder: Path) -> str:
    storage = LeavingStorage(folder) if here().rank == 1 else LocalStorage(folder)
    saver = saver_into(storage)
    storage.saver = saver
    saver.save(1, lambda: _state(1.0), {}, None)
    if here().rank == 1:
        saver._thread.join()
        return ""
    with pytest.raises(TrainingFailure) as failure, translate_errors(here(), 2):
        saver.wait()
    saver.close()
    return str(failure.value)


def test_a_rank_that_goes_away_in_the_middle_of_a_save_ends_the_run_in_one_line(tmp_path: Path) -> None:
    line, _ = run_on_ranks(2, _leave_in_the_middle, tmp_path)

    assert line.startswith("rank 0: another rank went away at step 2")
    assert not list(tmp_path.glob("step_*"))
