from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.problem_types import SINGLE_LABEL
from inference.engines.base import PADDED_TEXTS, RAGGED_TOKENS, forward_passes

LENGTHS = st.lists(st.integers(1, 512), max_size=200)


@given(LENGTHS, st.booleans())
def test_every_text_is_in_one_pass(lengths: list[int], pads: bool) -> None:
    passes = forward_passes(lengths, pads=pads)
    assert sorted(i for one in passes for i in one) == list(range(len(lengths)))
    assert all(passes)


@given(LENGTHS)
def test_a_padding_engine_gets_few_texts_of_similar_length(lengths: list[int]) -> None:
    passes = [[lengths[i] for i in one] for one in forward_passes(lengths, pads=True)]
    assert all(len(one) <= PADDED_TEXTS for one in passes)
    assert [length for one in passes for length in one] == sorted(lengths)


@given(LENGTHS)
def test_an_engine_without_padding_gets_texts_in_order_within_the_token_budget(lengths: list[int]) -> None:
    passes = forward_passes(lengths, pads=False)
    assert [i for one in passes for i in one] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in one) <= RAGGED_TOKENS for one in passes)


def test_huge_scores_do_not_overflow() -> None:
    probabilities = SINGLE_LABEL.answers(np.array([[1e30, 0.0], [5.0, 5.0]], dtype=np.float32))
    assert probabilities.tolist() == [[1.0, 0.0], [0.5, 0.5]]
