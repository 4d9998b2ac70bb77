"""The rounds of a run, asked for figures: medians, spreads and ratios within a round."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.serving.load import BROKEN, NO_ANSWER
from benchmarks.serving.measure import EIGHT, LISTS, MANY, ONE, OVERLOAD, STEADY
from benchmarks.serving.servers import SERVERS

Measured = dict[str, Any]
Figure = Callable[[Measured], float]

_REFUSALS = ("429", "503")
_LOST = (BROKEN, NO_ANSWER, "500", "502", "504", "408")
LOADS = (ONE, EIGHT, MANY, LISTS, STEADY, OVERLOAD)


def rate(load: str) -> Figure:
    """Texts answered a second."""
    return lambda measured: measured[load]["texts_per_second"]


def latency(load: str, quantile: str, status: str = "200") -> Figure:
    """Seconds to an answer of that status."""
    return lambda measured: measured[load]["latency"][status][quantile]


def cpu_per_text(measured: Measured) -> float:
    """Processor seconds of the whole server a text, at 64 clients."""
    return measured[MANY]["server_cpu_s"] / measured[MANY]["texts_answered"]


def over_capacity(measured: Measured) -> float:
    """Goodput at three times the capacity, as a share of the capacity."""
    return measured[OVERLOAD]["texts_per_second"] / measured[MANY]["texts_per_second"]


def refused(measured: Measured) -> int:
    """Requests refused at once at three times the capacity."""
    return sum(measured[OVERLOAD]["outcomes"].get(status, 0) for status in _REFUSALS)


def refusal_latency(quantile: str) -> Figure:
    """Seconds to a refusal at three times the capacity."""

    def seconds(measured: Measured) -> float:
        latency = measured[OVERLOAD]["latency"]
        return max(latency[status][quantile] for status in _REFUSALS if status in latency)

    return seconds


def lost(measured: Measured) -> int:
    """Requests taken in at three times the capacity and then not answered with 200: late, failed or silent."""
    return sum(measured[OVERLOAD]["outcomes"].get(outcome, 0) for outcome in _LOST)


def tail(measured: Measured) -> float:
    """How much longer than their median the slowest hundredth waits at 64 clients."""
    return latency(MANY, "p99")(measured) / latency(MANY, "p50")(measured)


def steady_tail(measured: Measured) -> float:
    """The slowest hundredth at 70% of capacity, against the median of a lone client."""
    return latency(STEADY, "p99")(measured) / latency(ONE, "p50")(measured)


class Results:
    """A run's rounds."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        self.names = [name for name in run["servers"] if self.all(name)]

    @property
    def left_out(self) -> dict[str, str]:
        """Servers without figures, and why."""
        failures = {name: one[name]["failed"] for one in self.run["rounds"] for name in one if "failed" in one[name]}
        return {name: why for name, why in (self.run["left_out"] | failures).items() if name not in self.names}

    def ours(self) -> list[str]:
        """Our own servers among those with figures."""
        return [name for name in self.names if SERVERS[name].is_ours]

    def all(self, name: str) -> list[Measured]:
        """A server's rounds."""
        found = (one.get(name, {}) for one in self.run["rounds"])
        return [measured for measured in found if "pss_loaded" in measured]

    def series(self, name: str, figure: Figure) -> list[float]:
        """A figure in each round that has it."""
        values = []
        for measured in self.all(name):
            try:
                values.append(figure(measured))
            except (KeyError, ZeroDivisionError, ValueError):
                continue  # nothing was answered: no latency, no ratio
        return values

    def median(self, name: str, figure: Figure) -> float | None:
        """Its median over rounds, if any has it."""
        values = self.series(name, figure)
        return median(values) if values else None

    def ratio(self, name: str, other: str, figure: Figure) -> float | None:
        """The median over rounds of the ratio within a round."""
        ratios = []
        for one in self.run["rounds"]:
            try:
                ratios.append(figure(one[name]) / figure(one[other]))
            except (KeyError, ZeroDivisionError, ValueError):
                continue
        return median(ratios) if ratios else None

    def limit(self) -> float:
        """The best int8 rate that any library reached in any round, operations a second."""
        return max(rate for one in self.run["limits"] for rates in one.values() for rate in rates.values())

    def limit_texts(self, saving: bool = True) -> float:
        """Texts a second that this rate would do."""
        return self.limit() / list(self.run["workload"]["work"].values())[2 if saving else 1]
