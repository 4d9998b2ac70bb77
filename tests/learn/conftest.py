"""The ranks and processes that training's tests start, for the teaching path's."""

import pytest

from tests.processes import start_fork_server
from tests.training.conftest import base_flags, fixture_run_on_ranks, launch, start

__all__ = ["base_flags", "fixture_run_on_ranks", "launch", "start"]


@pytest.fixture(scope="session", autouse=True)
def _fork_server_of_all_tests() -> None:
    """A process has one fork server, and who starts it chooses its imports: ranks of other tests need more of them."""
    start_fork_server()
