"""Who may send requests, and how many: judged by a request's headers first, then by the number of
texts in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from inference.errors import RateLimitedError
from inference.http.api_keys import MOST_KEYS, ApiKeys, given_keys
from inference.http.paths import route_path
from inference.http.security import RateLimiter, client_name

# Orchestrators and load balancers call these, and would take a refusal for a failure.
_PROBES = frozenset(("/livez", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"))
# A page loads its files all at once, however low the limit on texts.
_LEAST_PAGES_PER_S = 10.0
# Wrong keys per second from one address, if no rate is set.
_GUESSES_PER_S = 10.0
_USED_UP = "the rate limit of this key or address is used up; wait as long as Retry-After says"

Refusal = tuple[int, str, str, float | None]
ReportTaken = Callable[[str, str, float | None, float], None]


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left to the client of one request; the request itself has used up one text.

    ``limiter``: keeps the client's bucket, None without a limit; ``client``: the bucket's name;
    ``per_second``: the client's own rate.
    """

    limiter: RateLimiter | None = None
    client: str = ""
    per_second: float | None = None

    def require(self) -> None:
        """Raise `RateLimitedError` while the client has taken more than its rate allows."""
        if self.limiter is not None and (
            wait_s := self.limiter.wait_s(self.client, 0, self.per_second)
        ):
            raise RateLimitedError(_USED_UP, wait_s)

    def take(self, num_texts: int) -> None:
        if self.limiter is not None and num_texts:
            self.limiter.take(self.client, num_texts, self.per_second)


class RequestLimits:
    """Judges requests before anything of their bodies is read; only used on the event loop."""

    def __init__(self, keys: ApiKeys, per_second: float, report: ReportTaken | None = None) -> None:
        """Args: keys: those that admit requests. per_second: RATE_LIMIT_PER_S; 0 is off. report:
        hears what clients take: from which limiter, who, at which rate of their own, and how much.
        """
        self._keys = keys
        self._is_limited = bool(per_second)
        # Keys and addresses separately, so that a client with many addresses cannot push the debts
        # of keys out of memory.
        self._limiters: dict[str, RateLimiter] = {}

        def limiter(name: str, rate: float) -> RateLimiter:
            self._limiters[name] = RateLimiter(
                rate, functools.partial(report, name) if report else None
            )
            return self._limiters[name]

        self._by_key, self._by_address = (
            limiter("keys", per_second),
            limiter("addresses", per_second),
        )
        self._pages = limiter("pages", max(per_second, _LEAST_PAGES_PER_S))
        self._guesses = limiter("guesses", per_second or _GUESSES_PER_S)

    def take_elsewhere(
        self, limiter: str, client: str, per_second: float | None, amount: float
    ) -> None:
        """Take from a client's bucket what another process has reported."""
        self._limiters[limiter].take(client, amount, per_second, is_ours=False)

    def judge(self, scope: Scope) -> Allowance | Refusal:
        """What the client has left, or why the request may not pass: status, code, message, seconds
        to wait.
        """
        if route_path(scope) in _PROBES:
            return Allowance()
        address = client_name(scope)
        if scope["method"] != "POST":
            return self._admit(self._pages if self._is_limited else None, address)
        if not self._keys.is_set:
            return self._admit(self._by_address if self._is_limited else None, address)
        # Checked before the key, so that a client that guessed too often learns nothing from its
        # next guess.
        if wait_s := self._guesses.wait_s(address, 1):
            return 429, "rate_limited", _USED_UP, wait_s
        given = list(given_keys(scope["headers"]))
        key = self._keys.find(given) if len(given) <= MOST_KEYS else None
        if key is None:
            # Each key is a guess. Without a rate limit, a request without any is cheap to refuse,
            # and none.
            if num_guesses := len(given) or int(self._is_limited):
                self._guesses.take(address, num_guesses)
            return (
                401,
                "unauthorized",
                "send the API key as `Authorization: Bearer KEY` or `X-API-Key: KEY`",
                None,
            )
        is_limited = self._is_limited or key.per_second is not None
        return self._admit(self._by_key if is_limited else None, key.name, key.per_second)

    def _admit(
        self, limiter: RateLimiter | None, client: str, per_second: float | None = None
    ) -> Allowance | Refusal:
        if limiter is None:
            return Allowance()
        if wait_s := limiter.wait_s(client, 1, per_second):
            return 429, "rate_limited", _USED_UP, wait_s
        limiter.take(client, 1, per_second)
        return Allowance(limiter, client, per_second)
