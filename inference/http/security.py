"""Rate limits, client addresses, and what browsers are told about the answers."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from starlette.types import Scope

# Pages may be embedded in the Space's page only, and load nothing from elsewhere.
_FRAMES = "frame-ancestors 'self' https://huggingface.co https://*.huggingface.co"
_POLICY = f"default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; {_FRAMES}"
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", _POLICY.encode()),
]

_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
MAX_CLIENTS = 10_000


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
        """Take this much from the client's bucket, even if that leaves a debt;
        arguments as for `wait_s`.
        """
        if is_ours and self._report is not None:
            self._report(client, per_second, amount)
        left = self._left(client, per_second or self._per_second)
        self._buckets[client] = (left - amount, time.monotonic())
        self._buckets.move_to_end(client)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)

    def _left(self, client: str, rate: float) -> float:
        now, depth = time.monotonic(), max(1.0, 2 * rate)
        left, then = self._buckets.get(client, (depth, now))
        return min(depth, left + (now - then) * rate)


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
    """The IPv4 address that an IPv6 address stands for: mapped (::ffff:1.2.3.4),
    or translated (64:ff9b::1.2.3.4).
    """
    if ":" in host:
        with suppress(ValueError):
            address = ipaddress.IPv6Address(host.partition("%")[0])
            if address.ipv4_mapped or address in _TRANSLATED:
                return str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return host
