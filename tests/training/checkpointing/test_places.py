"""A place that cannot take checkpoints is refused at the start, in one line; one that fills up loses none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from tests.processes import here, wait_until
from tests.training.checkpointing.crash_points import ALONE
from tests.training.checkpointing.saves import names_in, newest_whole, save
from training.checkpointing import Storage, check_storage, open_location, open_storage
from training.checkpointing.saver import Saver
from training.config import TrainConfig
from training.parallelism.state import StrategyState


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory on a folder; the test is skipped where one may not mount."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root and the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_checkpoints_are_in_the_run_folder_unless_another_location_is_given(tmp_path: Path) -> None:
    output = tmp_path / "model"

    assert open_storage(TrainConfig(output_dir=output)).location == f"{output}.run/checkpoints"
    assert open_storage(TrainConfig(output_dir=output, checkpoint_dir="/elsewhere")).location == "/elsewhere"
    assert open_storage(TrainConfig(output_dir=output, checkpoint_dir="file:///elsewhere")).location == "/elsewhere"
    assert open_storage(TrainConfig(output_dir=output, checkpoint_dir="memory://b/c/")).location == "memory://b/c"


def test_no_record_has_the_password_of_the_address_of_checkpoints() -> None:
    config = TrainConfig(checkpoint_dir="memory://user:pw@host/run")
    assert config.model_dump(mode="json")["checkpoint_dir"] == "memory://host/run"
    assert "pw" not in config.to_yaml()
    assert open_storage(config).location == "memory://host/run"


@pytest.mark.parametrize("inside", ["model", "model/checkpoints"])
def test_a_place_that_the_finished_model_would_replace_is_refused(tmp_path: Path, inside: str) -> None:
    with pytest.raises(UserError, match=r"--checkpoint_dir .*: is in --output_dir .*; name another folder"):
        TrainConfig(output_dir=tmp_path / "model", checkpoint_dir=str(tmp_path / inside))


@pytest.mark.parametrize("flag", ["model", "dataset", "distill_texts", "class_weights"])
def test_what_a_run_reads_is_not_replaced_by_what_it_writes(tmp_path: Path, flag: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "rows.csv").touch()
    values = {"distill": "teacher", "dataset": "elsewhere", flag: str(tmp_path / "model" / "rows.csv")}
    with pytest.raises(UserError, match=rf"--{flag} .*: is in --output_dir .*, which the finished model replaces"):
        TrainConfig(output_dir=tmp_path / "model", **values)


def test_the_output_is_a_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert TrainConfig(output_dir="~/model").output_dir == Path("/home/somebody/model")
    with pytest.raises(UserError, match="must be a folder of this machine"):
        TrainConfig(output_dir="s3://bucket/model")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nonsense://bucket/run", r"--checkpoint_dir nonsense://bucket/run: Protocol not known: nonsense"),
        ("dropbox://run", r"--checkpoint_dir dropbox://run: its driver is not installed \(.*dropboxdrivefs"),
    ],
)
def test_an_address_without_a_driver_is_refused_in_one_line(address: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        open_location(address)

    assert "\n" not in str(refused.value)


def test_a_bucket_without_its_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)

    with pytest.raises(UserError, match=r'its driver is not installed \(.*s3fs.*\); pip install "distrinews\[s3\]"'):
        open_location("s3a://bucket/run")


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m,ro"), pytest.raises(UserError) as refused:
        check_storage(open_location(str(tmp_path / "disk/run")), ALONE)

    assert f"--checkpoint_dir {tmp_path}/disk/run: cannot be written ([Errno 30] Read-only file system" in str(
        refused.value
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into every folder, whatever its mode")
def test_a_folder_that_one_may_not_write_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)

    with pytest.raises(UserError, match=r"--checkpoint_dir .*/locked: cannot be written \(.*Permission denied"):
        check_storage(open_location(str(tmp_path / "locked")), ALONE)


def test_a_file_in_the_place_of_the_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(UserError, match=r"--checkpoint_dir .*/file: cannot be written \(.*Not a directory"):
        check_storage(open_location(str(tmp_path / "file")), ALONE)


def refusal_of_a_folder_of_its_own(folder: Path) -> str:
    ranks = here()
    try:
        check_storage(open_location(str(folder / f"machine_{ranks.rank}")), ranks)
    except UserError as error:
        return str(error)
    return "not refused"


def test_a_folder_that_machines_do_not_share_is_refused_by_all(
    run_on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    for rank in range(2):
        (tmp_path / f"machine_{rank}").mkdir()

    said = run_on_ranks(2, refusal_of_a_folder_of_its_own, tmp_path)

    assert (
        said
        == [
            f"rank 1: --checkpoint_dir {tmp_path}/machine_1: files that rank 0 writes there are not visible here; "
            "name a place that all machines share"
        ]
        * 2
    )
    assert all(names_in(str(tmp_path / f"machine_{rank}")) == [] for rank in range(2))


def test_a_disk_that_fills_up_at_any_stage_of_a_save_loses_nothing(tmp_path: Path) -> None:
    failures = []
    with mounted(tmp_path / "disk", "size=256k"):
        for free_pages in range(64):
            storage = open_location(str(tmp_path / f"disk/run_{free_pages}"))
            said = save_with_room_for(free_pages, storage, tmp_path / "disk/ballast")
            shutil.rmtree(storage.location)
            if not said:
                break
            failures += said

    assert free_pages == len(failures) > 3, "the disk filled up at more than one stage"
    words = ("No space left on device", "attempt 1 of 3, the next within a minute")
    assert all(word in line for word in words for line in failures)


def save_with_room_for(free_pages: int, storage: Storage, ballast: Path) -> list[str]:
    """Save step 2 over step 1 on a disk with this many free pages; if that fails, look and make room; what was said."""
    said: list[str] = []
    saver = Saver(TrainConfig(keep_last=1), ALONE, storage, said.append)
    save(storage, 1, 1.0)
    state = StrategyState({"weight": torch.full((500,), 2.0)}, {})
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(os.sysconf("SC_PAGE_SIZE")))
    os.truncate(ballast, ballast.stat().st_size - free_pages * os.sysconf("SC_PAGE_SIZE"))

    saver.save(2, lambda: state, {"step": 2, "value": 2.0}, best_step=None)
    wait_until(lambda: saver.done)
    stands = bool(saver.collect())

    assert stands is not bool(said)
    # Only ``latest``, for people, found no room: then the new one stands all the same.
    assert newest_whole(storage) in ([(2, 2.0)] if stands else [(1, 1.0), (2, 2.0)])
    ballast.unlink()
    if said:
        saver.retry()
    saver.wait()
    assert newest_whole(storage) == (2, 2.0)
    assert names_in(storage.location) == ["latest", Path(storage.steps()[2]).name]
    saver.close()
    return said


class _AnotherRunBetween:
    """A storage's own probe, with all of another run's check between its parts."""

    def __init__(self, storage: Storage, meanwhile: Callable[[], None]) -> None:
        self.storage, self.meanwhile = storage, meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def put_probe(self, name: str) -> None:
        self.storage.put_probe(name)
        self.meanwhile()

    def sees_probe(self, name: str) -> bool:
        seen = self.storage.sees_probe(name)
        self.meanwhile()
        return seen


@pytest.mark.parametrize("address", ["{}/a.run/checkpoints", "memory://{}/shared"])
def test_runs_that_start_together_in_one_folder_do_not_refuse_each_other(address: str, tmp_path: Path) -> None:
    one, other = (open_location(address.format(tmp_path)) for _ in range(2))

    check_storage(_AnotherRunBetween(one, lambda: check_storage(other, ALONE)), ALONE)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_run_creates_during_the_check_changes_nothing(tmp_path: Path) -> None:
    models = tmp_path / "models"
    storage = open_location(str(models / "a.run/checkpoints"))

    check_storage(_AnotherRunBetween(storage, lambda: models.mkdir(exist_ok=True)), ALONE)

    assert [path.name for path in tmp_path.rglob("*")] == ["models"]
