"""Who may ask, and how much: judged first by a request's first lines, then by the texts that it turns out to hold."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from inference.errors import RateLimitedError
from inference.http.api_keys import ApiKeys, given_keys
from inference.http.security import RateLimiter, client_name

# What starts, stops and balances servers asks for these, and takes a refusal for a fault.
_PROBES = frozenset(("/livez", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"))
# A page asks for its parts at once, however slowly texts may come.
_LEAST_PAGES_PER_S = 10.0
# Wrong keys from one address, where no rate is set.
_GUESSES_PER_S = 10.0
_USED_UP = "the rate limit of this key or address is used up; wait as Retry-After says"

Refusal = tuple[int, str, str, float | None]


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left to the client of one request, of which the request itself took one text.

    Attributes:
        limiter: Keeps the client's bucket; None if nothing limits it.
        client: The bucket's name.
        per_second: A rate of the client's own.
    """

    limiter: RateLimiter | None = None
    client: str | bytes = ""
    per_second: float | None = None

    def require(self) -> None:
        """Raise `RateLimitedError` while the client has taken more than its rate allows."""
        if self.limiter is not None and (wait_s := self.limiter.wait_s(self.client, 0, self.per_second)):
            raise RateLimitedError(_USED_UP, wait_s)

    def take(self, num_texts: int) -> None:
        """Count texts that are being classified."""
        if self.limiter is not None and num_texts:
            self.limiter.take(self.client, num_texts, self.per_second)


class RequestLimits:
    """Judges requests before anything of them is read; used on the event loop only."""

    def __init__(self, keys: ApiKeys, per_second: float) -> None:
        """Start with full buckets.

        Args:
            keys: Those that admit requests.
            per_second: RATE_LIMIT_PER_S; 0 is off.
        """
        self._keys = keys
        self._is_limited = bool(per_second)
        # Keys and addresses apart: who has many addresses must not make the debts of keys forgotten.
        self._by_key, self._by_address = RateLimiter(per_second), RateLimiter(per_second)
        self._pages = RateLimiter(max(per_second, _LEAST_PAGES_PER_S))
        self._guesses = RateLimiter(per_second or _GUESSES_PER_S)

    def judge(self, scope: Scope) -> Allowance | Refusal:
        """Return what the client has left, or why the request may not pass: status, code, line, seconds to wait."""
        if scope["path"] in _PROBES:
            return Allowance()
        address = client_name(scope)
        if scope["method"] != "POST":
            return self._admit(self._pages if self._is_limited else None, address)
        if not self._keys.is_set:
            return self._admit(self._by_address if self._is_limited else None, address)
        # Before the key is looked at: who has guessed too often learns nothing from the next guess.
        if wait_s := self._guesses.wait_s(address, 1):
            return 429, "rate_limited", _USED_UP, wait_s
        key = self._keys.given_by(scope["headers"])
        if key is None:
            # Without a limit, a request that carries no key is cheap to refuse, and no guess.
            if self._is_limited or any(True for _ in given_keys(scope["headers"])):
                self._guesses.take(address, 1)
            return 401, "unauthorized", "send the API key as `Authorization: Bearer KEY` or `X-API-Key: KEY`", None
        is_limited = self._is_limited or key.per_second is not None
        return self._admit(self._by_key if is_limited else None, key.name, key.per_second)

    def _admit(
        self, limiter: RateLimiter | None, client: str | bytes, per_second: float | None = None
    ) -> Allowance | Refusal:
        if limiter is None:
            return Allowance()
        if wait_s := limiter.wait_s(client, 1, per_second):
            return 429, "rate_limited", _USED_UP, wait_s
        limiter.take(client, 1, per_second)
        return Allowance(limiter, client, per_second)
