"""Texts of one made-up language are familiar to somebody who has read it, others are not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from common.familiarity import Familiarity, beginnings, fit
from common.problem_types import REGRESSION, SINGLE_LABEL, ProblemType

VOCABULARY = 500
CLS, SEP = 0, 1


def texts(count: int, seed: int, grammar: int = 1) -> list[list[int]]:
    """Each token determines six that may follow it; which, depends on the ``grammar``."""
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(5, 40, count):
        words = [int(rng.integers(2, VOCABULARY))]
        for choice in rng.integers(0, 6, length - 1):
            words.append(2 + (words[-1] * 31 * grammar + 7 * int(choice)) % (VOCABULARY - 2))
        found.append([CLS, *words, SEP])
    return found


def scores(count: int, level: float = 4.0) -> NDArray[np.float64]:
    return np.random.default_rng(3).normal(size=(count, 3)) + level


def flat(ids: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return np.concatenate(ids).astype(np.int32), np.array([len(one) for one in ids], dtype=np.int32)


@pytest.fixture(scope="module", params=[SINGLE_LABEL, REGRESSION], ids=["labels", "number"])
def familiarity(request: pytest.FixtureRequest) -> Familiarity:
    kind: ProblemType = request.param
    held = texts(1000, seed=2)
    samples = [(held, scores(1000)), (beginnings(held), scores(1000))]
    return Familiarity(*fit(kind, texts(3000, seed=1), samples, VOCABULARY), kind)


def test_ordinary_texts_are_flagged_as_often_as_the_limit_says(familiarity: Familiarity) -> None:
    found = familiarity.of(*flat(texts(2000, seed=4)), scores(2000))
    assert np.mean(found < familiarity.limit) == pytest.approx(0.01, abs=0.012)
    assert np.mean(found < 0.5) == pytest.approx(0.5, abs=0.05)


def test_texts_in_another_grammar_of_the_same_words_are_foreign(familiarity: Familiarity) -> None:
    found = familiarity.of(*flat(texts(500, seed=4, grammar=3)), scores(500))
    assert np.mean(found < familiarity.limit) > 0.85


def test_short_texts_are_judged_as_short_ones(familiarity: Familiarity) -> None:
    short = [[*one[:6], SEP] for one in texts(2000, seed=5)]
    assert np.mean(familiarity.of(*flat(short), scores(2000)) < 0.05) == pytest.approx(0.05, abs=0.04)


def test_texts_that_no_label_fits_are_foreign() -> None:
    held = texts(1000, seed=2)
    record, table = fit(SINGLE_LABEL, texts(3000, seed=1), [(held, scores(1000))], VOCABULARY)
    familiarity = Familiarity(record, table, SINGLE_LABEL)
    assert np.mean(familiarity.of(*flat(texts(500, seed=4)), scores(500, level=-4.0)) < 0.01) > 0.95


def test_a_text_is_as_familiar_on_its_own_as_among_others(familiarity: Familiarity) -> None:
    ids, given = [*texts(50, seed=6), [CLS, SEP], [CLS, 7, SEP], [CLS, 7, 9, SEP]], scores(53)
    together = familiarity.of(*flat(ids), given)
    for place, one in enumerate(ids):
        alone = familiarity.of(*flat([one]), given[place : place + 1])
        assert alone[0] == together[place]
    assert np.isfinite(together).all()


def test_ids_that_no_training_text_could_have_are_foreign_and_no_error(familiarity: Familiarity) -> None:
    found = familiarity.of(*flat([[CLS, *range(VOCABULARY, VOCABULARY + 30), SEP]]), scores(1))
    assert found[0] < familiarity.limit


def test_a_table_of_another_length_is_refused() -> None:
    held = texts(200, seed=2)
    record, table = fit(SINGLE_LABEL, texts(1500, seed=1), [(held, scores(200))], VOCABULARY)
    with pytest.raises(ValueError, match="are expected"):
        Familiarity(record, table[:-1], SINGLE_LABEL)


def test_a_beginning_keeps_the_special_tokens_and_at_most_19_others() -> None:
    cut = beginnings(texts(300, seed=2))
    assert all(one[0] == CLS and one[-1] == SEP for one in cut)
    assert {len(one) - 2 for one in cut} <= set(range(4, 20))


def test_texts_of_a_single_word_are_judged_by_how_rare_it_is() -> None:
    words = [[CLS, 2 + number % 9, SEP] for number in range(1200)]
    record, table = fit(SINGLE_LABEL, words, [(words[:300], scores(300))], VOCABULARY)
    familiarity = Familiarity(record, table, SINGLE_LABEL)
    seen, unseen = familiarity.surprise(*flat([[CLS, 4, SEP], [CLS, 400, SEP]]))
    assert seen < unseen
