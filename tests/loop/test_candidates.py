"""Which texts are asked about, why, and that no text is asked about twice."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

from inference.observing.store import Feedback, KeptText, ShadowAnswer
from loop.candidates import DISAGREEING, SHADOW, UNCERTAIN, UNFAMILIAR, UNIFORM, Item, choose

WORDS = [f"word{i}" for i in range(400)]


def _texts(count: int = 1000, revision: str = "abc") -> list[KeptText]:
    """Kept texts, every fifth of them drawn uniformly."""
    draw = random.Random(0)
    return [
        KeptText(
            *(f"r{i}:0", float(i), "news", revision, "anonymous", " ".join(draw.choices(WORDS, k=12))),
            *("World", draw.random(), draw.random(), int(i % 5 == 0)),
        )
        for i in range(count)
    ]


def _said(text: KeptText, label: str, kind: str = "correction", author: str = "ann") -> Feedback:
    return Feedback(
        *(f"{text.id} {label} {author}", 1.0, "news", "abc", text.id, text.text, text.label, label),
        *("anonymous", author, kind, ""),
    )


def _shadow(text: KeptText, label: str = "Sports", confidence: float = 0.9, revision: str = "new") -> ShadowAnswer:
    return ShadowAnswer(text.id, text.text, revision, label, confidence)


def _of(items: list[Item], why: str) -> list[Item]:
    return [one for one in items if one.why == why]


def test_seven_tenths_are_uncertain_and_a_tenth_each_is_asked_for_another_reason() -> None:
    texts = _texts()
    corrected = [_said(one, "Sports") for one in texts[1:200:5]]

    items = choose(texts, corrected, 100)

    assert Counter(one.why for one in items) == {UNCERTAIN: 70, DISAGREEING: 10, UNFAMILIAR: 10, UNIFORM: 10}
    assert len({one.text for one in items}) == 100


def test_the_least_sure_are_asked_about() -> None:
    texts = _texts()
    confidence = {one.id: one.confidence for one in texts}

    asked = [confidence[one.request] for one in _of(choose(texts, [], 100), UNCERTAIN)]

    assert max(asked) < 0.15


def test_a_text_that_was_drawn_uniformly_is_asked_about_for_no_other_reason() -> None:
    texts = _texts()
    drawn = {one.id for one in texts if one.uniform}
    # The surest contradiction of all, in a text that was drawn.
    said = [_said(texts[0], "Sports"), _said(texts[0], "Business", author="bob")]

    items = choose(texts, said, 200)

    assert {one.request for one in _of(items, UNIFORM)} <= drawn
    assert not drawn & {one.request for one in items if one.why != UNIFORM}


def test_which_uniform_texts_are_asked_about_does_not_depend_on_the_answers() -> None:
    texts = _texts()
    others = [dataclasses.replace(one, confidence=1 - one.confidence, label="Sports") for one in texts]

    found = [{one.request for one in _of(choose(some, [], 100), UNIFORM)} for some in (texts, others)]

    assert found[0] == found[1]


def test_no_text_is_asked_about_twice_nor_again_after_its_review() -> None:
    texts = _texts(50)
    again = [dataclasses.replace(one, id=f"again {one.id}", text=f" {one.text.upper()}\n", uniform=0) for one in texts]
    first = choose([*texts, *again], [], 30)
    by_id = {one.id: one for one in (*texts, *again)}
    reviews = [_said(by_id[one.request], "World", "review") for one in first]

    rest = choose([*texts, *again], reviews, 100)

    assert len(first) == 30
    assert len(rest) == 20
    assert not {one.text.upper().strip() for one in first} & {one.text.upper().strip() for one in rest}


def test_a_user_a_second_model_and_another_revision_disagree() -> None:
    texts = [dataclasses.replace(one, confidence=0.999, familiarity=None, uniform=0) for one in _texts(40)]
    corrected = [_said(texts[3], "Sports"), _said(texts[4], "World")]
    second = [dataclasses.replace(texts[5], label="Business"), texts[6]]
    newer = dataclasses.replace(texts[7], id="new:0", revision="def", label="Business")

    found = _of(choose([*texts, newer], corrected, 40, second), DISAGREEING)

    assert {one.text for one in found} == {texts[i].text for i in (3, 5, 7)}


def test_a_tenth_are_texts_that_the_newest_candidate_answered_otherwise_the_surest_of_both_first() -> None:
    texts = _texts()
    others = [one for one in texts if not one.uniform]
    older = [_shadow(one, revision="older") for one in others[600:]]
    answers = [_shadow(one) for one in others[:300]] + [_shadow(one, "World") for one in others[300:600]]

    items = choose(texts, [], 100, shadows=[*answers, *older])

    asked = {one.request for one in _of(items, SHADOW)}
    surest = sorted(others[:300], key=lambda one: -min(one.confidence, 0.9))[:40]
    assert Counter(one.why for one in items) == {UNCERTAIN: 70, SHADOW: 10, UNFAMILIAR: 10, UNIFORM: 10}
    assert len(asked) == 10
    assert asked <= {one.id for one in surest}


def test_a_candidate_that_differs_about_a_drawn_text_is_no_reason_to_ask_about_it() -> None:
    texts = _texts(100)

    items = choose(texts, [], 100, shadows=[_shadow(one) for one in texts])

    assert {one.why for one in items if one.request in {one.id for one in texts if one.uniform}} == {UNIFORM}


def test_a_corrected_text_that_was_not_kept_is_asked_about() -> None:
    gone = KeptText("", 0.0, "news", "abc", "anonymous", "A text that only the user has", "World", 0.9, None, 0)

    [found] = choose([], [_said(gone, "Sports")], 20)

    assert (found.text, found.answered, found.why) == (gone.text, "World", DISAGREEING)


def test_unfamiliar_texts_are_unlike_one_another_and_unlike_what_was_reviewed() -> None:
    kinds = ("oil gas fuel", "goal cup match", "vote law court")
    texts = [
        KeptText(
            *(f"r{i}:0", 1.0, "news", "abc", "anonymous", f"{kinds[i % 3]} number{i}", "World"),
            *(0.99, 0.001 * i, 0),
        )
        for i in range(30)
    ]
    reviewed = [_said(dataclasses.replace(texts[0], text="oil gas fuel"), "World", "review")]

    found = _of(choose(texts, reviewed, 20), UNFAMILIAR)

    assert {one.text.rpartition(" ")[0] for one in found} == set(kinds[1:])


def test_what_one_reason_has_too_few_of_another_fills_up() -> None:
    few = _texts(30)

    assert len(choose(few, [], 30)) == 30
    assert choose([], [], 30) == []
