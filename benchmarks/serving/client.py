"""The load: one light process, closed loop or open loop, raw sockets kept alive, every request accounted for.

It shares the cores with the server that it measures, so it does little: requests are made into bytes before the clock
starts, answers are read as far as their status and length, and it reports its own share of the processor. Started as
`python -m benchmarks.serving.client` with one JSON argument (a `Load`), it prints one JSON line (a `Tally`'s summary).
"""

from __future__ import annotations

import gc
import json
import re
import resource
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.serving.load import BROKEN, NO_ANSWER, NOT_SENT, Load, Tally

RECEIVED_AT_ONCE = 1 << 16
MOST_CONNECTIONS = 4000
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(eq=False)
class Connection:
    """A socket that is kept alive, and the answer that is being read from it."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    since: float = 0.0  # of the request under way
    sent: int = 0
    answered: int = 0
    last_answer: float = 0.0

    def send(self, request: bytes, since: float) -> None:
        """Send a request; loopback takes a body whole."""
        self.since = since
        self.sent += 1
        self.socket.sendall(request)

    def status(self) -> str | None:
        """Read what came: the answer's status once it is whole, else None; BROKEN when the server hung up."""
        try:
            piece = self.socket.recv(RECEIVED_AT_ONCE)
        except OSError:
            return BROKEN
        if not piece:
            return BROKEN
        self.received += piece
        if not _is_whole(self.received):
            return None
        status = self.received[9:12].decode("ascii", "replace")
        self.received.clear()
        return status


class Client:
    """Sends a load and keeps the tally."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.tally = Tally()
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._requests = _render(load)
        self._next = load.first

    def closed_loop(self) -> float:
        """Run the clients of a closed loop; returns when they began."""
        connections = [self._connect() for _ in range(self.load.clients)]
        began = time.perf_counter()
        end = began + self.load.seconds
        waiting = {connection for connection in connections if self._send(connection, time.perf_counter())}
        while waiting and (now := time.perf_counter()) < end + self.load.patience:
            for connection, status in self._answers(end + self.load.patience - now):
                now = time.perf_counter()
                self.tally.answered(status, connection.since, now)
                waiting.discard(connection)
                if status == "200":
                    connection.answered += 1
                    connection.last_answer = now
                if status == BROKEN:
                    continue  # this client is out: a reconnecting one would hide the failure
                if now < end and self._send(connection, now):
                    waiting.add(connection)
        self.tally.outcomes[NO_ANSWER] += len(waiting)
        self.tally.client_rates = [c.answered / (c.last_answer - began) for c in connections if c.answered]
        return began

    def open_loop(self) -> float:
        """Send at a rate whatever is answered, on as many connections as that takes; returns when it began."""
        free = deque(self._connect() for _ in range(64))
        waiting: set[Connection] = set()
        began = time.perf_counter()
        for due in _instants(self.load, began):
            while (now := time.perf_counter()) < due:
                self._take_answers(due - now, waiting, free)
            self.tally.lateness.append(now - due)
            connection = free.pop() if free else self._connect_more(waiting)
            if connection is None:
                self.tally.outcomes[NOT_SENT] += 1
            elif self._send(connection, due):
                waiting.add(connection)
            self._take_answers(0, waiting, free)
        end = began + self.load.seconds + self.load.patience
        while waiting and (now := time.perf_counter()) < end:
            self._take_answers(end - now, waiting, free)
        self.tally.outcomes[NO_ANSWER] += len(waiting)
        return began

    def _take_answers(self, wait: float, waiting: set[Connection], free: deque[Connection]) -> None:
        for connection, status in self._answers(wait):
            if connection in waiting:
                self.tally.answered(status, connection.since, time.perf_counter())
                waiting.discard(connection)
            elif connection in free:
                free.remove(connection)  # the server closed an idle connection
                continue
            if status != BROKEN:
                free.append(connection)

    def _answers(self, wait: float) -> Iterator[tuple[Connection, str]]:
        """Answers that came within ``wait`` seconds, and connections that broke."""
        # epoll's own timeout counts in whole milliseconds; select on its descriptor is exact.
        if wait > 0 and not select.select([self._epoll], [], [], wait)[0]:
            return
        for number, _ in self._epoll.poll(0):
            connection = self._connections[number]
            status = connection.status()
            if status == BROKEN:
                self._epoll.unregister(number)
                connection.socket.close()
                del self._connections[number]
            if status is not None:
                yield connection, status

    def _send(self, connection: Connection, since: float) -> bool:
        request = self._requests[self._next % len(self._requests)]
        self._next += 1
        try:
            connection.send(request, since)
        except OSError:
            self.tally.outcomes[BROKEN] += 1
            return False
        return True

    def _connect(self) -> Connection:
        connection = Connection(socket.create_connection(("127.0.0.1", self.load.port), timeout=self.load.patience))
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket.fileno(), select.EPOLLIN)
        return connection

    def _connect_more(self, waiting: set[Connection]) -> Connection | None:
        try:
            return self._connect() if len(waiting) < MOST_CONNECTIONS else None
        except OSError:
            return None


def _render(load: Load) -> list[bytes]:
    head = f"POST {load.path} HTTP/1.1\r\nHost: 127.0.0.1:{load.port}\r\nContent-Type: application/json\r\n"
    bodies = Path(load.bodies).read_bytes().splitlines()
    return [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]


def _instants(load: Load, began: float) -> Iterator[float]:
    """When each request of an open loop is to be sent."""
    count = round(load.rate * load.seconds)
    if not load.poisson:
        yield from (began + number / load.rate for number in range(count))
        return
    random = Random(load.first)
    # So many instants thrown at random into the time are what a Poisson process of that number looks like.
    yield from sorted(began + random.uniform(0, load.seconds) for _ in range(count))


def _is_whole(received: bytearray) -> bool:
    head = received.find(b"\r\n\r\n")
    if head < 0:
        return False
    length = _LENGTH.search(received, 0, head)
    if length:
        return len(received) >= head + 4 + int(length[1])
    return received.endswith(b"\r\n0\r\n\r\n")  # chunked


def main() -> None:
    """Send the load that the argument describes."""
    load = Load(**json.loads(sys.argv[1]))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * MOST_CONNECTIONS), hard))
    client = Client(load)
    gc.disable()  # a pause of the client would look like one of the server
    cpu, wall = time.process_time(), time.perf_counter()
    began = client.closed_loop() if load.clients else client.open_loop()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(json.dumps(client.tally.summary(load, began) | {"wall_s": wall, "client_cpu_s": cpu}))


if __name__ == "__main__":
    main()
