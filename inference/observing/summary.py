"""What the store says about a served model: the last hour, day and week, and the alarm."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from inference.observing.estimates import FEWEST_REVIEWED, Reviewed, estimate, label_shares
from inference.observing.store import StoreError
from inference.observing.stream import ALARM_LASTS_S, Observer, Served, Watched

Counts = dict[tuple[str, str], tuple[int, float]]
WINDOWS = {"hour": 60, "day": 24 * 60, "week": 7 * 24 * 60}  # in minutes
# A window is read again after this share of it, an hour after 10 seconds: the rows of a week are
# too many to add them up each time.
_RENEWED = 1 / 360
_KINDS = ("texts", "distinct", "cell", "label", "unfamiliar", "familiarity", "abstained")


class Summaries:
    """Reads the store for `GET /model` and the metrics; any thread may ask."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str, str], tuple[float, dict[str, Any]]] = {}

    def of(self, served: Served) -> dict[str, Any]:
        """What is known of a model, with ``error`` if the store cannot be read."""
        watched = self._observer.watched(served)
        found: dict[str, Any] = {}
        if watched.reference is not None:
            found["reference_accuracy"] = watched.reference.accuracy
        try:
            with self._lock:
                for name, minutes in WINDOWS.items():
                    read = self._window
                    found[name] = self._renewed(watched, name, minutes * 60 * _RENEWED, read)
                if watched.alarm is not None:
                    found["alarm"] = self._renewed(watched, "alarm", 10.0, self._alarm)
        except StoreError as error:
            found["error"] = str(error)
        return found

    def _renewed(
        self,
        watched: Watched,
        name: str,
        seconds: float,
        read: Callable[[Watched, str], dict[str, Any]],
    ) -> dict[str, Any]:
        key = (*watched.key, name)
        then, known = self._known.get(key, (float("-inf"), {}))
        if time.monotonic() - then >= seconds:
            known = read(watched, name)
            if len(self._known) > 1_000:  # of models that were replaced
                self._known.clear()
            self._known[key] = time.monotonic(), known
        return known

    def _window(self, watched: Watched, name: str) -> dict[str, Any]:
        until = int(time.time() // 60) + 1
        since = until - WINDOWS[name]
        counts = self._observer.store.counts(*watched.key, since, until, _KINDS)
        texts = counts.get(("texts", ""), (0, 0.0))[0]
        found: dict[str, Any] = {"texts": texts, **_described(watched, counts, texts)}
        if watched.why_not:
            return found | {"reason": watched.why_not}
        cells = {int(key): one for (kind, key), one in counts.items() if kind == "cell"}
        unfamiliar = counts.get(("unfamiliar", ""), (0, 0.0))[0]
        reviewed = self._reviewed(watched, since * 60)
        known = estimate(watched.reference, cells, reviewed, unfamiliar)
        if known.value is None:
            return found | {"reason": known.reason}
        figures = {"accuracy": known.value, "low": known.low, "high": known.high}
        return found | figures | {"reviewed": known.reviewed}

    def _reviewed(self, watched: Watched, since: float) -> list[Reviewed]:
        """The texts of the window that were drawn uniformly and reviewed; the last review counts."""
        model, revision = watched.key
        if watched.reference is None:
            return []
        labels = {
            one.request: one.label
            for one in self._observer.store.feedback(model, since)
            if one.kind == "review" and one.why == "uniform" and one.revision == revision
        }
        if len(labels) < FEWEST_REVIEWED:
            return []
        found = []
        for id, label in labels.items():
            text = self._observer.store.text(id)
            if text is None or not text.uniform or text.at < since:
                continue
            answered = watched.answering.labels.index(text.label)
            cell = watched.reference.cell(answered, text.confidence)
            found.append((cell, text.confidence, text.label == label, 1.0))
        return found

    def _alarm(self, watched: Watched, _: str) -> dict[str, Any]:
        assert watched.alarm is not None
        known = json.loads(self._observer.store.alarm(*watched.key) or "{}")
        games = known.get("games") if known.get("reference") == watched.identity else None
        state = watched.alarm.start(json.dumps(games) if games else None)
        found: dict[str, Any] = {
            "active": games is not None and time.time() - known["raised"] < ALARM_LASTS_S,
            "evidence": state.evidence,
            "by_score": state.evidence_by_score(),
            "texts": 16 * state.chunks,
        }
        if games is not None and known["raised"]:
            found |= {"raised": known["raised"], "what": known["told"]}
        return found


def _described(watched: Watched, counts: Counts, texts: int) -> dict[str, Any]:
    """The shares that need no estimate, and those of the labels behind the answers."""
    if not texts:
        return {}
    labels = {key: n for (kind, key), (n, _) in counts.items() if kind == "label"}
    found: dict[str, Any] = {
        "distinct": counts.get(("distinct", ""), (0, 0.0))[0],
        "labels": {label: n / texts for label, n in sorted(labels.items())},
    }
    if any(kind == "familiarity" for kind, _ in counts):
        found["unfamiliar"] = counts.get(("unfamiliar", ""), (0, 0.0))[0] / texts
    if number := counts.get(("abstained", ""), (0, 0.0))[0]:
        found["abstained"] = number / texts
    names = watched.answering.labels
    answered = {names.index(label): n for label, n in labels.items() if label in names}
    if (shares := label_shares(watched.reference, answered)) is not None:
        found["label_shares"] = dict(zip(names, shares, strict=True))
    return found
