"""The ranks and processes that training's tests start, for the teaching path's."""

from tests.training.conftest import base_flags, launch, run_on_ranks, start

__all__ = ["base_flags", "launch", "run_on_ranks", "start"]
