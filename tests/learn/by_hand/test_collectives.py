"""The collectives on small numbers: what the guide shows of them is what ranks hold."""

from collections.abc import Callable
from typing import Any

import pytest

from learn.by_hand import collectives
from tests.deployment.documented import documented
from tests.docs.pages import shown_after
from tests.docs.test_commands import is_excerpt
from tests.learn.by_hand.printed import printed_by

GUIDE = "docs/DISTRIBUTED_TRAINING_GUIDE.md"


def test_four_ranks_print_what_the_guide_shows_and_rank_0_alone(run_on_ranks: Callable[..., list[Any]]) -> None:
    printed, *others = run_on_ranks(4, printed_by, collectives.show)

    assert is_excerpt(shown_after(GUIDE, documented(GUIDE, "collectives")), printed)
    assert others == ["", "", ""]


@pytest.mark.parametrize("size", [2, 3])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_on_any_number_of_ranks(
    size: int, run_on_ranks: Callable[..., list[Any]]
) -> None:
    printed = run_on_ranks(size, printed_by, collectives.show)[0].split("\n\n")
    sums = {text.split(":")[0]: [line.split("->")[1].split() for line in text.splitlines()[1:]] for text in printed}

    total = [str(place * int("1" * size)) for place in range(1, size + 1)]
    assert sums["all_reduce"] == [total] * size
    assert sums["reduce_scatter"] == [[part] for part in total]
