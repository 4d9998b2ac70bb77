"""After how many texts does the audit of a server notice that a promise is broken?

A simulation, on what both models really answer: texts are drawn at random from a set, one after the
other, and the audit sees those that it samples.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.cascading.scores import Bools, Both
from common.calibration import Floats

SHARE, RAISED = 0.01, 0.1  # of the texts that are sampled; raised while too many are passed on
TEXTS = 100_000  # of a series
ALARM = 20.0  # evidence; without a broken promise, it is reached with a chance of 1 in 20 at most
_BETS = np.geomspace(0.25, 16, 7)
_WINDOW = 1000  # of the texts before, by whose share passed on the sampling is chosen
_CLEARLY = 4.0  # standard errors


def simulate(
    both: Both, threshold: float, bound: float, usual: float, num_series: int
) -> dict[str, Any]:
    """Over random series of texts, when there is an alarm.

    Args:
        bound: the share of texts that may get another label than the big model gives.
        usual: the share passed on of the texts that the threshold was certified on.

    Returns:
        ``alarms``: the share of series with one; ``median`` and ``p90``: of the number of texts
        until then, None if that is beyond the end of a series.
    """
    is_hard, is_other = ~both.is_easy(threshold), both.is_other(threshold)
    draw, needed = np.random.default_rng(0), []
    for _ in range(num_series):
        places = draw.integers(len(both), size=TEXTS)
        rates = sampling_rates(is_hard[places], usual)
        sampled = np.flatnonzero(draw.random(TEXTS) < rates)
        alarm = first_alarm(is_other[places[sampled]], bound)
        needed.append(math.inf if alarm is None else int(sampled[alarm]) + 1)
    ordered = sorted(needed)

    def quantile(share: float) -> int | None:  # nearest rank, as infinity has no mean
        found = ordered[math.ceil(share * num_series) - 1]
        return None if math.isinf(found) else int(found)

    alarms = sum(map(math.isfinite, needed)) / num_series
    return {"alarms": alarms, "median": quantile(0.5), "p90": quantile(0.9)}


def sampling_rates(is_hard: Bools, usual: float) -> Floats:
    """How likely the audit samples each text of a series, (texts,); it depends only on the texts
    before, so that what is sampled tells nothing about whether the models differ.
    """
    counts = np.concatenate([[0], np.cumsum(is_hard)])
    before = (counts[_WINDOW:-1] - counts[: -_WINDOW - 1]) / _WINDOW
    clearly = _CLEARLY * math.sqrt(usual * (1 - usual) / _WINDOW)
    rates = np.full(len(is_hard), SHARE)
    rates[_WINDOW:][np.abs(before - usual) > clearly] = RAISED
    return rates


def first_alarm(is_other: Bools, bound: float) -> int | None:
    """The position of the sampled text with which the evidence reaches `ALARM`; None: it never does.

    Evidence against "at most ``bound`` get another label" is what a gambler has won who bets b on
    every text: the product of 1 + b (d - bound), d being 1 for another label and else 0. Its mean
    is 1 at most if the promise holds, whenever one looks (Ville's inequality). The best b depends
    on the true rate, so the money is divided equally among several.
    """
    gains = np.log1p(_BETS[:, None] * (is_other - bound))  # (bets, sampled texts)
    evidence = np.logaddexp.reduce(np.cumsum(gains, axis=1), axis=0) - math.log(len(_BETS))
    reached = np.flatnonzero(evidence >= math.log(ALARM))
    return int(reached[0]) if len(reached) else None
