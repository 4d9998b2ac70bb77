"""A damaged checkpoint is named in one line and passed over, whatever the damage and wherever it lies."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from common.errors import UserError
from tests.training.checkpointing.saves import FILES, newest_whole, save
from training.checkpointing import Storage, open_location


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def lengthened(content: bytes) -> bytes:
    return content + b"\0"


def one_bit_flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def with_values(**values: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | values).encode()


EACH_FILE = [
    (name, change, message)
    for name in FILES
    for change, message in [
        (cut, rf"{name} has [\d,]+ bytes, not [\d,]+"),
        (lengthened, rf"{name} has [\d,]+ bytes, not [\d,]+"),
        (lambda content: b"", rf"{name} has 0 bytes, not [\d,]+"),
        (one_bit_flipped, rf"{name} does not match its SHA-256"),
        (None, rf"{name} is missing"),
    ]
]
THE_MANIFEST = [
    ("manifest.json", change, message)
    for change, message in [
        (cut, r"manifest.json cannot be read \(.*\)"),
        (lambda content: b"", r"manifest.json cannot be read \(.*\)"),
        (lambda content: b"[]", r"manifest.json cannot be read \(.*\)"),
        (lambda content: b"\xff\xfe", r"manifest.json cannot be read \(.*\)"),
        (with_values(files=[1]), r"manifest.json cannot be read \(.*\)"),
        (with_values(files={}), r"manifest.json names no files"),
        (with_values(files={"state.json": {}}), r"manifest.json cannot be read \(.*\)"),
        (with_values(format=2), r"manifest.json has format 2, this version reads 1"),
        (with_values(step=1), r"manifest.json belongs to step 1"),
        (None, r"manifest.json is missing"),
    ]
]


@pytest.mark.parametrize(("name", "change", "message"), [*EACH_FILE, *THE_MANIFEST])
def test_damage_is_named_in_one_line_and_the_checkpoint_before_it_is_used(
    storage: Storage, edit: Callable[..., None], name: str, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    save(storage, 1, 1.0)
    newest = save(storage, 2, 2.0)
    edit(f"{newest}/{name}", change)

    damage = storage.find_damage(newest)

    assert damage is not None
    assert re.fullmatch(message, damage), damage
    assert newest_whole(storage) == (1, 1.0)


def test_a_folder_in_the_place_of_a_file_is_damage(tmp_path: Path) -> None:
    storage = open_location(str(tmp_path / "checkpoints"))
    path = Path(save(storage, 1, 1.0))
    (path / "state.json").unlink()
    (path / "state.json").mkdir()

    assert storage.find_damage(str(path)) == "state.json is missing"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file, whatever its mode")
def test_a_file_that_one_may_not_read_is_damage(tmp_path: Path) -> None:
    storage = open_location(str(tmp_path / "checkpoints"))
    path = Path(save(storage, 1, 1.0))
    (path / "__0_0.distcp").chmod(0)

    assert "__0_0.distcp cannot be read (" in str(storage.find_damage(str(path)))


class FailingFiles(MemoryFileSystem):
    """A driver that raises what it is told to for some names."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    failures: ClassVar[dict[str, Exception]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("failing://"))

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._fail(path)
        return super()._open(path, *arguments, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        self._fail(path)
        return super().cat_file(path, *arguments, **options)

    def _fail(self, path: str) -> None:
        for part, error in self.failures.items():
            if part in path:
                raise error


@pytest.fixture
def failing() -> Iterator[Storage]:
    """A storage whose driver can be told to fail."""
    fsspec.register_implementation("failing", FailingFiles, clobber=True)
    yield open_location("failing://bucket/run")
    FailingFiles.store.clear()
    FailingFiles.failures.clear()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("__0_0.distcp", "__0_0.distcp cannot be read (Access Denied)"),
        ("manifest.json", "manifest.json cannot be read (Access Denied)"),
    ],
)
def test_a_file_that_the_bucket_refuses_to_give_is_damage(failing: Storage, name: str, message: str) -> None:
    save(failing, 1, 1.0)
    newest = save(failing, 2, 2.0)
    FailingFiles.failures[f"step_00000002/{name}"] = PermissionError("Access Denied")

    assert failing.find_damage(newest) == message
    assert newest_whole(failing) == (1, 1.0)


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_a_bucket_that_does_not_answer_is_not_taken_for_damage(failing: Storage, name: str) -> None:
    path = save(failing, 1, 1.0)
    FailingFiles.failures[name] = ConnectionError("no route\nto host")

    with pytest.raises(UserError, match=r"step_00000001: cannot be read now \(ConnectionError: no route to host\)"):
        failing.find_damage(path)
