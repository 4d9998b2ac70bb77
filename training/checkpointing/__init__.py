"""Checkpoints: the whole training state on disk, and the model folder that serving reads."""

from __future__ import annotations

from training.checkpointing.export import FinishedModel, write_model
from training.checkpointing.places import check_storage, open_location, open_storage
from training.checkpointing.retention import SaveSchedule
from training.checkpointing.storage import Storage

__all__ = [
    "FinishedModel",
    "SaveSchedule",
    "Storage",
    "check_storage",
    "open_location",
    "open_storage",
    "write_model",
]
