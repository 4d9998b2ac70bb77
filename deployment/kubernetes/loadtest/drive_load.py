"""Load for a server from inside the cluster: clients that each send their next text when the last
is answered.

Needs the standard library alone, so that the served image can run it. Prints one JSON line; exit
code 1 when any request was not answered with 200. `servers` counts the answers of each server
process, so an uneven load shows, and a pod that joined gets a share only if `connections` are
opened again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from threading import Thread
from urllib.parse import urlsplit

TEXTS = (
    "Oil prices climb to a record as markets fear a shortage of supply",
    "The home side won the cup final after extra time and penalties",
    "A new chip doubles the speed of phones, its makers say",
    "Ministers meet in Geneva for talks on a cease-fire",
)
ANSWER_SECONDS = 60


class Client(Thread):
    """Sends texts one after the other until the deadline, and records statuses, errors and seconds per answer."""

    def __init__(self, number: int, address: str, end: float) -> None:
        super().__init__()
        self.outcomes: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.servers: Counter[str] = Counter()
        self.num_connections = 0
        # Clients begin at different texts, so that a server with a cache does not get the same one
        # from all of them at once.
        self._next = number
        self._end = end
        parts = urlsplit(address)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connection = kind(parts.netloc, timeout=ANSWER_SECONDS)
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("API_KEY", "").strip():
            self._headers["Authorization"] = f"Bearer {key}"

    def run(self) -> None:
        while (began := time.monotonic()) < self._end:
            outcome = self._ask(TEXTS[self._next % len(TEXTS)])
            self.outcomes[outcome] += 1
            self._next += 1
            if outcome == "200":
                self.seconds.append(time.monotonic() - began)
            else:
                time.sleep(0.1)  # a server that refuses at once is not to be flooded

    def _ask(self, text: str) -> str:
        # Without a socket it was never opened, or the last answer closed it.
        self.num_connections += self._connection.sock is None
        try:
            self._connection.request("POST", "/predict", json.dumps({"text": text}), self._headers)
            response = self._connection.getresponse()
            response.read()
            # The server numbers its answers, after a name that each of its processes draws at its
            # start.
            self.servers[response.headers.get("X-Request-ID", "unknown").partition("-")[0]] += 1
        except (OSError, HTTPException) as error:
            # The next request opens a new connection: what is left of a broken answer must not be
            # read as the next one.
            self._connection.close()
            return type(error).__name__
        return str(response.status)


def summary(clients: list[Client], seconds: float) -> dict[str, object]:
    outcomes = sum((client.outcomes for client in clients), Counter())
    ordered = sorted(latency for client in clients for latency in client.seconds)
    # By nearest rank: latencies that really occurred.
    quantiles = {
        f"p{percent}_ms": round(1000 * ordered[percent * (len(ordered) - 1) // 100], 1)
        if ordered
        else None
        for percent in (50, 95, 99)
    }
    errors = {outcome: count for outcome, count in sorted(outcomes.items()) if outcome != "200"}
    return {
        "texts_per_second": round(len(ordered) / seconds, 1),
        **quantiles,
        "answered": len(ordered),
        "servers": dict(sum((client.servers for client in clients), Counter()).most_common()),
        "connections": sum(client.num_connections for client in clients),
        "errors": errors,
    }


def main() -> int:
    """Drive the load that the environment describes: TARGET, CLIENTS and LOAD_SECONDS."""
    address, seconds = os.environ["TARGET"], float(os.environ["LOAD_SECONDS"])
    began = time.monotonic()
    clients = [
        Client(number, address, began + seconds) for number in range(int(os.environ["CLIENTS"]))
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    result = summary(clients, time.monotonic() - began)
    print(json.dumps(result))
    return 1 if result["errors"] or not result["answered"] else 0


if __name__ == "__main__":
    sys.exit(main())
