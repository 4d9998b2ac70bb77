"""Which texts are kept for review."""

from __future__ import annotations

import random
from dataclasses import replace

from inference.observing.kept_texts import PER_HOUR, Sample
from inference.observing.store import KeptText

HOUR = 3600.0


def _candidate(number: int, at: float = 0.0, confidence: float = 0.9, familiarity: float = 0.5) -> KeptText:
    return KeptText(f"r{number}:0", at, "news", "abc", "anonymous", "Shares fall", "World", confidence, familiarity)


def _kept(sample: Sample, candidates: list[KeptText], times: int = 1) -> dict[str, KeptText]:
    """What is in the store in the end, if texts are taken so many times."""
    kept: dict[str, KeptText] = {}
    for part in range(times):
        for one in candidates[part::times]:
            sample.offer(one)
        texts, undrawn = sample.take()
        kept |= {one.id: one for one in texts}
        kept |= {id: replace(kept[id], uniform=0) for id in undrawn}
    return kept


def test_few_texts_are_all_kept_and_about_a_tenth_of_them_is_drawn() -> None:
    kept = _kept(Sample(random.Random(0)), [_candidate(number) for number in range(800)], times=8)

    assert len(kept) == 800
    assert 50 <= sum(one.uniform for one in kept.values()) <= 110


def test_of_too_many_texts_the_least_sure_and_the_least_familiar_are_kept() -> None:
    unsure = [_candidate(number, confidence=0.4) for number in range(400)]
    foreign = [_candidate(number, familiarity=0.001) for number in range(400, 800)]
    usual = [_candidate(number) for number in range(800, 20_000)]
    candidates = [*unsure, *usual, *foreign]

    kept = _kept(Sample(random.Random(0)), candidates)

    assert kept.keys() >= {one.id for one in (*unsure, *foreign)}
    assert len(kept) < PER_HOUR


def test_a_text_that_a_candidate_answered_otherwise_is_kept_before_all_others_and_not_drawn_for_it() -> None:
    sample = Sample(random.Random(0))
    many = [_candidate(number, confidence=0.3) for number in range(4 * PER_HOUR)]
    sure = [_candidate(10**6 + number, confidence=0.99) for number in range(100)]
    for one in many + sure:
        sample.offer(one)
    drawn = {one.id for one in sure if one.id in sample._drawn}
    for one in sure:
        sample.offer_contradicted(one)

    kept = {one.id: one.uniform for one in sample.take()[0]}

    assert {id: kept[id] for one in sure if (id := one.id)} == {one.id: int(one.id in drawn) for one in sure}


def test_an_hour_has_its_texts_and_the_next_one_as_many_again() -> None:
    sample = Sample(random.Random(0))
    one, other = (
        [_candidate(start + n, at=HOUR * (hour + n / 40_000)) for n in range(40_000)]
        for hour, start in enumerate((0, 40_000))
    )

    first, second = _kept(sample, one), _kept(sample, other)

    assert PER_HOUR / 2 < len(first) <= 1.4 * PER_HOUR
    assert PER_HOUR / 2 < len(second) <= 1.4 * PER_HOUR


def test_every_text_of_an_hour_has_the_same_chance_to_be_drawn_however_many_come() -> None:
    # Doubtful texts come first: what is kept for its interest must not count as drawn.
    candidates = [_candidate(number, confidence=0.3 if number < 10_000 else 0.9) for number in range(40_000)]
    generator = random.Random(0)
    drawn = [
        int(one.id[1:-2])
        for _ in range(10)
        for one in _kept(Sample(generator), candidates, times=20).values()
        if one.uniform
    ]

    assert 10 * 80 < len(drawn) <= 10 * 200
    # A quarter of them, within four standard deviations.
    share = sum(number < 10_000 for number in drawn) / len(drawn)
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / len(drawn)) ** 0.5


def test_a_text_that_no_database_takes_is_kept_without_what_it_cannot_hold() -> None:
    one = replace(_candidate(1), text="half \ud83d and null \0" + "a" * 30_000)

    kept = _kept(Sample(random.Random(0)), [one])[one.id]

    assert kept.text.startswith("half ? and null \ufffdaaa")
    assert len(kept.text) == 20_000
