"""Who may ask, how often, and what browsers are told about the answers."""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Scope

# Pages may be shown inside the Space's page, and nowhere else. Nothing is loaded from elsewhere.
_FRAMES = "frame-ancestors 'self' https://huggingface.co https://*.huggingface.co"
_POLICY = f"default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; {_FRAMES}"
# The interactive documentation is FastAPI's page: one inline script, the rest from its usual place.
DOCS_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' https://cdn.jsdelivr.net; "
    "style-src 'self' 'unsafe-inline' https://cdn.jsdelivr.net; img-src 'self' data: https://fastapi.tiangolo.com; "
    f"object-src 'none'; base-uri 'none'; {_FRAMES}"
)
POLICY_HEADER = b"content-security-policy"
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (POLICY_HEADER, _POLICY.encode()),
]

MAX_CLIENTS = 10_000
_PROXY_HEADERS = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")


class ApiKey:
    """The one key that requests must carry; without a key everyone may ask."""

    def __init__(self, key: str | None) -> None:
        self._key = key.encode() if key else None

    @property
    def is_set(self) -> bool:
        """Whether requests need it."""
        return self._key is not None

    def admits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request carries the key, or none is needed; takes the same time for any guess."""
        return self._key is None or any(self._is_key(name, value) for name, value in headers)

    def _is_key(self, name: bytes, value: bytes) -> bool:
        if name == b"authorization":
            scheme, _, value = value.partition(b" ")
            return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), self._key or b"")
        return name == b"x-api-key" and hmac.compare_digest(value, self._key or b"")


def is_own_machine(scope: Scope) -> bool:
    """Whether a request was sent on this very machine, by no proxy and by no foreign page in a browser."""
    client = scope.get("client")
    if client is None or not _is_loopback(client[0]):
        return False
    headers = Headers(scope=scope)
    if any(name in _PROXY_HEADERS for name, _ in scope["headers"]):
        return False
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RateLimiter:
    """A bucket of requests for every client address, refilled at a steady rate, twice the rate deep."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._depth = max(1.0, 2 * per_second)
        # Address: (requests left, when that was so); the longest unseen is forgotten, its bucket being full by then.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, scope: Scope) -> float:
        """Take one request from the client's bucket; return 0, or the seconds until there is one again."""
        now = time.monotonic()
        client = _client_name(scope)
        left, then = self._buckets.pop(client, (self._depth, now))
        left = min(self._depth, left + (now - then) * self._per_second)
        is_free = left >= 1
        self._buckets[client] = (left - 1 if is_free else left, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if is_free else (1 - left) / self._per_second


def _client_name(scope: Scope) -> str:
    client = scope.get("client")
    if client is None:
        return "unknown"
    host = client[0]
    if ":" not in host:
        return host
    # One household has a /64 of addresses.
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host
