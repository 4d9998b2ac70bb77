from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from common.rows import SAMPLE_NEWS
from common.text import clean_text
from training.data.dataset import AG_NEWS_LABELS, TextData, load_data

AG_NEWS_FOLDER = Path(__file__).resolve().parents[3] / "shared/data/ag_news"
NEAR = 0.5


@pytest.fixture(scope="module")
def sample() -> TextData:
    return load_data("sample")


def five_grams(text: str) -> frozenset[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return frozenset(tuple(words[i : i + 5]) for i in range(len(words) - 4))


def near_duplicates(texts: list[str]) -> list[tuple[int, int]]:
    """Pairs whose sets of word 5-grams have a Jaccard similarity over one half."""
    grams = [five_grams(text) for text in texts]
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, found in enumerate(grams):
        for gram in found:
            holders[gram].append(number)
    pairs = {(a, b) for numbers in holders.values() for a in numbers for b in numbers if a < b}
    return [(a, b) for a, b in sorted(pairs) if len(grams[a] & grams[b]) > NEAR * len(grams[a] | grams[b])]


def test_there_are_enough_texts_evenly_over_the_classes(sample: TextData) -> None:
    assert sample.label_names == AG_NEWS_LABELS
    for rows, least in ((sample.train, 1200), (sample.test, 400)):
        counts = [(rows.labels == label).sum() for label in range(4)]
        assert len(rows) >= least
        assert max(counts) <= 1.1 * min(counts)


def test_texts_are_as_long_as_a_headline_and_a_lead(sample: TextData) -> None:
    for text in sample.train.texts + sample.test.texts:
        assert 20 <= len(text.split()) <= 60, text


def test_texts_are_clean_as_they_stand(sample: TextData) -> None:
    for text in sample.train.texts + sample.test.texts:
        assert clean_text(text) == text


def test_no_two_texts_are_near_duplicates_within_or_across_the_splits(sample: TextData) -> None:
    texts = sample.train.texts + sample.test.texts

    found = near_duplicates(texts)

    assert [(texts[a], texts[b]) for a, b in found] == []


def test_near_duplicates_are_found_where_there_are_some() -> None:
    text = "Oil prices climbed to a record on Monday as refineries closed along the whole coast"

    assert near_duplicates([text, "Something else was said by others in a far away place", text + " again"]) == [(0, 2)]


def test_no_headline_comes_twice(sample: TextData) -> None:
    texts = sorted(" ".join(text.lower().split()[:6]) for text in sample.train.texts + sample.test.texts)

    assert [first for first, second in pairwise(texts) if first == second] == []


def test_rows_do_not_come_sorted_by_class(sample: TextData) -> None:
    changes = sum(first != second for first, second in pairwise(sample.train.labels.tolist()))

    assert changes > len(sample.train) / 2


def test_the_readme_tells_the_number_of_texts(sample: TextData) -> None:
    readme = (SAMPLE_NEWS / "README.md").read_text()

    for count in (len(sample.train) + len(sample.test), len(sample.train), len(sample.test)):
        assert f"{count:,}" in readme


@pytest.mark.skipif(not (AG_NEWS_FOLDER / "test.csv").is_file(), reason="the real AG News is not on this machine")
def test_a_model_fitted_on_the_sample_alone_reaches_70_percent_on_the_real_ag_news(sample: TextData) -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    # The test rows serve as both splits: nothing is fitted on them.
    real = load_data(str(AG_NEWS_FOLDER / "test.csv"))
    texts = [clean_text(text) for text in real.train.texts + real.test.texts]
    labels = [*real.train.labels, *real.test.labels]
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(C=10))

    model.fit(sample.train.texts, sample.train.labels)

    assert real.label_names == sample.label_names
    assert model.score(texts, labels) >= 0.70
