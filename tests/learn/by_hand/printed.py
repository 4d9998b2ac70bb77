"""What a demonstration prints, rank by rank."""

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO

from tests.processes import here
from training.distributed.ranks import Ranks


def printed_by(show: Callable[[Ranks], None]) -> str:
    """Run a demonstration on this rank and return what it printed; to be called on all ranks."""
    with redirect_stdout(StringIO()) as printed:
        show(here())
    return printed.getvalue()
