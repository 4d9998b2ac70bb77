"""Files that several processes write at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from common.files import write_whole


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
