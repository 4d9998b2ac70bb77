"""Ask a server over HTTP, from the standard library alone: once, or again until it answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.request import Request, urlopen


def fetch(
    url: str, body: Any = None, headers: Mapping[str, str] | None = None, *, timeout: float = 30
) -> bytes:
    """The content of the answer to a GET, or to a POST of ``body`` as JSON.

    Raises:
        OSError: there is no answer, or it has an error's status (HTTPError).
    """
    sent = None if body is None else json.dumps(body).encode()
    request = Request(url, sent, {} if sent is None else {"Content-Type": "application/json"})
    for name, value in (headers or {}).items():
        # These may carry a token. urllib sends an ordinary header to any host that it is
        # redirected to, but not an unredirected one.
        request.add_unredirected_header(name, value)
    with urlopen(request, timeout=timeout) as response:
        return response.read()


def fetch_json(url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
    """The same, for an answer in JSON; raises ValueError if it is something else."""
    return json.loads(fetch(url, body, headers))


def attempts(seconds: float, pause: float) -> Iterator[None]:
    """Let a loop try again, with a pause in between, until it breaks or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)
