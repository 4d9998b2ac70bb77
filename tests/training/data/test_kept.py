from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from training.data.array_file import write_arrays
from training.data.kept import digest_of, kept, measured


def test_a_file_is_made_once_and_again_if_it_is_damaged(tmp_path: Path) -> None:
    file, told = tmp_path / "cache" / "ids.safetensors", []

    def make(damage: str) -> None:
        told.append(damage)
        write_arrays(file, {"ids": np.arange(3)}, {})

    assert [kept(file, make), kept(file, make)] == [False, True]
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert [kept(file, make), kept(file, make)] == [False, True]
    assert told == ["", "they do not match their SHA-256"]


def test_a_start_that_fails_because_another_was_first_finds_its_file(tmp_path: Path) -> None:
    file = tmp_path / "ids.safetensors"

    def make(damage: str) -> None:
        write_arrays(file, {"ids": np.arange(3)}, {})  # the other start
        raise UserError("its parts are gone", code="row-unusable")

    assert not kept(file, make)
    assert kept(file, make)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"\(No space left on device\); free some space, or name another folder"),
        (errno.EACCES, r"\(Permission denied\)$"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, number: int, message: str) -> None:
    def make(damage: str) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(UserError, match=rf"--cache_dir {tmp_path}: cannot be written {message}"):
        kept(tmp_path / "ids.safetensors", make)


def test_texts_that_are_cut_elsewhere_get_another_name() -> None:
    texts = [["ab", "c"], ["a", "bc"], ["abc"], [("a", "b"), "c"], ["a\x01b", "c\ud83d"]]

    assert len({digest_of(measured(one)) for one in texts}) == len(texts)
