"""Training: from text and labels to a model folder, on one process or many.

From Python: ``from training import TrainConfig, train``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Loaded when they are asked for: importing PyTorch takes seconds, and every entry point imports
# this package.
_PLACES = {
    "TrainConfig": "training.config",
    "train": "training.run.start",
    "Result": "training.run.start",
    "Subscriber": "training.monitoring.events",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
