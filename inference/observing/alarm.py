"""An alarm that texts have changed, which promises how rarely it cries wolf.

It is a game against the reference. Of texts drawn from where the reference's rows were drawn, at
most a share p reaches a tail (a threshold such as "as uncertain as the least certain 1%"). Betting
a part c of one's money that the next text does multiplies it by

    e = 1 + c (1/p - 1)  if it does,    1 - c  if it does not,    so E[e] <= 1: no bet pays.

Money that grows says that the texts are not what the reference has seen. One unit more is put in
before every chunk of 16 texts, M <- (M + 1) e, so that a change after a long quiet time is found as
fast as one at the start. Then M - (number of chunks) does not grow on average, and by Doob's
theorem the mean number of chunks until M reaches 10^6 is at least 10^6: an e-detector by Shin,
Ramdas and Rinaldo, arXiv 2203.03532. The mean of many games, one for each score, tail and c, keeps
that promise.

Only how many of 16 texts reached each tail matters, in 20 small numbers. So several processes count
on their own, and their chunks are added one after the other to one state, in any order.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.calibration import binomial_tail
from inference.observing.reference import SCORES, TAILS, UNFAMILIAR, Reference, most_in_tail

ALARM_AT = 1e6
CHUNK = 16
_BETS = (0.1, 0.25, 0.5, 0.9)
# With which probability, over the rows of the reference, a share of its tails is not what is bet on.
_DOUBT = 0.01
_FIELD = 5  # bits of a count of up to 16
_MASK = (1 << _FIELD) - 1
# A share that changed less is no explanation.
_LEAST_CHANGE = 0.05
_LEAST_DEVIATIONS = 4.0
_PLAIN = {
    "uncertain": "the model is less sure than it was of the rows it was calibrated on",
    UNFAMILIAR: "more texts are unlike the training texts",
    "short": "more texts are short",
    "long": "more texts are long",
}


class Alarm:
    """The games that are played against one reference."""

    def __init__(self, reference: Reference) -> None:
        self._tails: list[tuple[list[float], list[int]]] = []
        games, shares = [], []
        for i, score in enumerate(SCORES):
            tails = reference.tails.get(score, (None,) * len(TAILS))
            known = [(t, j) for j, t in enumerate(tails) if t is not None]
            # From the lowest on, which is that of the largest share. A text that reaches the last
            # of them reaches all, and adds one to the field of each.
            known.reverse()
            added = [0]
            for _, j in known:
                added.append(added[-1] | 1 << _FIELD * (i * len(TAILS) + j))
            self._tails.append(([t for t, _ in known], added))
            rows = reference.rows_behind(score)
            games += [i * len(TAILS) + j for _, j in known]
            shares += [_share_bound(rows, TAILS[j]) for _, j in known]
        self._games = np.array(games, dtype=np.int64)
        bets, p = np.array(_BETS), np.array(shares)[:, None]
        # Of each game, (tails, bets): the logarithms of what a text multiplies its money by.
        self._lost = np.broadcast_to(np.log1p(-bets), (len(games), len(bets)))
        self._gained = np.log1p(bets * (1 / p - 1))

    def exceeded(self, confidence: float, familiarity: float | None, num_tokens: int) -> int:
        """Which tails a text reaches, as a number that can be added up: 5 bits for each of them."""
        # No familiarity, no bet won: the promise holds, and such texts look familiar.
        foreign = -1.0 if familiarity is None else 1 - familiarity
        found = 0
        for score, (tails, added) in zip(
            (1 - confidence, foreign, -num_tokens, num_tokens), self._tails, strict=True
        ):
            found += added[bisect_right(tails, score)]
        return found

    def multiplied(self, counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """What chunks multiply the money of each game by: (..., 20) to (..., tails, bets)."""
        won = np.asarray(counts)[..., self._games, None]
        # Beyond e^100 there is nothing to tell, and products must stay finite.
        return np.exp(np.minimum(100.0, won * self._gained + (CHUNK - won) * self._lost))

    def start(self, saved: str | None = None) -> AlarmState:
        """The state of a new revision, or the one that was saved as JSON."""
        known = json.loads(saved) if saved else {}
        shape = self._gained.shape
        money = np.array(known.get("money", np.zeros(shape))).reshape(-1, len(_BETS))
        if money.shape != shape:
            what = f"the saved state has {money.size} games, this model plays {math.prod(shape)}"
            raise ValueError(f"{what}: it belongs to another model")
        return AlarmState(
            self, money, known.get("chunks", 0), known.get("alarms", 0), known.get("what", "")
        )

    def score_of_game(self, game: int) -> str:
        return SCORES[self._games[game] // len(TAILS)]


@dataclass(slots=True)
class AlarmState:
    """The money of all games of one model and revision. `Alarm.start` makes it."""

    alarm: Alarm
    money: NDArray[np.float64]  # (tails, bets)
    chunks: int = 0  # since the start
    alarms: int = 0  # since the start
    what: str = ""  # of SCORES, the one that has moved most: now, or at the alarm of the last `add`

    @property
    def evidence(self) -> float:
        return float(self.money.mean()) if self.money.size else 0.0

    def evidence_by_score(self) -> dict[str, float]:
        """The part that each score has in the evidence."""
        found: dict[str, float] = {}
        for game, money in enumerate(self.money.sum(axis=1) / max(1, self.money.size)):
            score = self.alarm.score_of_game(game)
            found[score] = found.get(score, 0.0) + float(money)
        return found

    def add(self, chunks: Iterable[Sequence[int]]) -> float:
        """Play on with chunks, each as `ChunkCounts.take` gives it.

        Returns the most evidence on the way. If it is ALARM_AT or more, there was an alarm: `what`
        says what has moved, and the games have begun from scratch.
        """
        most = 0.0
        played = list(chunks)
        # All at once, because the calls of numpy are most of the time: (chunks, tails, bets).
        for multiplied in self.alarm.multiplied(played) if played else ():
            self.money = (self.money + 1) * multiplied
            self.chunks += 1
            evidence = self.evidence
            if evidence >= most:
                most = evidence
                self.what = self._moved()
            if evidence >= ALARM_AT:
                self.alarms += 1
                self.money = np.zeros_like(self.money)
        return most

    def _moved(self) -> str:
        by_score = self.evidence_by_score()
        return max(by_score, key=by_score.__getitem__, default="")

    def to_json(self) -> str:
        values = {"money": [[float(f"{m:.6g}") for m in row] for row in self.money]}
        return json.dumps(
            {**values, "chunks": self.chunks, "alarms": self.alarms, "what": self.what}
        )


@dataclass(slots=True)
class ChunkCounts:
    """Adds up the texts of one process until there are 16 of them; for distinct texts only."""

    _sum: int = 0
    _texts: int = 0
    _full: list[list[int]] = field(default_factory=list)

    def add(self, exceeded: int) -> None:
        """``exceeded``: what `Alarm.exceeded` says of a text."""
        self._sum += exceeded
        self._texts += 1
        if self._texts == CHUNK:
            places = range(len(SCORES) * len(TAILS))
            self._full.append([self._sum >> _FIELD * i & _MASK for i in places])
            self._sum = self._texts = 0

    def take(self) -> list[list[int]]:
        """The full chunks since the last call: of each, how many texts reached each tail."""
        full, self._full = self._full, []
        return full


def _share_bound(rows: int, share: float) -> float:
    """How large a share of all texts may reach a tail that so few rows of the reference reach.

    The probability beyond the k-th largest of n draws has the distribution Beta(k, n + 1 - k), and
    P(Beta > p) = P(fewer than k of n draws lie beyond a share p): exact, and for the 1% of 7,600
    rows it gives 1.4%. All bounds hold together with 99%. One band around all tails (Dvoretzky,
    Kiefer and Wolfowitz) would give 2.9%: with 20% foreign texts, the alarm then came after 128
    instead of 96 texts.
    """
    most, doubt = most_in_tail(rows, share), _DOUBT / (len(SCORES) * len(TAILS))
    low, high = share / 2, 1 - 1e-9
    for _ in range(50):
        middle = (low + high) / 2
        is_low = binomial_tail(most - 1, rows, middle) > doubt
        low, high = (middle, high) if is_low else (low, middle)
    return high


def explain(what: str, shares: Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]]) -> str:
    """What has moved, in one line.

    ``what``: the score, as `AlarmState.what`; ``shares``: by kind, such as "label" or "caller", the
    counts of the last texts and those to compare them with, by name.
    """
    parts = [_PLAIN[what]] if what else []
    for kind, (now, before) in shares.items():
        if changed := _most_changed(now, before):
            name, was, is_now = changed
            parts.append(f"{kind} {name}: {was:.0%} of texts before, {is_now:.0%} now")
    return "; ".join(parts)


def _most_changed(
    now: Mapping[str, int], before: Mapping[str, int]
) -> tuple[str, float, float] | None:
    """The name whose share changed most, with both shares; None if none did beyond chance."""
    n, m = sum(now.values()), sum(before.values())
    if not n or not m:
        return None
    shares = {one: (before.get(one, 0) / m, now.get(one, 0) / n) for one in {*now, *before}}
    changes = {one: is_now - was for one, (was, is_now) in shares.items()}
    # Of two that changed as much, such as two labels, the one that grew.
    name = max(sorted(shares), key=lambda one: (round(abs(changes[one]), 9), changes[one]))
    was, is_now = shares[name]
    both = (was * m + is_now * n) / (m + n)
    chance = math.sqrt(both * (1 - both) * (1 / n + 1 / m))
    change = abs(is_now - was)
    return (name, was, is_now) if change > max(_LEAST_CHANGE, _LEAST_DEVIATIONS * chance) else None
