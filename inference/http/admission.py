"""Whether a request may come in: who sends it (a key or an address), and how much that client may
still send. Judged by the headers first, then by the number of texts in the request.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Scope

from inference.errors import RateLimitedError, SettingsError
from inference.http.paths import is_change, route_path

logger = logging.getLogger(__name__)

# Orchestrators and load balancers call these, and would take a refusal for a failure.
_PROBES = frozenset(("/livez", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"))
# A page loads its files all at once, however low the limit on texts.
_LEAST_PAGES_PER_S = 10.0
# Wrong keys per second from one address, if no rate is set.
_GUESSES_PER_S = 10.0
_USED_UP = "the rate limit of this key or address is used up; wait as long as Retry-After says"
# Clients whose buckets are kept, per limiter: a bound on memory, whatever addresses come.
MAX_CLIENTS = 10_000
# Keys that a request may carry: as `Authorization` and as `X-API-Key`.
_MOST_KEYS = 2
# Seconds between checks whether the key file has changed.
_CHECK_INTERVAL_S = 1.0
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")

# What requests are counted under that need no key.
ANONYMOUS = "anonymous"
# Characters of a key's name that its requests are counted under: enough to tell keys apart.
_CALLER_CHARS = 12

Refusal = tuple[int, str, str, float | None]
ReportTaken = Callable[[str, str, float | None, float], None]


# ---------------------------------------------------------------- the judgement


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left to the client of one request; the request itself has used up one text.

    ``limiter``: keeps the client's bucket, None without a limit; ``client``: the bucket's name;
    ``per_second``: the client's own rate; ``caller``: what its texts are counted under.
    """

    limiter: RateLimiter | None = None
    client: str = ""
    per_second: float | None = None
    caller: str = ANONYMOUS

    def require(self) -> None:
        """Raise `RateLimitedError` while the client has taken more than its rate allows."""
        if self.limiter is None:
            return
        if wait_s := self.limiter.wait_s(self.client, 0, self.per_second):
            raise RateLimitedError(_USED_UP, wait_s)

    def take(self, num_texts: int) -> None:
        if self.limiter is not None and num_texts:
            self.limiter.take(self.client, num_texts, self.per_second)


class RequestLimits:
    """Judges requests before anything of their bodies is read; only used on the event loop."""

    def __init__(self, keys: ApiKeys, per_second: float, report: ReportTaken | None = None) -> None:
        """Args:
        keys: those that admit requests.
        per_second: RATE_LIMIT_PER_S; 0 is off.
        report: hears what clients take: from which limiter, who, at which rate of their own, and
            how much.
        """
        self._keys = keys
        self._is_limited = bool(per_second)
        # Keys and addresses separately, so that a client with many addresses cannot push the debts
        # of keys out of memory.
        self._limiters: dict[str, RateLimiter] = {}

        def limiter(name: str, rate: float) -> RateLimiter:
            hears = functools.partial(report, name) if report else None
            self._limiters[name] = RateLimiter(rate, hears)
            return self._limiters[name]

        self._by_key = limiter("keys", per_second)
        self._by_address = limiter("addresses", per_second)
        self._pages = limiter("pages", max(per_second, _LEAST_PAGES_PER_S))
        self._guesses = limiter("guesses", per_second or _GUESSES_PER_S)

    def take_elsewhere(
        self, limiter: str, client: str, per_second: float | None, amount: float
    ) -> None:
        """Take from a client's bucket what another process has reported."""
        self._limiters[limiter].take(client, amount, per_second, is_ours=False)

    def judge(self, scope: Scope) -> Allowance | Refusal:
        """What the client has left, or why not: status, code, message, seconds to wait."""
        if route_path(scope) in _PROBES:
            return Allowance()
        address = client_name(scope)
        if not is_change(scope):
            return self._admit(self._pages if self._is_limited else None, address)
        if not self._keys.is_set:
            return self._admit(self._by_address if self._is_limited else None, address)
        # Checked before the key, so that a client that guessed too often learns nothing from its
        # next guess.
        if wait_s := self._guesses.wait_s(address, 1):
            return 429, "rate_limited", _USED_UP, wait_s
        given = list(_given_keys(scope["headers"]))
        key = self._keys.find(given) if len(given) <= _MOST_KEYS else None
        if key is None:
            return self._refuse_guess(address, len(given))
        is_limited = self._is_limited or key.per_second is not None
        limiter = self._by_key if is_limited else None
        return self._admit(limiter, key.name, key.per_second, key.name[:_CALLER_CHARS])

    def _refuse_guess(self, address: str, num_keys: int) -> Refusal:
        # Each key is a guess. A request without any is none, and cheap to refuse; it counts only
        # because a rate limit holds for every request.
        if num_guesses := num_keys or int(self._is_limited):
            self._guesses.take(address, num_guesses)
        line = "send the API key as `Authorization: Bearer KEY` or `X-API-Key: KEY`"
        return 401, "unauthorized", line, None

    def _admit(
        self,
        limiter: RateLimiter | None,
        client: str,
        per_second: float | None = None,
        caller: str = ANONYMOUS,
    ) -> Allowance | Refusal:
        if limiter is None:
            return Allowance(caller=caller)
        if wait_s := limiter.wait_s(client, 1, per_second):
            return 429, "rate_limited", _USED_UP, wait_s
        limiter.take(client, 1, per_second)
        return Allowance(limiter, client, per_second, caller)


# ---------------------------------------------------------------- how much


class RateLimiter:
    """A token bucket per client, refilled at a steady rate, twice the rate deep.

    A client that has anything in its bucket may take more than that, and then waits until the debt
    is paid off. Otherwise a batch of more texts than a bucket holds could never be sent.
    """

    def __init__(
        self, per_second: float, report: Callable[[str, float | None, float], None] | None = None
    ) -> None:
        self._per_second = per_second
        self._report = report
        # Client: (what is left, since when). The client unseen for longest is forgotten; its bucket
        # is full by then.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str, at_least: int, per_second: float | None = None) -> float:
        """Seconds until the client's bucket has this much, 0 if it does; ``per_second`` is the
        client's own rate, if any.

        ``at_least``: 1 for a new request, 0 for one that has already taken its first text.
        """
        rate = per_second or self._per_second
        return max(0.0, (at_least - self._left(client, rate)) / rate)

    def take(
        self, client: str, amount: float, per_second: float | None = None, *, is_ours: bool = True
    ) -> None:
        """Take this much, even if that leaves a debt; arguments as for `wait_s`."""
        if is_ours and self._report is not None:
            self._report(client, per_second, amount)
        left = self._left(client, per_second or self._per_second)
        self._buckets[client] = (left - amount, time.monotonic())
        self._buckets.move_to_end(client)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)

    def _left(self, client: str, rate: float) -> float:
        # Refilled when it is looked at, so there is no timer per client. At least one text deep, or
        # a rate below 0.5 per second would admit nothing at all.
        now, depth = time.monotonic(), max(1.0, 2 * rate)
        left, then = self._buckets.get(client, (depth, now))
        return min(depth, left + (now - then) * rate)


# ---------------------------------------------------------------- who: an address


def client_name(scope: Scope) -> str:
    """What requests without a key are counted under: their address."""
    client = scope.get("client")
    if client is None:
        return "unknown"
    host = as_ipv4(client[0])
    if ":" not in host:
        return host
    # One household has a /64 of IPv6 addresses.
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host


def as_ipv4(host: str) -> str:
    """The IPv4 address inside an IPv6 address: ::ffff:1.2.3.4 (mapped), 64:ff9b::1.2.3.4."""
    if ":" in host:
        with suppress(ValueError):
            address = ipaddress.IPv6Address(host.partition("%")[0])
            if address.ipv4_mapped or address in _TRANSLATED:
                return str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return host


# ---------------------------------------------------------------- who: a key


@dataclass(frozen=True, slots=True)
class Key:
    """A key that admits requests.

    ``name``: what its requests are counted under, a hash, so that the key itself is not in memory
    dumps or logs. ``per_second``: its own rate limit in texts per second; None for
    RATE_LIMIT_PER_S.
    """

    name: str
    per_second: float | None = None


class ApiKeys:
    """The keys of which a request must carry one; if there are none, all are admitted."""

    def __init__(self, key: str | None = None, file: Path | None = None) -> None:
        """Read the keys.

        Args:
            key: API_KEY.
            file: API_KEYS_FILE, read again when it changes. If it is later missing, damaged or
                empty, none of its keys is valid until it is fixed.

        Raises:
            SettingsError: the file cannot be read, or holds no key.
        """
        self._fixed = [Key(_hash(key.encode()))] if key else []
        self._by_name: dict[str, Key] = {}
        self._file = file
        self._version = self._version_now()
        self._take(_read_keys(file) if file else [])
        self._looked_at = time.monotonic()

    @property
    def is_set(self) -> bool:
        return bool(self._fixed) or self._file is not None

    def find(self, given: Iterable[bytes]) -> Key | None:
        """The last valid one of the keys given. Hashes are looked up, so the time it takes says
        nothing about a key.
        """
        self._refresh()
        found = None
        for key in given:
            found = self._by_name.get(_hash(key), found)
        return found

    def _take(self, from_file: list[Key]) -> None:
        self._by_name = {key.name: key for key in (*self._fixed, *from_file)}

    def _refresh(self) -> None:
        if self._file is None or time.monotonic() - self._looked_at < _CHECK_INTERVAL_S:
            return
        # By size and time of the file, not its contents: it is looked at on the event loop.
        self._looked_at = time.monotonic()
        version = self._version_now()
        if version == self._version:
            return
        self._version = version
        try:
            self._take(keys := _read_keys(self._file))
            logger.info("API_KEYS_FILE changed: %d keys are valid", len(keys))
        except SettingsError as error:
            # Rather no key than those of the old file, which may have been changed because one of
            # them had leaked.
            self._take([])
            logger.error("%s; no key of this file is valid until it is repaired", error)

    def _version_now(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat() if self._file else None
        except OSError:
            return None
        return (status.st_ino, status.st_size, status.st_mtime_ns) if status else None


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _given_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield credentials.strip()
        elif name == b"x-api-key":
            yield value


def _read_keys(file: Path) -> list[Key]:
    """Read a key file: one key per line, optionally followed by its own rate limit; lines with #
    are comments.

    Raises:
        SettingsError: it cannot be read, a line is invalid, or it holds no key.
    """
    try:
        # Some editors begin a file with a mark, which would become a part of the first key.
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = f"API_KEYS_FILE: {file} is not readable ({error})"
        raise SettingsError(what, code="api-keys-file") from None
    numbered = enumerate(lines, 1)
    keys = [_key(file, number, line.split()) for number, line in numbered if _is_key_line(line)]
    if not keys:
        what = f"API_KEYS_FILE: {file} holds no key; write one key per line"
        raise SettingsError(what, code="api-keys-file")
    return keys


def _is_key_line(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _key(file: Path, number: int, words: list[str]) -> Key:
    # The line is not quoted, because it is a secret.
    wrong = SettingsError(
        f"API_KEYS_FILE: {file}, line {number}: must be KEY, or KEY TEXTS_PER_SECOND above 0",
        code="api-keys-file",
    )
    if len(words) > 2:
        raise wrong
    try:
        per_second = float(words[1]) if len(words) == 2 else None
    except ValueError:
        raise wrong from None
    if per_second is not None and not 0 < per_second < math.inf:
        raise wrong
    return Key(_hash(words[0].encode()), per_second)
