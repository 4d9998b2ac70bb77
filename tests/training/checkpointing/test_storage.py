"""What is promised of every storage, be it a folder or an address."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.training.checkpointing.saves import FILES, content, names_in, newest_whole, save, value_in, write_files
from training.checkpointing import Storage, check_storage
from training.distributed.ranks import Ranks

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")


def test_what_was_saved_is_read_back(storage: Storage) -> None:
    path = save(storage, 7, 3.0)

    assert path == f"{storage.location}/step_00000007"
    assert storage.steps() == {7: path}
    assert storage.find_damage(path) is None
    assert value_in(storage, path) == 3.0


def test_the_manifest_holds_size_and_hash_of_every_file(storage: Storage) -> None:
    path = save(storage, 7, 3.0)

    manifest = json.loads(content(f"{path}/manifest.json"))

    assert (manifest["format"], manifest["step"]) == (1, 7)
    assert sorted(manifest["files"]) == sorted(FILES)
    for name in FILES:
        stored = content(f"{path}/{name}")
        assert manifest["files"][name] == {"bytes": len(stored), "sha256": hashlib.sha256(stored).hexdigest()}


def test_latest_names_the_checkpoint_saved_last(storage: Storage) -> None:
    for step in (7, 120, 123_456_789):
        save(storage, step, 1.0)
        assert content(f"{storage.location}/latest").decode() == f"step_{step:08d}\n"


def test_a_first_save_that_was_never_finished_is_no_checkpoint_and_goes_with_the_next(storage: Storage) -> None:
    write_files(storage, 1, 1.0)

    assert storage.steps() == {}
    save(storage, 2, 2.0)
    storage.prune(keep_last=1, keep_every=0, best_step=None)
    assert names_in(storage.location) == ["latest", "step_00000002"]


def test_what_is_discarded_is_gone_and_the_step_can_be_saved_again(storage: Storage) -> None:
    write_files(storage, 2, 1.0)

    storage.discard(2)

    assert storage.steps() == {}
    save(storage, 2, 2.0)
    assert newest_whole(storage) == (2, 2.0)


def test_files_of_an_earlier_try_are_not_in_the_checkpoint(storage: Storage) -> None:
    storage.begin(2)
    storage.writer(2)
    storage.write_json(2, "left_over.json", {})

    path = save(storage, 2, 2.0)

    assert names_in(path) == sorted([*FILES, "manifest.json"])


def test_a_step_saved_again_replaces_the_older_one_once_it_is_complete(storage: Storage) -> None:
    older = save(storage, 5, 1.0)
    files = write_files(storage, 5, 2.0)
    assert newest_whole(storage) == (5, 1.0)

    newer = storage.commit(5, files)

    assert newest_whole(storage) == (5, 2.0)
    assert storage.find_damage(older) is None
    storage.prune(keep_last=2, keep_every=0, best_step=5)
    assert storage.steps() == {5: newer}
    assert storage.find_damage(older) == "manifest.json is missing"
    assert value_in(storage, newer) == 2.0


def test_a_step_saved_a_third_time_is_the_newest(storage: Storage) -> None:
    for value in (1.0, 2.0, 3.0):
        save(storage, 5, value)

    assert newest_whole(storage) == (5, 3.0)


def test_newest_milestones_and_best_are_kept_and_all_else_removed(storage: Storage) -> None:
    for step in range(1, 9):
        save(storage, step, float(step))

    storage.prune(keep_last=2, keep_every=3, best_step=4)

    assert sorted(storage.steps()) == [3, 4, 6, 7, 8]
    assert all(storage.find_damage(path) is None for path in storage.steps().values())


def test_a_checkpoint_without_a_manifest_counts_for_nothing_and_is_pruned(
    storage: Storage, edit: Callable[..., None]
) -> None:
    for step in (1, 2, 3):
        save(storage, step, float(step))
    edit(f"{storage.location}/step_00000003/manifest.json", None)

    storage.prune(keep_last=2, keep_every=0, best_step=None)

    assert sorted(storage.steps()) == [1, 2]


def test_pruning_keeps_the_only_checkpoint_and_foreign_files(storage: Storage, edit: Callable[..., None]) -> None:
    path = save(storage, 1, 1.0)
    aside = storage.move_aside(path)
    torn = save(storage, 2, 2.0)
    edit(f"{torn}/manifest.json", None)

    storage.prune(keep_last=1, keep_every=0, best_step=None)

    assert storage.find_damage(aside) is None
    assert storage.steps() == {2: torn}


def test_a_leftover_that_cannot_be_removed_is_left(storage: Storage, tmp_path: Path) -> None:
    save(storage, 1, 1.0)
    leftover = tmp_path / "checkpoints" / ".latest.1.tmp"  # in a bucket nothing bears this name
    (leftover / "in the way").mkdir(parents=True)

    storage.prune(keep_last=1, keep_every=0, best_step=None)

    assert leftover.exists()
    assert newest_whole(storage) == (1, 1.0)


def test_move_aside_deletes_nothing(storage: Storage) -> None:
    moved = [storage.move_aside(save(storage, 4, value)) for value in (1.0, 2.0)]

    assert moved == [f"{storage.location}/step_00000004.{number}" for number in (1, 2)]
    assert [value_in(storage, path) for path in moved] == [1.0, 2.0]
    assert storage.steps() == {}


def test_a_commit_whose_files_rank_0_does_not_see_whole_is_refused(storage: Storage) -> None:
    files = write_files(storage, 3, 1.0)
    files["__1_0.distcp"] = {"bytes": 4096, "sha256": "0" * 64}

    with pytest.raises(OSError, match=r"rank 0 sees __1_0\.distcp with 0 of 4,096 bytes"):
        storage.commit(3, files)

    assert storage.find_damage(f"{storage.location}/step_00000003") == "manifest.json is missing"


def test_every_file_is_hashed_by_exactly_one_of_the_ranks_that_share_the_work(
    storage: Storage, edit: Callable[..., None]
) -> None:
    for name in FILES:
        path = save(storage, 1, 1.0)
        edit(f"{path}/{name}", lambda content: content[:-1] + bytes([content[-1] ^ 1]))

        found = [storage.find_damage(path, part, 3) for part in range(3)]

        assert [damage for damage in found if damage] == [f"{name} does not match its SHA-256"]


def test_a_list_of_tensors_that_would_run_code_is_not_read(
    storage: Storage, edit: Callable[..., None], tmp_path: Path
) -> None:
    class Intruder:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = save(storage, 1, 1.0)
    edit(f"{path}/.metadata", lambda content: pickle.dumps(Intruder()))

    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(BaseException, match=r"posix\.mkdir, which no list of tensors holds"),
    ):
        dcp.load({"weight": torch.zeros(500)}, storage_reader=storage.reader(path), no_dist=True)

    assert not (tmp_path / "ran").exists()


def test_the_check_at_the_start_leaves_nothing_behind(storage: Storage, tmp_path: Path) -> None:
    check_storage(storage, ALONE)

    assert names_in(storage.location) == names_in(str(tmp_path)) == []
