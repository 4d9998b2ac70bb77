"""An alarm that finds what has changed, and is silent as long as nothing has."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.observing.alarm import ALARM_AT, CHUNK, Alarm, AlarmState, ChunkCounts, explain
from inference.observing.reference import SCORES, TAILS, Reference

Texts = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]


def texts(num: int, draw: np.random.Generator) -> Texts:
    """Confidence, familiarity and length."""
    return draw.beta(8, 1, num) / 2 + 0.5, draw.random(num), 5 + draw.poisson(30, num)


def reference(draw: np.random.Generator, num: int = 2000, familiarity: bool = True) -> Reference:
    sure, familiar, lengths = texts(num, draw)
    record = Reference.fit(
        np.c_[sure, 1 - sure], np.zeros(num, dtype=np.int64), lengths, familiar if familiarity else None
    )
    found = Reference.of({"reference": record})
    assert found is not None
    return found


def chunks(alarm: Alarm, some: Texts) -> list[list[int]]:
    counts = ChunkCounts()
    for one in zip(*(values.tolist() for values in some), strict=True):
        counts.add(alarm.exceeded(*one))
    return counts.take()


def texts_until_alarm(state: AlarmState, some: Texts) -> int | None:
    for i, chunk in enumerate(chunks(state.alarm, some), 1):
        if state.add([chunk]) >= ALARM_AT:
            return i * CHUNK
    return None


def test_chunks_count_the_texts_that_reach_each_tail() -> None:
    draw = np.random.default_rng(0)
    known = reference(draw)
    some = texts(40, draw)
    found = chunks(Alarm(known), some)
    scores = dict(zip(SCORES, (1 - some[0], 1 - some[1], -some[2], some[2]), strict=True))
    assert len(found) == 2  # the last 8 texts wait for more
    for number, chunk in enumerate(found):
        part = slice(number * CHUNK, (number + 1) * CHUNK)
        assert chunk == [int((scores[s][part] >= least).sum()) for s in SCORES for least in known.tails[s]]


def test_no_game_pays_on_texts_like_those_of_the_reference() -> None:
    # The promise is about every reference, so each of these has texts that it has never seen.
    for seed in range(8):
        draw = np.random.default_rng(seed)
        alarm = Alarm(reference(draw))
        found = np.array(chunks(alarm, texts(40_000, draw)))
        mean = alarm.multiplied(found).mean(axis=0)
        # Of the smallest bets, since the mean of larger ones rests on few chunks.
        assert mean[:, 0].max() < 1.02


def test_a_hundred_thousand_texts_without_a_change_raise_no_alarm() -> None:
    draw = np.random.default_rng(1)
    state = Alarm(reference(draw)).start()
    assert state.add(chunks(state.alarm, texts(100_000, draw))) < ALARM_AT / 10
    assert (state.alarms, state.chunks) == (0, 6250)


@pytest.mark.parametrize("what", SCORES)
def test_a_change_in_a_fifth_of_the_texts_is_found_and_named(what: str) -> None:
    draw = np.random.default_rng(2)
    state = Alarm(reference(draw)).start()
    state.add(chunks(state.alarm, texts(5_000, draw)))
    sure, familiar, lengths = texts(1_000, draw)
    changed = draw.random(1_000) < 0.2
    new = {
        "uncertain": (np.where(changed, 0.51, sure), familiar, lengths),
        "unfamiliar": (sure, np.where(changed, 0.001, familiar), lengths),
        "short": (sure, familiar, np.where(changed, 4, lengths)),
        "long": (sure, familiar, np.where(changed, 90, lengths)),
    }[what]
    found = texts_until_alarm(state, new)
    assert found is not None
    assert found <= 256
    assert state.what == what


def test_after_an_alarm_the_games_begin_from_scratch() -> None:
    draw = np.random.default_rng(3)
    state = Alarm(reference(draw)).start()
    sure, familiar, lengths = texts(1_600, draw)
    strange = chunks(state.alarm, (sure, np.full_like(familiar, 0.001), lengths))
    assert state.add(strange[:20]) >= ALARM_AT
    assert state.alarms >= 1
    assert state.add([]) == 0.0
    alarms = state.alarms
    assert state.add(strange) >= ALARM_AT  # a change that stays is reported again
    assert state.alarms > alarms


def test_a_restart_and_several_processes_lose_nothing() -> None:
    draw = np.random.default_rng(4)
    alarm = Alarm(reference(draw))
    found = chunks(alarm, texts(3_200, draw))
    whole, state = alarm.start(), alarm.start()
    whole.add(found)
    for i in range(0, len(found), 10):  # each flush of a process reads the state and writes it back
        state.add(found[i : i + 10])
        state = alarm.start(state.to_json())
    assert state.chunks == whole.chunks == 200
    assert state.what == whole.what
    np.testing.assert_allclose(state.money, whole.money, rtol=1e-4)


def test_the_state_of_another_model_is_refused_in_one_line() -> None:
    draw = np.random.default_rng(5)
    saved = Alarm(reference(draw)).start().to_json()
    with pytest.raises(ValueError, match="the saved state has 80 games, this model plays 60"):
        Alarm(reference(draw, familiarity=False)).start(saved)


def test_a_text_without_familiarity_reaches_no_tail_of_it() -> None:
    alarm = Alarm(reference(np.random.default_rng(6)))
    counts = ChunkCounts()
    for _ in range(CHUNK):
        counts.add(alarm.exceeded(0.5, None, 3))
    [chunk] = counts.take()
    assert chunk[len(TAILS) : 2 * len(TAILS)] == [0] * len(TAILS)
    assert chunk[: len(TAILS)] == [CHUNK] * len(TAILS)


def test_a_reference_without_tails_never_alarms() -> None:
    record = Reference.fit(np.full((150, 2), 0.5), np.zeros(150, dtype=np.int64), np.full(150, 9))
    known = Reference.of({"reference": record})
    assert known is not None
    state = Alarm(known).start()
    counts = ChunkCounts()
    for _ in range(CHUNK):
        counts.add(state.alarm.exceeded(0.5, 0.0, 1))
    assert state.add(counts.take()) == 0.0


def test_what_has_moved_is_told_in_one_line() -> None:
    labels = ({"World": 20, "Sports": 300}, {"World": 2000, "Sports": 2000})
    callers = ({"shop": 160, "app": 160}, {"shop": 1990, "app": 2010})
    assert explain("short", {"label": labels, "caller": callers}) == (
        "more texts are short; label Sports: 50% of texts before, 94% now"
    )
    assert explain("", {"label": ({"World": 3}, {"World": 50, "Sports": 50})}) == ""
    assert explain("", {"caller": ({}, {"app": 5})}) == ""
