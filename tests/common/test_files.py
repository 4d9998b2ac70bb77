"""Files that several processes write at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

import common.files
from common.files import replace_folder, write_whole


@pytest.mark.parametrize("can_swap", [True, False])
def test_a_link_is_replaced_by_the_new_folder_and_nothing_is_written_where_it_led(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_swap: bool
) -> None:
    if not can_swap:
        monkeypatch.setattr(common.files.ctypes, "CDLL", lambda *_, **__: None)
    first, target = tmp_path / "first", tmp_path / "model"
    first.mkdir()
    (first / "file").write_text("first")
    target.symlink_to("first")
    for text in ("second", "third"):
        (tmp_path / "aside").mkdir()
        (tmp_path / "aside" / "file").write_text(text)
        replace_folder(tmp_path / "aside", target)
        assert (target / "file").read_text() == text
    assert (first / "file").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "model"]


def test_writers_with_the_same_pid_write_one_file_at_once_and_both_succeed(tmp_path: Path) -> None:
    # Threads share a pid, as the first processes of two containers do.
    file, start = tmp_path / "tokens.safetensors", Barrier(2)
    contents = [bytes([writer]) * 4_000_000 for writer in (1, 2)]

    def write(content: bytes) -> None:
        for _ in range(5):
            start.wait(timeout=60)
            write_whole(file, content)

    with ThreadPoolExecutor(2) as writers:
        list(writers.map(write, contents))

    assert file.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [file]
