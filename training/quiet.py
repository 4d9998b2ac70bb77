"""Silence what libraries say while they load, so that a person sees what the run says."""

from __future__ import annotations

from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Errors only, no bars for reading weights; the hub's retries would be told in ten lines each."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
