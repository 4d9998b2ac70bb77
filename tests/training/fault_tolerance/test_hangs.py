"""A hang is recorded from what gloo and NCCL remember; what they cannot tell blames nobody."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from training.fault_tolerance.hangs import record_path, write_hang_record
from training.monitoring.phases import Phases
from training.monitoring.status import RankStatus

EMPTY = {"version": "2.10", "pg_config": {}}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[bool, list[Any]]]:
    """`record(gloo, nccl, world_size=2)`: leaves a record where torch dumps these; whether it waits, what it kept."""

    def leave(gloo: Any, nccl: Any, world_size: int = 2) -> tuple[bool, list[Any]]:
        recorders = torch._C._distributed_c10d
        for name, held in (("_dump_fr_trace_json", gloo), ("_dump_nccl_trace_json", nccl)):
            monkeypatch.setattr(recorders, name, lambda held=held: json.dumps(held).encode(), raising=False)
        waits = write_hang_record(tmp_path, RankStatus(0, "here", 7, 0, world_size, 0), Phases(), 4.0)
        kept = json.loads(record_path(tmp_path, 0).read_text())
        assert kept["waits"] == waits
        return waits, kept["flight_records"]

    return leave


def _dump(*entries: tuple[str, int, int, bool]) -> dict[str, Any]:
    names = ("profiling_name", "collective_seq_id", "p2p_seq_id", "retired")
    return EMPTY | {"entries": [{"pg_id": 0, **dict(zip(names, entry, strict=True))} for entry in entries]}


SAVED = _dump(("gloo:all_gather", 1, 0, True))
ENDED = _dump(("nccl:all_reduce", 1, 0, True), ("nccl:all_reduce", 2, 0, True))
BEGUN = _dump(("nccl:all_reduce", 1, 0, False))  # the same number as a collective of gloo that has ended
BATCH = (("nccl:send 0->1", 2, 1, False), ("nccl:recv 0<-1", 2, 1, False))


def test_a_rank_waits_if_either_backend_has_a_collective_under_way(record: Callable[..., Any]) -> None:
    assert record(SAVED, BEGUN) == (True, [SAVED, BEGUN])
    assert record(SAVED, ENDED) == (False, [SAVED, ENDED])
    assert record(SAVED, EMPTY) == (False, [SAVED])


def test_sends_and_receives_of_a_batch_end_with_it(record: Callable[..., Any]) -> None:
    ended = _dump(*BATCH, ("nccl:coalesced", 2, 1, True))
    begun = _dump(*BATCH, ("nccl:coalesced", 2, 1, False))

    assert [record(EMPTY, dump)[0] for dump in (ended, begun)] == [False, True]


@pytest.mark.parametrize("gloo", [EMPTY, None, {"entries": [{"unknown": 1}]}])
def test_an_empty_record_blames_a_rank_only_if_there_is_no_other(record: Callable[..., Any], gloo: Any) -> None:
    assert record(gloo, EMPTY, world_size=2)[0]
    assert not record(gloo, EMPTY, world_size=1)[0]
