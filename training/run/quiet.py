"""Silence what libraries say while they load, so that a person sees what the run says."""

from __future__ import annotations

import logging
import os
import warnings

from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Errors only, no bars for reading weights; the hub's retries would be told in ten lines each."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    # Said once a block and rank: nobody here writes into what a block returned, and state is seldom gathered.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # A run of one process saves as one process: that is meant so.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # Where it is installed, saving a model imports it, and it would name the processor. It sets its own level.
    logging.getLogger("DeepSpeed").addFilter(_errors_only)
    # The profiler would say when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
