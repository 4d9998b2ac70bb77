"""What a client sends, and the tally of what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

NO_ANSWER = "no answer"  # still waiting when the patience ended
BROKEN = "broken"  # the connection failed or was closed before the answer
NOT_SENT = "not sent"  # more requests under way than a client may have sockets


@dataclass(frozen=True)
class Load:
    """What to send.

    Attributes:
        bodies: A file with one JSON body a line; they are sent in turn, over and over.
        port: Where the server listens on 127.0.0.1.
        path: The route that is asked.
        texts: Texts in each body.
        seconds: How long requests are sent; those under way at its end are waited for.
        clients: Closed loop: so many clients that each send their next request when the last is answered; 0: open loop.
        rate: Open loop: requests a second, whatever is answered.
        poisson: Open loop: random gaps of that mean, instead of equal ones.
        patience: Seconds to wait, after the last request is sent, for answers.
        first: The body to begin with.
    """

    bodies: str
    port: int
    path: str
    texts: int
    seconds: float
    clients: int = 0
    rate: float = 0.0
    poisson: bool = False
    patience: float = 60.0
    first: int = 0


class Tally:
    """What became of every request."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        self.done_at: list[float] = []
        self.client_rates: list[float] = []
        self.lateness: list[float] = []

    def answered(self, status: str, since: float, now: float) -> None:
        """Count an answer; ``since``: when its request was sent, or should have been."""
        self.outcomes[status] += 1
        self.seconds.setdefault(status, []).append(now - since)
        if status == "200":
            self.done_at.append(now)

    def summary(self, load: Load, began: float) -> dict[str, Any]:
        """Figures for the page."""
        in_time = sum(at - began <= load.seconds for at in self.done_at)
        return {
            "load": asdict(load),
            "outcomes": {name: count for name, count in self.outcomes.items() if count},
            "latency": {status: _quantiles(values) for status, values in self.seconds.items()},
            # Closed loop: each client's answers over the time that they took it, so that bursts count for what they
            # are. Open loop: answers while requests were being sent; those after it belong to no steady state.
            "texts_per_second": load.texts * (sum(self.client_rates) if load.clients else in_time / load.seconds),
            "texts_answered": load.texts * self.outcomes["200"],
            "lateness_p99": _quantiles(self.lateness)["p99"] if self.lateness else 0.0,
        }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank quantiles: values that really occurred."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {name: ordered[round(q * last)] for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1))}
