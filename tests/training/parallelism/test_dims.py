"""Degrees follow from the strategy and the ranks, and what does not fit is refused with the whole product."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import UserError
from training.config import TrainConfig
from training.parallelism.dims import ParallelDims


def dims(world_size: int, ranks_per_machine: int = 8, **fields: Any) -> tuple[int, int, int, int]:
    return ParallelDims.from_config(TrainConfig(**fields), world_size, min(ranks_per_machine, world_size)).degrees


@pytest.mark.parametrize(
    ("world_size", "fields", "degrees"),
    [
        (4, {"strategy": "zero3"}, (1, 1, 4, 1)),
        (8, {"strategy": "zero2", "dp_shard": 2}, (1, 4, 2, 1)),
        (8, {"strategy": "zero3", "dp_shard": 1}, (1, 8, 1, 1)),
        (4, {"strategy": "tp"}, (1, 1, 1, 4)),
        (4, {"strategy": "tp", "tp": 2}, (1, 2, 1, 2)),
        (4, {"strategy": "pp"}, (4, 1, 1, 1)),
        (8, {"strategy": "pp", "pp": 2}, (2, 4, 1, 1)),
        (8, {"strategy": "3d", "pp": 2, "tp": 2}, (2, 1, 2, 2)),
        (8, {"strategy": "3d", "pp": 2, "tp": 2, "dp_shard": 1}, (2, 2, 1, 2)),
        (16, {"strategy": "3d", "pp": 2, "tp": 2, "dp_shard": 2}, (2, 2, 2, 2)),
        (1, {"strategy": "zero3"}, (1, 1, 1, 1)),
    ],
)
def test_degrees_left_open_follow_from_the_strategy(
    world_size: int, fields: dict[str, Any], degrees: tuple[int, ...]
) -> None:
    assert dims(world_size, **fields) == degrees


def test_tensor_ranks_are_those_of_one_machine_unless_a_degree_says_otherwise() -> None:
    assert dims(16, 8, strategy="tp") == (1, 2, 1, 8)
    assert dims(16, 8, strategy="tp", tp=4) == (1, 4, 1, 4)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"strategy": "tp", "tp": 16}, r"^--tp 16: .* 8 ranks per machine.* use a divisor of 8$"),
        ({"strategy": "3d", "pp": 2, "tp": 4}, r"^--tp 4: .* 6 ranks per machine.* use a divisor of 6$"),
    ],
)
def test_tensor_parallelism_over_machines_is_refused(fields: dict[str, Any], line: str) -> None:
    world_size, ranks_per_machine = (24, 6) if fields["strategy"] == "3d" else (16, 8)
    with pytest.raises(UserError, match=line):
        dims(world_size, ranks_per_machine, **fields)


@pytest.mark.parametrize(
    ("world_size", "fields", "line"),
    [
        (8, {"strategy": "3d", "pp": 3, "tp": 2}, r"--pp \(3\) x --tp \(2\) = 6.* 8 ranks"),
        (6, {"strategy": "tp", "tp": 4}, r"--tp \(4\) = 4.* 6 ranks"),
        (2, {"strategy": "pp", "pp": 4}, r"--pp \(4\).* 2 ranks"),
        (2, {"strategy": "3d", "sequence_parallel": True}, r"--sequence_parallel: does nothing without --tp"),
        (2, {"strategy": "3d", "pp_schedule": "zbv"}, r"--pp_schedule zbv: does nothing without --pp"),
        (4, {"strategy": "zero3", "dp_shard": 3}, r"--dp_shard 3: must divide .* which is 4"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_whole_product(
    world_size: int, fields: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        dims(world_size, **fields)


def test_ranks_that_share_a_replica_have_the_same_share_of_the_batch() -> None:
    degrees = ParallelDims(pp=2, dp_replicate=2, dp_shard=1, tp=2)

    assert [degrees.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_the_degrees_are_printed_as_a_product() -> None:
    assert str(ParallelDims(2, 1, 4, 2)) == "pipeline(2) x sharded(4) x tensor(2) = 16 ranks"
    assert str(ParallelDims(1, 1, 1, 1)) == "one process = 1 rank"
