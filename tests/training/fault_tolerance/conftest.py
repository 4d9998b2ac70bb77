"""Ranks of a training run without a launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.fault_tolerance.started_ranks import StartedRanks


@pytest.fixture
def start_ranks(base_flags: tuple[str, ...], tmp_path: Path) -> Iterator[Callable[..., StartedRanks]]:
    """`start_ranks(world_size, *flags, fault=None)`: ranks that train into the folder model, killed at the end."""
    started: list[StartedRanks] = []

    def start(world_size: int, *flags: Any, fault: Callable[[int], None] | None = None) -> StartedRanks:
        flags = (*base_flags, "--batch_size", 4, "--output_dir", tmp_path / "model", *flags)
        started.append(StartedRanks(tmp_path / f"ranks_{len(started)}", world_size, flags, fault))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()
