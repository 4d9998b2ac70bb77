"""Checkpoints: the whole training state on disk, and the model folder that serving reads."""

from __future__ import annotations

from training.checkpointing.export import write_model
from training.checkpointing.store import CheckpointStore

__all__ = ["CheckpointStore", "write_model"]
