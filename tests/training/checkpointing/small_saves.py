"""Small strategies saved by a real saver on real ranks, and read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.processes import here
from tests.training.parallelism.saved_states import WholeState
from training.checkpointing import Storage, open_location
from training.checkpointing.resume import open_checkpoint
from training.checkpointing.saver import RETRY_SECONDS, Saver
from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.parallelism.state import StrategyState

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
SAID: list[str] = []  # by the savers of this process


def saver_into(
    place: Path | Storage,
    ranks: Ranks | None = None,
    stop_agreed: Callable[[], bool] = lambda: False,
    retry_seconds: float = RETRY_SECONDS,
) -> Saver:
    """A saver of this rank."""
    SAID.clear()
    storage = open_location(str(place)) if isinstance(place, Path) else place
    return Saver(TrainConfig(), ranks or here(), storage, SAID.append, stop_agreed, retry_seconds)


def save_now(saver: Saver, step: int, state: StrategyState, **run_state: Any) -> str:
    """Save and wait; returns the checkpoint's path."""
    saver.save(step, lambda: state, {"step": step, **run_state}, None)
    saver.wait()
    return f"{saver.storage.location}/step_{step:08d}"


def read_whole(path: str) -> WholeState:
    """All of a checkpoint, read by one process."""
    saved = open_checkpoint(path, ALONE).tensors
    whole = {name: torch.empty(size) for name, size in saved.shapes.items()}
    saved.read(whole)
    return WholeState(whole, dict(saved.plain))
