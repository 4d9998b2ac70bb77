"""What a server sees of its own stream: counts of the texts that it answers, in the store.

The event loop only appends to a queue, once per call. A thread takes what is there a few times per
second, counts it, and every five seconds adds the counts to the store. If the store fails, counts
wait here, ever more coarsely, and answers go on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import random
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from common.problem_types import SINGLE_LABEL
from common.text import Text, num_chars
from inference.observing.alarm import ALARM_AT, Alarm, ChunkCounts, explain
from inference.observing.failures import FailureLog
from inference.observing.kept_texts import PER_HOUR, Sample, text_to_keep
from inference.observing.reference import Reference
from inference.observing.store import Counted, KeptText, ShadowAnswer, Store

logger = logging.getLogger(__name__)

UNFAMILIAR_BELOW = 0.01
ALARM_LASTS_S = 24 * 3600
OTHERS = "others"
# Texts, and characters of them, that may wait to be counted.
_MOST_WAITING = 65_536
_MOST_WAITING_CHARS = 2**25
# Texts that are remembered, to know which ones come again.
_MOST_REMEMBERED = 65_536
_MOST_CALLERS = 32
# While the store fails: chunks for the alarm, and tallies, that wait.
_MOST_CHUNKS = 4_096
_MOST_TALLIES = 120
_FOLDED_AT_ONCE = 256  # texts
_FOLD_S, _FLUSH_S, _TIDY_S = 0.25, 5.0, 60.0
_END_S = 15.0
# Minutes within which "now" lies, of a line that says what has moved.
_NOW_MINUTES = 10
_DAY_MINUTES = 24 * 60


class Answer(Protocol):
    values: Any  # what the model answers, in the order of its labels, with its `familiarity`
    num_tokens: int


class Metrics(Protocol):
    def observed(self, texts: int) -> None: ...
    def unseen(self, texts: int) -> None: ...


class Served(Protocol):
    """A model that answers, as `inference.batching.served_model.Served`."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> Any: ...
    @property
    def metrics(self) -> Any: ...
    @property
    def wanted(self) -> Any: ...


class InShadow(NamedTuple):
    """What a candidate in shadow answered to a text."""

    revision: str
    label: str
    confidence: float


class _Entry(NamedTuple):
    """The texts of one call. ``texts``: they themselves if they may be kept, else their hashes.

    ``in_shadow``: if the one text was counted before, and this is a candidate's answer to it.
    """

    at: float
    served: Served
    request_id: str
    caller: str
    first: int
    texts: Sequence[Text | int]
    answers: Sequence[Answer]
    num_chars: int
    in_shadow: InShadow | None


class _Tally:
    """Counts by kind and key, and for some the sum of what belongs to them."""

    def __init__(self) -> None:
        self.numbers: defaultdict[tuple[str, Any], int] = defaultdict(int)
        self.totals: defaultdict[tuple[str, Any], float] = defaultdict(float)

    def merge(self, other: _Tally) -> None:
        for key, number in other.numbers.items():
            self.numbers[key] += number
        for key, total in other.totals.items():
            self.totals[key] += total


class Watched:
    """One revision of a model, and what has been counted of it since the last flush."""

    def __init__(self, served: Served, generator: random.Random) -> None:
        model = served.model
        self.key = served.name, model.info["revision"]
        self.salt = hash(self.key)
        self.answering = model.answering
        self.metrics: Metrics = served.metrics
        self.reference, self.why_not = _reference_of(model)
        self.alarm = Alarm(self.reference) if self.reference else None
        # A state belongs to a reference: calibrated again, the same weights play other games.
        self.identity = f"{_hash_of(model.reference):016x}" if self.alarm else ""
        self.tallies: defaultdict[int, _Tally] = defaultdict(_Tally)  # by minute
        self.sample = Sample(generator)
        self.in_shadow: deque[ShadowAnswer] = deque(maxlen=PER_HOUR)
        self.chunks: deque[list[int]] = deque(maxlen=_MOST_CHUNKS)
        self._counts = ChunkCounts()

    def count(self, entry: _Entry, answer: Answer, *, is_new: bool, caller: str) -> None:
        values = answer.values
        familiarity = values.familiarity
        tally = self.tallies[int(entry.at // 60)]
        add = tally.numbers
        add["texts", ""] += 1
        add["caller", caller] += 1
        # 3 for 4 to 7 tokens, and so on: the number of binary digits.
        add["length", answer.num_tokens.bit_length()] += 1
        if is_new:
            add["distinct", ""] += 1
        if familiarity is not None:
            add["familiarity", min(9, int(10 * familiarity))] += 1
            if familiarity < UNFAMILIAR_BELOW:
                add["unfamiliar", ""] += 1
        for label, _ in self.answering.given(values):
            add["label", label] += 1
        wanted = entry.served.wanted
        if wanted.point is not None and self.answering.honest(values, familiarity, wanted).get(
            "abstained"
        ):
            add["abstained", ""] += 1
        if self.reference is None or self.alarm is None:
            return
        confidence = max(values)
        cell = self.reference.cell(values.index(confidence), confidence)
        add["cell", cell] += 1
        tally.totals["cell", cell] += confidence
        # A text that comes a thousand times says no more about a change than once.
        if is_new:
            self._counts.add(self.alarm.exceeded(confidence, familiarity, answer.num_tokens))
            self.chunks += self._counts.take()

    def offer(self, entry: _Entry, place: int, answer: Answer, caller: str) -> None:
        """Let a text be kept. Pairs are only counted."""
        text = entry.texts[place]
        if not isinstance(text, str):
            return
        values = answer.values
        given = self.answering.given(values)
        if self.answering.problem_type is SINGLE_LABEL:
            label, confidence = given[0]
        else:
            # The least sure of several labels; about a number nothing is known.
            label = self.answering.joined([one for one, _ in given])
            sure = [max(one, 1 - one) for one in values if 0 <= one <= 1]
            confidence = min(sure) if len(sure) == len(self.answering.labels) > 1 else 1.0
        one = KeptText(
            *(f"{entry.request_id}:{entry.first + place}", entry.at, *self.key, caller),
            *(text, label, confidence, values.familiarity),
        )
        if entry.in_shadow is None:
            self.sample.offer(one)
            return
        self.in_shadow.append(ShadowAnswer(one.id, text_to_keep(text), *entry.in_shadow))
        if entry.in_shadow.label != label:
            self.sample.offer_contradicted(one)

    def fold_tallies(self) -> None:
        """Make hours, then days, of minutes that cannot be written."""
        for minutes in (60, _DAY_MINUTES):
            if len(self.tallies) <= _MOST_TALLIES:
                return
            folded: defaultdict[int, _Tally] = defaultdict(_Tally)
            for minute, tally in self.tallies.items():
                folded[minute // minutes * minutes].merge(tally)
            self.tallies = folded

    def counted(self) -> dict[Counted, tuple[int, float]]:
        return {
            Counted(minute, *self.key, kind, str(key)): (number, tally.totals.get((kind, key), 0.0))
            for minute, tally in self.tallies.items()
            for (kind, key), number in tally.numbers.items()
        }

    def written(self) -> None:
        """Forget what is in the store."""
        self.metrics.observed(sum(one.numbers["texts", ""] for one in self.tallies.values()))
        self.tallies.clear()
        self.chunks.clear()
        self.in_shadow.clear()

    def advanced(self, saved: str | None, now: float) -> str:
        """The state of the alarm after the chunks of this process."""
        assert self.alarm is not None
        known = json.loads(saved) if saved else {}
        if known.get("reference") != self.identity:
            known = {"reference": self.identity, "started": now, "raised": 0.0, "told": ""}
        games = known.get("games")
        state = self.alarm.start(json.dumps(games) if games else None)
        if state.add(self.chunks) >= ALARM_AT:
            if now - known["raised"] > ALARM_LASTS_S:
                known["told"] = ""  # of the alarm before; said once the shares have been compared
            known["raised"], known["what"] = now, state.what
        return json.dumps({**known, "games": json.loads(state.to_json())})


def _hash_of(record: Any) -> int:
    """The same in every process, unlike Python's own."""
    return int.from_bytes(hashlib.sha256(json.dumps(record).encode()).digest()[:8], "big")


def _reference_of(model: Any) -> tuple[Reference | None, str]:
    """What the artefact's texts are compared with, or why there is none."""
    if model.answering.problem_type is not SINGLE_LABEL:
        return None, "only models that give one label have a reference to compare with"
    if model.cascade is not None:
        return None, "a cascade has no reference to compare with, because two models answer"
    try:
        return Reference.of({"reference": model.reference}), ""
    except ValueError as error:
        logger.error("%s: %s", model.info["name"], error)
        return None, str(error)


class Observer:
    """Counts what one process answers, and writes it to the store."""

    def __init__(
        self,
        address: str,
        keep_texts_s: float,
        max_bytes: int,
        served: Callable[[], Iterable[Served]] = tuple,
        report: Callable[[Served], None] = lambda _: None,
        pause_s: tuple[float, float, float] = (_FOLD_S, _FLUSH_S, _TIDY_S),
    ) -> None:
        """Args:
        address: as of `Store`.
        keep_texts_s: 0 if no text may be kept.
        served: the models that are served now.
        report: called for each of them after a flush, on the observer's thread.
        pause_s: seconds between two times that texts are counted, written, and tidied.

        """
        self._address = address
        self.has_room = True  # for feedback
        self._keep_texts_s, self._max_bytes = keep_texts_s, max_bytes
        self._served, self._report = served, report
        self.pause_s = pause_s
        self._waiting: deque[_Entry] = deque()
        # Texts and characters: the event loop adds to those that came, the thread to those that
        # left, so neither needs a lock.
        self._came, self._left = [0, 0], [0, 0]
        self._random = random.Random()
        self._watched: dict[tuple[str, str], Watched] = {}
        self._remembered: OrderedDict[int, None] = OrderedDict()
        self._callers: dict[str, None] = {}
        self._texts: deque[KeptText] = deque(maxlen=PER_HOUR)
        self._undrawn: deque[str] = deque(maxlen=PER_HOUR)
        self._flush_at = self._tidy_at = 0.0
        self._complain = FailureLog("what the server sees is not recorded, and waits", logger)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observe", daemon=True)

    @functools.cached_property
    def store(self) -> Store:
        """Opened when it is first asked for, and again after that failed.

        Raises:
            StoreError: it cannot be.
        """
        return Store(self._address)

    @property
    def keeps_texts(self) -> bool:
        return self._keep_texts_s > 0

    def start(self) -> None:
        self._flush_at = time.monotonic() + self.pause_s[1]
        self._thread.start()

    def saw(
        self,
        served: Served,
        request_id: str,
        caller: str,
        texts: Sequence[Text],
        answers: Sequence[Answer],
        first: int = 0,
        in_shadow: InShadow | None = None,
    ) -> None:
        """Note answers, on the event loop. ``first``: the position of the first in its request.

        ``in_shadow``: what a candidate answered to a text that was noted before.
        """
        kept: Sequence[Text | int] = texts
        chars = 0
        if self._keep_texts_s:
            chars = sum(map(num_chars, texts))
        else:
            kept = [hash(one) for one in texts]
        came, left = self._came, self._left
        is_full = came[0] - left[0] + len(texts) > _MOST_WAITING
        if is_full or came[1] - left[1] + chars > _MOST_WAITING_CHARS:
            if in_shadow is None:
                served.metrics.unseen(len(texts))
            return
        came[0] += len(texts)
        came[1] += chars
        self._waiting.append(
            _Entry(time.time(), served, request_id, caller, first, kept, answers, chars, in_shadow)
        )

    def close(self) -> None:
        """Count and write what is left."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def watched(self, served: Served) -> Watched:
        key = served.name, served.model.info["revision"]
        if (found := self._watched.get(key)) is None:
            found = self._watched.setdefault(key, Watched(served, self._random))
        return found

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        is_last = False
        fold_s, flush_s, tidy_s = self.pause_s
        while not is_last:
            is_last = self._ending.wait(fold_s)
            self._fold()
            if is_last or time.monotonic() >= self._flush_at:
                self._try(self._flush)
                self._flush_at = time.monotonic() + flush_s
                if time.monotonic() >= self._tidy_at and not is_last:
                    self._try(self._tidy)
                    self._tidy_at = time.monotonic() + tidy_s
                for one in () if is_last else self._served():
                    self._try(functools.partial(self._report, one))
        self._try(lambda: self.store.close())

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._complain(error)

    def _fold(self) -> None:
        while self._waiting:
            entries: list[_Entry] = []
            num_texts = 0
            while self._waiting and num_texts < _FOLDED_AT_ONCE:
                entries.append(self._waiting.popleft())
                num_texts += len(entries[-1].texts)
            self._try(functools.partial(_find_familiarity, entries))
            self._count_all(entries)

    def _count_all(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            self._left[0] += len(entry.texts)
            self._left[1] += entry.num_chars
            try:
                self._count(entry)
            except Exception as error:
                entry.served.metrics.unseen(len(entry.texts))
                self._complain(error)

    def _count(self, entry: _Entry) -> None:
        watched = self.watched(entry.served)
        if entry.in_shadow is not None:
            watched.offer(entry, 0, entry.answers[0], entry.caller)
            return
        caller = self._caller(entry.caller)
        for place, (text, answer) in enumerate(zip(entry.texts, entry.answers, strict=True)):
            is_new = self._is_new(watched.salt ^ hash(text))
            watched.count(entry, answer, is_new=is_new, caller=caller)
            if self._keep_texts_s:
                watched.offer(entry, place, answer, entry.caller)

    def _caller(self, name: str) -> str:
        if name not in self._callers and len(self._callers) < _MOST_CALLERS:
            self._callers[name] = None
        return name if name in self._callers else OTHERS

    def _is_new(self, text: int) -> bool:
        remembered = self._remembered
        is_new = text not in remembered
        remembered[text] = None
        remembered.move_to_end(text)
        if len(remembered) > _MOST_REMEMBERED:
            remembered.popitem(last=False)
        return is_new

    def _flush(self) -> None:
        now = time.time()
        watched = list(self._watched.values())
        counts: dict[Counted, tuple[int, float]] = {}
        for one in watched:
            one.fold_tallies()
            counts |= one.counted()
            texts, undrawn = one.sample.take()
            self._texts += texts
            self._undrawn += undrawn
        in_shadow = [answer for one in watched for answer in one.in_shadow]
        if not (counts or self._texts or self._undrawn or in_shadow):
            return
        playing = [one for one in watched if one.chunks]
        advance = {one.key: _advance(one, now) for one in playing}
        self.store.add(counts, list(self._texts), advance, list(self._undrawn), in_shadow)
        for one in watched:
            one.written()
        self._texts.clear()
        self._undrawn.clear()
        for one in playing:
            self._explain_alarm(one, now)

    def _explain_alarm(self, one: Watched, now: float) -> None:
        """Complete the state of an alarm that has just been raised with what has moved."""
        known = json.loads(self.store.alarm(*one.key) or "{}")
        if known.get("raised") != now or known["told"]:
            return
        minute = int(now // 60)
        begin = minute - _NOW_MINUTES
        kinds = ("label", "caller")
        recent = self.store.counts(*one.key, begin, minute + 1, kinds)
        before = self.store.counts(*one.key, begin - _DAY_MINUTES, begin, kinds)
        told = explain(
            known["what"],
            {kind: (_of_kind(recent, kind), _of_kind(before, kind)) for kind in kinds},
        )

        def tell(saved: str | None) -> str:
            return json.dumps({**json.loads(saved or "{}"), "told": told})

        self.store.add({}, advance={one.key: tell})
        logger.warning("drift alarm for %s %s: %s", *one.key, told)

    def _tidy(self) -> None:
        self.has_room = self.store.tidy(self._keep_texts_s, self._max_bytes)
        # Of models that have been replaced nothing waits any more.
        current = {(one.name, one.model.info["revision"]) for one in self._served()}
        for key in self._watched.keys() - current:
            if not self._watched[key].tallies:
                del self._watched[key]


def _find_familiarity(entries: Iterable[_Entry]) -> None:
    """Of all texts of each model together, which takes a quarter of the time of pass by pass."""
    passes = {
        id(one.values.of_pass): one.values.of_pass
        for entry in entries
        for one in entry.answers
        if one.values.of_pass is not None
    }
    # The two models of a cascade have answered some each.
    by_answering: defaultdict[int, list[Any]] = defaultdict(list)
    for one in passes.values():
        by_answering[id(one.answering)].append(one)
    for some in by_answering.values():
        type(some[0]).compute(some)


def _advance(watched: Watched, now: float) -> Callable[[str | None], str]:
    return lambda saved: watched.advanced(saved, now)


def _of_kind(counts: dict[tuple[str, str], tuple[int, float]], kind: str) -> dict[str, int]:
    return {key: number for (one, key), (number, _) in counts.items() if one == kind}
