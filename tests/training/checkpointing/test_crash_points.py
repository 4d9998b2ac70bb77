"""A save killed before any of its writes, syncs, renames and removals leaves a whole newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.training.checkpointing.crash_points import Death, die_everywhere
from training.checkpointing import Storage, open_location
from training.checkpointing.remote_storage import RemoteStorage


def in_a_folder(place: Path) -> Storage:
    return open_location(str(place))


def at_an_address(place: Path) -> Storage:
    """A storage that renames nothing, over a folder that outlives its process."""
    fsspec.config.conf["file"] = {"auto_mkdir": True}
    return RemoteStorage(f"file://{place}")


def check(deaths: list[Death], old: tuple[int, float], new: tuple[int, float], left: list[str]) -> None:
    print(f"{len(deaths) - 1} points, the new one stands from point {[d.newest for d in deaths].index(new) + 1} on")
    assert len(deaths) > 50, "the deaths did not reach into the save"
    found = [death.newest for death in deaths]
    stands = found.index(new)
    assert found == [old] * stands + [new] * (len(deaths) - stands), "once it stands it stays"
    assert 0 < stands < len(deaths) - 1, "there is something to do before it stands, and after"
    for death in deaths:
        assert death.next_one[1] == 99.0
        assert death.left_by_the_next == left, f"after a death at point {death.point}"


KINDS = [in_a_folder, pytest.param(at_an_address, marks=pytest.mark.slow)]


@pytest.mark.parametrize("open_", KINDS)
def test_killed_anywhere_in_a_save_or_its_pruning_the_old_or_the_new_one_is_whole(
    run_on_ranks: Callable[..., Any], tmp_path: Path, open_: Callable[[Path], Storage]
) -> None:
    deaths = run_on_ranks(1, die_everywhere, tmp_path, open_, [1, 2], 3, 9)[0]

    check(deaths, old=(2, 2.0), new=(3, 3.5), left=["latest", "step_00000009"])


@pytest.mark.slow
@pytest.mark.parametrize("open_", KINDS)
def test_killed_anywhere_in_replacing_a_step_the_old_or_the_new_one_is_whole(
    run_on_ranks: Callable[..., Any], tmp_path: Path, open_: Callable[[Path], Storage]
) -> None:
    deaths = run_on_ranks(1, die_everywhere, tmp_path, open_, [3], 3, 9)[0]

    check(deaths, old=(3, 3.0), new=(3, 3.5), left=["latest", "step_00000009"])
