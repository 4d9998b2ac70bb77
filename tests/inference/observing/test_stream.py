"""What one process counts of its stream, without a server around it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inference.batching.cache import FamiliarityOfPass, Values, values_of
from inference.engines.answering import NOTHING_MORE, Answering, OneLabelAnswering, SeveralLabelsAnswering
from inference.engines.base import TokenBatch
from inference.engines.model_loader import ModelLoader
from inference.metrics import ModelMetrics
from inference.observing.store import ShadowAnswer, Store
from inference.observing.stream import InShadow, Observer, Watched
from inference.observing.summary import Summaries
from tests.processes import REPOSITORY, wait_until

LABELS = ["World", "Sports", "Business", "Sci/Tech"]
REFERENCE = json.loads((REPOSITORY / "checkpoints" / "news" / "manifest.json").read_text())["reference"]
AT_ONCE = (0.01, 0.02, 0.05)
SURE, UNSURE = (0.99, 0.005, 0.003, 0.002), (0.1, 0.4, 0.3, 0.2)


class _Values(Values):
    familiarity: float | None = 0.5


@dataclass
class _Served:
    """What `Served` holds of a model."""

    name: str = "news"
    answering: Answering = field(default_factory=lambda: OneLabelAnswering(LABELS))
    reference: dict[str, Any] = field(default_factory=lambda: REFERENCE)
    cascade: object = None
    metrics: ModelMetrics = field(default_factory=ModelMetrics)
    wanted: object = NOTHING_MORE

    @property
    def model(self) -> SimpleNamespace:
        info = {"name": self.name, "revision": "abc"}
        return SimpleNamespace(info=info, answering=self.answering, reference=self.reference, cascade=self.cascade)


def _answer(values: tuple[float, ...] = SURE, num_tokens: int = 40, familiarity: float = 0.5) -> SimpleNamespace:
    found = _Values(values, values)
    found.familiarity = familiarity
    return SimpleNamespace(values=found, num_tokens=num_tokens)


def _value(served: _Served, name: str) -> float:
    return served.metrics.registry.get_sample_value(f"distrinews_{name}") or 0.0


@contextmanager
def _observing(
    path: Path | str,
    keep_texts_s: float = 0.0,
    served: _Served | None = None,
    report: Callable[[_Served], None] = lambda _: None,
) -> Iterator[Observer]:
    observer = Observer(str(path), keep_texts_s, 2**30, lambda: [served] if served else [], report, AT_ONCE)
    observer.start()
    try:
        yield observer
    finally:
        observer.close()


def _counts(path: Path | str, *kinds: str) -> dict[tuple[str, str], tuple[int, float]]:
    store = Store(str(path))
    try:
        return store.counts("news", "abc", 0, 2**40, kinds)
    finally:
        store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "observed.sqlite"


def test_texts_are_counted_by_what_was_answered_and_who_asked(path: Path) -> None:
    served = _Served()
    with _observing(path) as observer:
        observer.saw(served, "a", "ann", ["one", "two"], [_answer(), _answer(UNSURE, 7, 0.001)])
        observer.saw(served, "b", "bob", ["one"], [_answer()])

    counts = _counts(path)
    # As the reference has it: label x 10 + tenth of the confidence.
    sure, unsure = str(observer.watched(served).reference.cell(0, 0.99)), "10"
    assert counts == {
        ("texts", ""): (3, 0.0),
        ("distinct", ""): (2, 0.0),
        ("caller", "ann"): (2, 0.0),
        ("caller", "bob"): (1, 0.0),
        ("label", "World"): (2, 0.0),
        ("label", "Sports"): (1, 0.0),
        ("length", "6"): (2, 0.0),
        ("length", "3"): (1, 0.0),
        ("familiarity", "5"): (2, 0.0),
        ("familiarity", "0"): (1, 0.0),
        ("unfamiliar", ""): (1, 0.0),
        ("cell", sure): (2, 1.98),
        ("cell", unsure): (1, 0.4),
    }
    assert _value(served, "observed_texts_total") == 3


def test_a_model_of_several_labels_is_only_counted_and_that_is_said(path: Path) -> None:
    several = SeveralLabelsAnswering(LABELS, [0.5] * 4)
    served = _Served(answering=several, reference={})
    with _observing(path) as observer:
        observer.saw(served, "a", "ann", ["one"] * 60, [_answer((0.9, 0.8, 0.1, 0.1))] * 60)

    counts = _counts(path, "label", "cell", "distinct")
    assert counts == {("label", "World"): (60, 0.0), ("label", "Sports"): (60, 0.0), ("distinct", ""): (1, 0.0)}
    summary = Summaries(observer).of(served)
    assert summary["hour"]["labels"] == {"World": 1.0, "Sports": 1.0}
    assert summary["hour"]["reason"] == "only models that give one label have a reference to compare with"
    assert "alarm" not in summary


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"reference": {}}, "the model has no reference to compare with: export it again, with labelled rows"),
        (
            {"reference": {}, "cascade": object()},
            "a cascade has no reference to compare with, because two models answer",
        ),
        ({"reference": {"version": 9}}, "the reference in manifest.json has version 9, this program reads version 1"),
    ],
)
def test_a_model_without_a_reference_is_counted_and_the_reason_is_given(
    path: Path, more: dict[str, Any], reason: str
) -> None:
    served = _Served(**more)
    with _observing(path) as observer:
        observer.saw(served, "a", "ann", ["one"], [_answer()])

    assert reason in Summaries(observer).of(served)["day"]["reason"]


def test_the_estimate_of_a_stream_like_the_reference_is_the_accuracy_of_the_reference(path: Path) -> None:
    served = _Served()
    observer = Observer(str(path), 0.0, 2**30)
    watched = observer.watched(served)
    tally = watched.tallies[int(time.time() // 60)]
    for (label, place, rows, _, total), answered in zip(REFERENCE["cells"], REFERENCE["cells"], strict=True):
        tally.numbers["cell", label * 10 + place] = rows
        tally.totals["cell", label * 10 + place] = total
        tally.numbers["label", LABELS[label]] += answered[2]
        tally.numbers["texts", ""] += rows
    observer.start()
    observer.close()
    summary = Summaries(observer).of(served)

    assert summary["hour"]["texts"] == REFERENCE["rows"]
    assert summary["hour"]["accuracy"] == pytest.approx(REFERENCE["accuracy"], abs=0.005)
    assert summary["hour"]["low"] < REFERENCE["accuracy"] < summary["hour"]["high"]
    assert sum(summary["week"]["label_shares"].values()) == pytest.approx(1.0)
    served.metrics.saw(summary)
    page = served.metrics.registry
    shown = page.get_sample_value("distrinews_estimated_accuracy", {"window": "day"})
    assert shown == summary["day"]["accuracy"]
    # Once it is unknown again, the old figure is not shown.
    served.metrics.saw({"day": {"texts": 3}})
    assert page.get_sample_value("distrinews_estimated_accuracy", {"window": "day"}) is None


def test_short_texts_raise_an_alarm_that_says_so_and_repeats_do_not(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = _Served()
    caplog.set_level(logging.WARNING)
    with _observing(path, served=served) as observer:
        observer.saw(served, "a", "ann", ["the same"] * 2000, [_answer(num_tokens=4)] * 2000)
    assert not Summaries(observer).of(served)["alarm"]["active"]
    with _observing(path, served=served) as observer:
        observer.saw(served, "b", "bob", [str(number) for number in range(2000)], [_answer(num_tokens=4)] * 2000)

    alarm = Summaries(observer).of(served)["alarm"]
    assert alarm["active"]
    assert "more texts are short" in alarm["what"]
    assert sum("drift alarm for news abc: more texts are short" in one for one in caplog.messages) == 1


def test_evidence_of_several_processes_adds_up_and_a_new_reference_begins_from_nothing(path: Path) -> None:
    served = _Served()
    for process in range(2):
        with _observing(path) as observer:
            texts = [f"{process} {number}" for number in range(48)]
            observer.saw(served, "a", "ann", texts, [_answer()] * 48)
        assert Summaries(observer).of(served)["alarm"]["texts"] == 48 * (process + 1)
    again = _Served(reference={**REFERENCE, "accuracy": 0.5})
    with _observing(path) as observer:
        assert Summaries(observer).of(again)["alarm"]["texts"] == 0
        observer.saw(again, "a", "ann", [str(number) for number in range(16)], [_answer()] * 16)
    assert Summaries(observer).of(again)["alarm"]["texts"] == 16


def test_texts_that_do_not_fit_are_not_counted_and_that_is_counted(path: Path) -> None:
    served = _Served()
    observer = Observer(str(path), 0.0, 2**30)  # not started, so that all wait
    for _ in range(70):
        observer.saw(served, "a", "ann", ["one"] * 1000, [_answer()] * 1000)

    assert _value(served, "unseen_texts_total") == 5000
    observer.start()
    observer.close()
    assert _counts(path, "texts") == {("texts", ""): (65_000, 0.0)}


def test_long_texts_that_may_be_kept_wait_within_a_bound_of_characters(path: Path) -> None:
    served, text = _Served(), "a" * 20_000
    observer = Observer(str(path), 3600.0, 2**30)
    for _ in range(20):
        observer.saw(served, "a", "ann", [text] * 100, [_answer()] * 100)

    assert _value(served, "unseen_texts_total") == 400


def test_what_cannot_be_written_is_written_later_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served, folder = _Served(), tmp_path / "missing"
    tries: list[_Served] = []
    with _observing(folder / "observed.sqlite", 60.0, served, tries.append) as observer:
        observer.saw(served, "a", "ann", ["one", "two"], [_answer(), _answer()])
        wait_until(lambda: caplog.messages)
        observer.saw(served, "b", "ann", ["three"], [_answer()])
        seen = len(tries)
        wait_until(lambda: len(tries) > seen + 3)
        assert caplog.messages == [
            "what the server sees is not recorded, and waits: "
            f"{folder}/observed.sqlite: there is no folder {folder}; create it [observations-unusable]"
        ]
        assert "there is no folder" in Summaries(observer).of(served)["error"]
        folder.mkdir()
        wait_until(lambda: _value(served, "observed_texts_total") == 3)

    assert _counts(folder / "observed.sqlite", "texts") == {("texts", ""): (3, 0.0)}
    assert len(Store(str(folder / "observed.sqlite")).texts("news")) == 3


def test_minutes_that_wait_become_hours_and_days_and_lose_nothing() -> None:
    watched = Watched(_Served(), None)
    for minute in range(5 * 24 * 60):
        watched.tallies[minute].numbers["texts", ""] += 1
        watched.tallies[minute].totals["cell", 3] += 0.5
        watched.fold_tallies()

    assert len(watched.tallies) <= 121
    assert sum(number for number, _ in watched.counted().values() if number) == 5 * 24 * 60
    assert sum(tally.totals["cell", 3] for tally in watched.tallies.values()) == 5 * 24 * 60 / 2


def test_only_so_many_callers_are_named(path: Path) -> None:
    served = _Served()
    with _observing(path) as observer:
        for number in range(40):
            observer.saw(served, "a", f"caller {number}", ["one"], [_answer()])

    counts = _counts(path, "caller")
    assert len(counts) == 33
    assert counts["caller", "others"] == (8, 0.0)


def test_a_text_is_kept_only_if_it_may_be_and_goes_after_its_time(path: Path) -> None:
    served = _Served()
    with _observing(path) as observer:
        observer.saw(served, "a", "ann", ["a secret"], [_answer()])
    store = Store(str(path))
    assert not store.texts("news")
    assert not [one for one in path.parent.iterdir() if b"a secret" in one.read_bytes()]
    with _observing(path, keep_texts_s=600) as observer:
        observer.saw(served, "b", "ann", ["a secret", ("a", "pair")], [_answer(UNSURE), _answer()], first=3)
        wait_until(lambda: store.texts("news"))
        (kept,) = store.texts("news")
        assert (kept.id, kept.caller, kept.text, kept.label) == ("b:3", "ann", "a secret", "Sports")
        assert (kept.confidence, kept.familiarity) == (0.4, 0.5)
    with _observing(path, keep_texts_s=0.01):
        wait_until(lambda: not store.texts("news"))
    store.close()


def test_both_answers_to_a_text_are_kept_and_it_is_counted_once(path: Path) -> None:
    served = _Served()
    new = InShadow("new", "Business", 0.8)
    with _observing(path, keep_texts_s=600) as observer:
        observer.saw(served, "a", "ann", ["one", "two"], [_answer(), _answer(UNSURE)])
        observer.saw(served, "a", "ann", ["two"], [_answer(UNSURE)], first=1, in_shadow=new)

    store = Store(str(path))
    assert {one.id: one.label for one in store.texts("news")} == {"a:0": "World", "a:1": "Sports"}
    assert store.shadows("news") == [ShadowAnswer("a:1", "two", *new)]
    assert _counts(path, "texts", "label") == {("texts", ""): (2, 0.0), ("label", "World"): (1, 0.0)} | {
        ("label", "Sports"): (1, 0.0)
    }
    store.close()


def test_the_familiarity_of_several_passes_at_once_is_that_of_each_to_the_bit() -> None:
    model = ModelLoader(REPOSITORY / "checkpoints" / "news")
    texts = ["Shares fall on Wall Street", "Goal!", "zxcv qwer", "Ministers meet in Geneva for talks on a cease-fire."]
    encoded = [one.ids for one in model.tokenizer.encode(texts)]

    def passes() -> list[list[Values]]:
        batches = [TokenBatch.of(encoded[:1]), TokenBatch.of(encoded[1:]), TokenBatch.of(encoded)]
        return [values_of(model.answering, batch, model.engine.logits(batch, 1)) for batch in batches]

    alone = [[one.familiarity for one in values] for values in passes()]
    together = passes()
    together[1][0].familiarity  # noqa: B018  (this pass is known already)
    FamiliarityOfPass.compute([values[0].of_pass for values in together])

    assert [vars(values[0].of_pass)["values"] for values in together] == alone
    assert len(set(alone[2])) == 4
