from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from training.checkpointing.store import CheckpointStore, find_damage, load_checkpoint, move_aside
from training.errors import TrainingFailure, UserError

# Saves step 1 whole, then saves step 2 in one child after the other; child n dies at the n-th time that it touches
# the file system, as if by SIGKILL. Prints what readers find after each death.
CRASHING_SAVES = """
import json, os, sys, signal
from pathlib import Path
import torch
from training.checkpointing.store import CheckpointStore, load_checkpoint

TOUCHES = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "os.scandir", "os.listdir"}
torch.set_num_threads(1)


def state(step):
    return {"step": step, "weights": torch.full((1000,), float(step))}


def save_and_die(folder, last_touch):
    seen = 0

    def count(event, arguments):
        nonlocal seen
        if event in TOUCHES:
            seen += 1
            if seen == last_touch:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    CheckpointStore(folder, keep_last=1).save(2, state(2), best_step=None)
    os._exit(0)


found = []
for last_touch in range(1, 200):
    folder = Path(sys.argv[1]) / str(last_touch)
    store = CheckpointStore(folder, keep_last=1)
    store.save(1, state(1), best_step=None)
    child = os.fork()
    if child == 0:
        save_and_die(folder, last_touch)
    _, status = os.waitpid(child, 0)
    rejected = []
    loaded = load_checkpoint(store.newest(rejected.append))
    store.save(3, state(3), best_step=None)
    found.append({
        "killed": os.WIFSIGNALED(status),
        "step": loaded["step"],
        "weight": loaded["weights"].unique().tolist(),
        "rejected": rejected,
        "left": sorted(path.name for path in folder.iterdir()),
    })
    if not found[-1]["killed"]:
        break
print(json.dumps(found))
"""


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=2)


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((64,), float(step)), "name": "a run"}


def steps_in(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_a_saved_state_is_read_back_as_it_was(store: CheckpointStore) -> None:
    path = store.save(7, state_of(7), best_step=None)

    state = load_checkpoint(path)

    assert path == store.path(7)
    assert find_damage(path) is None
    assert (state["step"], state["name"]) == (7, "a run")
    assert torch.equal(state["weights"], torch.full((64,), 7.0))


def test_the_manifest_holds_size_and_hash_of_the_state(store: CheckpointStore) -> None:
    path = store.save(7, state_of(7), best_step=None)

    manifest = json.loads((path / "manifest.json").read_text())

    assert manifest["step"] == 7
    assert manifest["files"]["state.pt"]["bytes"] == (path / "state.pt").stat().st_size
    assert len(manifest["files"]["state.pt"]["sha256"]) == 64


def test_the_newest_is_the_one_of_most_steps(store: CheckpointStore) -> None:
    for step in (9, 10, 123_456_789):
        store.save(step, state_of(step), best_step=None)

    assert store.newest(pytest.fail) == store.path(123_456_789)


def test_there_is_no_newest_where_nothing_was_saved(store: CheckpointStore) -> None:
    assert store.newest(pytest.fail) is None


def test_newest_and_best_are_kept_and_all_else_removed(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4, 5):
        store.save(step, state_of(step), best_step=2 if step >= 2 else None)

    assert steps_in(store) == ["step_00000002", "step_00000004", "step_00000005"]


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(1, state_of(1), best_step=None)

    path = store.save(1, state_of(99), best_step=None)

    assert load_checkpoint(path)["step"] == 99
    assert steps_in(store) == ["step_00000001"]


def truncate(path: Path) -> None:
    state = path / "state.pt"
    state.write_bytes(state.read_bytes()[:100])


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "state.pt").write_bytes(content)


def remove_state(path: Path) -> None:
    (path / "state.pt").unlink()


def remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def empty_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("")


def list_for_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "state.pt has 100 bytes, not"),
        (flip_a_bit, "state.pt does not match its SHA-256"),
        (remove_state, "state.pt is missing"),
        (remove_manifest, "manifest.json is missing"),
        (empty_manifest, "manifest.json cannot be read"),
        (list_for_manifest, "manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    store: CheckpointStore, damage: Callable[[Path], None], named: str
) -> None:
    store.save(1, state_of(1), best_step=None)
    newest = store.save(2, state_of(2), best_step=None)
    damage(newest)
    rejected: list[str] = []

    found = store.newest(rejected.append)

    assert found == store.path(1)
    assert len(rejected) == 1
    assert str(newest) in rejected[0]
    assert named in rejected[0]


def test_an_error_says_so_where_no_checkpoint_is_whole(store: CheckpointStore) -> None:
    for step in (1, 2):
        remove_manifest(store.save(step, state_of(step), best_step=None))

    with pytest.raises(UserError, match=r"none of the 2 checkpoints in .* is whole; use --resume none"):
        store.newest(lambda line: None)


def test_a_crash_at_any_touch_of_the_disk_leaves_a_whole_newest_one(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CRASHING_SAVES, str(tmp_path)], capture_output=True, text=True, check=True
    )

    found = json.loads(run.stdout)

    assert len(found) > 10, "the crashes did not reach into the save"
    assert [crash["killed"] for crash in found] == [True] * (len(found) - 1) + [False]
    assert {crash["step"] for crash in found} == {1, 2}
    for crash in found:
        assert crash["weight"] == [crash["step"]]
        assert crash["rejected"] == [] or crash["step"] == 2
        assert crash["left"] == ["step_00000003"]


def test_a_process_killed_while_it_saves_in_a_loop_leaves_a_whole_newest_one(tmp_path: Path) -> None:
    program = (
        "import sys, itertools, torch\nfrom pathlib import Path\n"
        "from training.checkpointing.store import CheckpointStore\n"
        "store = CheckpointStore(Path(sys.argv[1]), keep_last=2)\n"
        "for step in itertools.count(1):\n"
        "    store.save(step, {'step': step, 'weights': torch.full((200_000,), float(step))}, best_step=None)\n"
        "    print(step, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "c")], stdout=subprocess.PIPE, text=True)
    told = [int(child.stdout.readline()) for _ in range(5)]

    child.kill()
    told += [int(line) for line in child.stdout if line.endswith("\n")]
    child.wait()

    path = CheckpointStore(tmp_path / "c", keep_last=2).newest(lambda line: None)
    state = load_checkpoint(path)
    assert state["step"] >= told[-1]
    assert state["weights"].unique().tolist() == [state["step"]]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files cannot grow beyond 64 KB: writing more fails, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_a_save_that_finds_no_room_leaves_the_ones_before_it(store: CheckpointStore) -> None:
    store.save(1, state_of(1), best_step=None)

    with pytest.raises(TrainingFailure, match=r"step_00000002 could not be written .*the ones before it are whole"):
        store.save(2, {"step": 2, "weights": torch.zeros(1_000_000)}, best_step=None)

    assert store.newest(pytest.fail) == store.path(1)
    assert steps_in(store) == ["step_00000001"]


def test_later_than_lists_whole_and_damaged_ones(store: CheckpointStore) -> None:
    store = CheckpointStore(store.folder, keep_last=9)
    for step in (1, 2, 3, 10):
        store.save(step, state_of(step), best_step=None)
    remove_manifest(store.path(3))

    assert store.later_than(store.path(2)) == [store.path(3), store.path(10)]
    assert store.later_than(store.path(10)) == []


def test_move_aside_deletes_nothing(tmp_path: Path) -> None:
    moved = []
    for content in ("first", "second"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run/file").write_text(content)
        moved.append(move_aside(tmp_path / "run"))

    assert [path.name for path in moved] == ["run.1", "run.2"]
    assert [(path / "file").read_text() for path in moved] == ["first", "second"]


def test_a_state_that_is_more_than_tensors_and_plain_values_is_not_run(store: CheckpointStore) -> None:
    path = store.save(1, {"step": 1, "path": Path("x")}, best_step=None)

    with pytest.raises(UserError, match=r"checkpoint .*step_00000001: cannot be read"):
        load_checkpoint(path)
