"""Storages for tests: a folder, and an address that behaves as a bucket does."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from training.checkpointing import Storage, open_location


@pytest.fixture(params=["folder", "address"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """An empty storage of each kind."""
    place = f"bucket-{uuid.uuid4().hex}/run"
    yield open_location(str(tmp_path / "checkpoints") if request.param == "folder" else f"memory://{place}")
    memory = fsspec.filesystem("memory")
    if memory.exists(place):
        memory.rm(place, recursive=True)


@pytest.fixture
def edit() -> Callable[[str, Callable[[bytes], bytes] | None], None]:
    """`edit(path, change)`: change the bytes of a stored file; remove it if there is no change."""

    def edit_file(path: str, change: Callable[[bytes], bytes] | None) -> None:
        files, place = fsspec.url_to_fs(path)
        if change is None:
            files.rm_file(place)
        else:
            files.pipe_file(place, change(files.cat_file(place)))

    return edit_file
