import pytest

from benchmarks.sequence_parallel import Case, count
from tests.training.parallelism.small_models import FAMILIES, small_config

ROWS, LENGTH, WIDTH, FLOAT = 4, 16, 32, 4


@pytest.mark.parametrize("family", FAMILIES)
def test_cutting_the_sequence_keeps_less_with_twice_the_calls_of_half_the_bytes(family: str) -> None:
    case = Case(family, small_config(family, dropout=0.1), ROWS, LENGTH)

    alone, no_calls = count(case, 1, sequence_parallel=False)
    plain, calls = count(case, 2, sequence_parallel=False)
    cut, calls_cut = count(case, 2, sequence_parallel=True)

    assert (no_calls, calls, calls_cut) == (0, 4, 8)
    # A norm keeps its input whole without, half of it with; a block has two.
    assert plain - cut >= ROWS * LENGTH * WIDTH * FLOAT
    assert alone / 2 < plain < alone
