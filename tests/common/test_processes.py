"""What is read of other processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.processes import process_fields


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="Linux lists its processes so")
def test_a_process_may_have_any_name() -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    try:
        comm.write_bytes(b"a) Z \xff")
        fields = process_fields(os.getpid())
    finally:
        comm.write_bytes(before)
    assert fields[0] in "RS"
    assert int(fields[1]) == os.getppid()
    assert process_fields(2**30) == []
