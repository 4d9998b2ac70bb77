from __future__ import annotations

import string
from collections.abc import Callable

import numpy as np
import pytest

from common.rows import JoinedText
from common.text import Text
from training.data.rough_text import (
    KINDS,
    first_part,
    first_words,
    rough_texts,
    rough_version,
    upper_case,
    with_typing_errors,
    without_punctuation,
)

TEXT = 'Ky. firm wins "record" grant, it said. The well-known peptide isn\'t cheap; nobody knows why.'
WORDS = " ".join(f"word{letter}" for letter in string.ascii_lowercase[:20])


@pytest.mark.parametrize(
    ("roughen", "text", "expected"),
    [
        (first_part, TEXT, 'Ky. firm wins "record" grant, it said.'),
        (first_part, "Shares fall again, as oil rises", "Shares fall again"),
        (first_part, "Rates rise - markets fall", "Rates rise - markets fall"),
        (first_part, "今日は雨です。明日は晴れ。", "今日は雨です。"),
        (first_part, "One clause only", "One clause only"),
        (first_part, JoinedText.of(["Chip maker cuts forecast", "It said so. Again."]), "Chip maker cuts forecast"),
        (first_part, JoinedText.of(["", "It said so today. Again."]), "It said so today. Again."),
        (upper_case, "Straße, naïve", "STRASSE, NAÏVE"),
        (without_punctuation, '"Well-known", he said; it isn\'t.', "Well known he said it isnt"),
        (without_punctuation, "???", "???"),
        (first_words, WORDS, " ".join(WORDS.split()[:10])),
        (first_words, "short", "short"),
    ],
)
def test_a_text_is_made_rough(roughen: Callable[[Text, int, int], Text], text: str, expected: str) -> None:
    assert roughen(text, 0, 0) == expected


@pytest.mark.parametrize("seed", range(20))
def test_one_word_in_ten_has_a_typing_error_of_one_letter(seed: int) -> None:
    rough = with_typing_errors(WORDS, seed, 3)

    wrong = [(one, other) for one, other in zip(WORDS.split(), rough.split(), strict=True) if one != other]
    assert len(wrong) == 2
    assert all(abs(len(one) - len(other)) <= 1 for one, other in wrong)


@pytest.mark.parametrize("text", ["", "a b c", "12 34", "???", "aaa", "🙂🙂🙂"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_which_nothing_can_be_changed_stays_and_none_becomes_empty(kind: str, text: str) -> None:
    rough = KINDS[kind](text, 0, 0)

    assert bool(rough) == bool(text)


@pytest.mark.parametrize("kind", KINDS)
def test_both_texts_of_a_pair_are_changed_by_seed_and_row_alone(kind: str) -> None:
    pair = (f"{TEXT} {WORDS}", f"{WORDS}, and so on")

    once, again = (KINDS[kind](pair, 5, 7) for _ in range(2))

    assert once == again
    assert all(one != before for one, before in zip(once, pair, strict=True))


def test_equal_texts_of_other_rows_or_seeds_get_other_typing_errors() -> None:
    assert len({with_typing_errors(WORDS, seed, row) for seed in range(3) for row in range(3)}) == 9


def test_a_training_text_gets_the_same_rough_version_wherever_it_is_made() -> None:
    texts = [JoinedText.of([f"Title number {i}", f"what it says, at length {i}. And more."]) for i in range(200)]
    rough = rough_texts(texts, np.arange(0, 200, 2), 7, str)

    assert list(rough) == [rough_version(texts[row], 7, row) for row in range(0, 200, 2)]
    assert rough[3:9] == [rough[i] for i in range(3, 9)]
    assert all(one != text for one, text in zip(rough, texts[::2], strict=True))
    titles = sum(one.lower().startswith("title number") and len(one) < 20 for one in rough)
    assert 30 < titles < 80  # about half of them


def test_rough_texts_are_made_of_cleaned_ones() -> None:
    text = JoinedText.of(["A &amp; B merge at last", "It was said."])
    rough = rough_texts([text], np.array([0]), 1, lambda part: part.replace("&amp;", "and"))

    assert "amp" not in rough[0].lower()
