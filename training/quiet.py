"""Silence library messages, so that users see the run's own."""

from __future__ import annotations

import logging
import os
import warnings

from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Errors only and no progress bars while loading; the hub's retries would print ten lines each."""
    # Every rank loads a model, so each of these messages would come once per rank.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    # Printed per block and rank, but nothing here writes into a block's output, and state is seldom
    # gathered.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Expected: a run with one process saves without a process group.
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
    )
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # If installed, DeepSpeed is imported when a model is saved and prints the processor's name. It
    # sets its own level.
    logging.getLogger("DeepSpeed").addFilter(_errors_only)
    # Otherwise the profiler announces when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
