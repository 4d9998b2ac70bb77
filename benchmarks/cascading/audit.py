"""After how many texts does the audit of a server notice that a promise is broken?

A simulation, on what both models really answer: texts are drawn at random from a set, one after the
other, and the audit sees those that it samples.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from benchmarks.cascading.scores import Both
from common.calibration import NEVER_SURE
from inference.batching.audit import Audit
from inference.engines.model_loader import Cascade

TEXTS = 50_000  # of a series


def simulate(both: Both, threshold: float, bound: float, num_series: int) -> dict[str, Any]:
    """Over random series of texts, when there is an alarm.

    Args:
        bound: the share of texts that may get another label than the big model gives.

    Returns:
        ``alarms``: the share of series with one; ``median`` and ``p90``: of the number of texts
        until then, None if that is beyond the end of a series.
    """
    logging.getLogger("inference.batching.audit").setLevel(logging.ERROR)  # an alarm is a line
    is_hard = (~both.is_easy(threshold)).tolist()
    is_other = both.is_other(threshold).tolist()
    draw, needed = np.random.default_rng(0), []
    for seed in range(num_series):
        audit, alarm = Audit(Cascade(None, threshold, (NEVER_SURE,), bound), seed), math.inf
        for number, place in enumerate(draw.integers(len(both), size=TEXTS).tolist()):
            if audit.draws(is_hard[place]):
                audit.checked(threshold, differs=is_other[place])
            if audit.num_tightened:
                alarm = number + 1
                break
        needed.append(alarm)
    ordered = sorted(needed)

    def quantile(share: float) -> int | None:  # nearest rank, as infinity has no mean
        found = ordered[math.ceil(share * num_series) - 1]
        return None if math.isinf(found) else int(found)

    alarms = sum(map(math.isfinite, needed)) / num_series
    return {"alarms": alarms, "median": quantile(0.5), "p90": quantile(0.9)}
