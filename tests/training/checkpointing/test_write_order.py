"""The order in which a save reaches the disk: what a power cut leaves, not only what a killed process leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.training.checkpointing.crash_points import save_through
from training.checkpointing import open_location

Event = tuple[str, str, Any]


def record_a_save(folder: Path) -> list[Event]:
    """Save step 3 over steps 1 and 2; returns what was done to the disk, in order, with paths in ``folder``.

    ("write", file, None), ("sync", file or folder, its bytes), ("rename", old, new), ("remove", file, None).
    """
    storage, events = open_location(str(folder)), []
    for step in (1, 2):
        save_through(storage, step, 1.0, keep_last=2)

    def add(kind: str, path: Any, more: Any = None, base: int = -1) -> None:
        whole = Path(Path(f"/proc/self/fd/{base}").readlink() if base >= 0 else "", os.fsdecode(path))
        if recording and whole.is_relative_to(folder):
            events.append((kind, str(whole.relative_to(folder)), more))

    def watch(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            add("write", arguments[0])
        elif event == "os.rename":
            add("rename", arguments[0], os.fsdecode(arguments[1]).removeprefix(f"{folder}/"))
        elif event == "os.remove":
            add("remove", arguments[0], base=arguments[1])

    def sync(file: int) -> None:
        add("sync", Path(f"/proc/self/fd/{file}").readlink(), os.fstat(file).st_size)
        fsync(file)

    recording, fsync, os.fsync = True, os.fsync, sync
    sys.addaudithook(watch)
    save_through(storage, 3, 3.0)
    recording, os.fsync = False, fsync
    sizes = {path.name: path.stat().st_size for path in (folder / "step_00000003").iterdir()}
    return [*events, ("sizes", "", sizes)]


def test_all_is_on_the_disk_before_the_rename_and_the_rename_before_anything_is_removed(
    run_on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    *events, (_, _, sizes) = run_on_ranks(1, record_a_save, tmp_path)[0]

    stands = events.index(("rename", ".step_00000003.tmp", "step_00000003"))
    synced = bytes_on_disk(events[:stands], ".step_00000003.tmp")
    assert synced == sizes, "each file's last byte was synced before the rename"
    assert set(sizes) == {"__0_0.distcp", ".metadata", "state.json", "manifest.json"}
    in_aside = [at for at, (_, path, _) in enumerate(events[:stands]) if path.startswith(".step_00000003.tmp/")]
    assert ("sync", ".step_00000003.tmp") in [event[:2] for event in events[in_aside[-1] : stands]]
    written = [path for kind, path, _ in events[:stands] if kind == "write"]
    assert "manifest.json" in written[-1], "the manifest is written last"

    (named,) = (at for at, event in enumerate(events) if event[0] == "rename" and event[2] == "latest")
    assert events[stands + 1][:2] == ("sync", "."), "the rename is on the disk before latest is touched"
    assert named > stands
    removed = [(at, path) for at, (kind, path, _) in enumerate(events) if kind == "remove" and path[0] != "."]
    assert removed[0][0] > named
    assert ("sync", ".") in [event[:2] for event in events[named : removed[0][0]]], "so is latest, before a removal"
    for old in ("step_00000001", "step_00000002"):
        at = next(at for at, path in removed if path.startswith(old))
        assert events[at][1] == f"{old}/manifest.json", "its manifest goes first"
        assert events[at + 1][:2] == ("sync", old)


def bytes_on_disk(events: list[Event], folder: str) -> dict[str, int]:
    """Of each file in a folder, how many bytes were synced at the end."""
    synced: dict[str, int] = {}
    for kind, path, more in events:
        if kind == "write":
            synced[path] = 0
        elif kind == "sync":
            synced[path] = more
        elif kind == "rename":
            synced[more] = synced.pop(path)
        else:
            synced.pop(path, None)  # it may not be there
    return {Path(path).name: size for path, size in synced.items() if Path(path).parent == Path(folder)}
