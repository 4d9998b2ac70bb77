"""The load: one light process, closed loop or open loop, raw sockets kept alive, every request
accounted for.

It shares the cores with the server that it measures, so it does little: requests are encoded before
the clock starts, answers are parsed only for their status and length, and it reports its own share
of the processor. Started as `python -m benchmarks.serving.client` with one JSON argument (a
`Load`), it prints one JSON line (a `Tally`'s summary).
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
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

NO_ANSWER = "no answer"  # still waiting when the patience ended
BROKEN = "broken"  # the connection failed or was closed before the answer
NOT_SENT = "not sent"  # more requests in flight than a client may have sockets
RECEIVE_BYTES = 1 << 16
# An open loop opens a socket per request that waits, so a server that answers nothing would take
# them without end.
MAX_CONNECTIONS = 4000
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Load:
    """What to send.

    Attributes:
        bodies: a file with one JSON body per line; they are sent in turn, over and over.
        texts: texts in each body.
        seconds: how long requests are sent; the client then waits for those in flight.
        clients: closed loop: the number of clients, each of which sends its next request once the
            last is answered; 0: open loop.
        rate: open loop: requests per second, however the server answers.
        poisson: open loop: random gaps of that mean, instead of equal ones.
        patience: seconds to wait for answers after the last request.
        first: the body to begin with.
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
        # By status: a refusal takes next to no time, and would make the median of the answers look
        # better the more texts a server turns away.
        self.seconds: dict[str, list[float]] = {}
        self.done_at: list[float] = []
        # Cores' worth of processor time that this client took while it was sending.
        self.client_cores = 0.0
        self.lateness: list[float] = []

    def answered(self, status: str, since: float, now: float) -> None:
        """Count an answer; ``since``: when its request was sent, or should have been."""
        self.outcomes[status] += 1
        self.seconds.setdefault(status, []).append(now - since)
        if status == "200":
            self.done_at.append(now)

    def summary(self, load: Load, began: float) -> dict[str, Any]:
        # Closed loop: all answers, over the time until the last of them. The rates of single clients
        # until their own last answers would add up to more than the server gives: all clients
        # begin at once, so their first answers take half as long on average as all later ones. With
        # 64 clients that get three answers each, the sum is a sixth too high.
        # Open loop: answers while requests were being sent; later ones belong to no steady state.
        end = max(self.done_at, default=began) if load.clients else began + load.seconds
        in_time = sum(at <= end for at in self.done_at)
        return {
            "load": asdict(load),
            "outcomes": {name: count for name, count in self.outcomes.items() if count},
            "latency": {status: _quantiles(values) for status, values in self.seconds.items()},
            "texts_per_second": load.texts * in_time / (end - began) if in_time else 0.0,
            "texts_answered": load.texts * self.outcomes["200"],
            "client_cores": self.client_cores,
            "lateness_p99": _quantiles(self.lateness)["p99"] if self.lateness else 0.0,
        }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank quantiles, which are values that really occurred."""
    # Not interpolated: between two answers of a bimodal load lies a latency that nobody ever had.
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        name: ordered[round(q * last)]
        for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1))
    }


@dataclass(eq=False)
class Connection:
    """A socket that is kept alive, and the answer that is being read from it; ``since``: its request's start."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    since: float = 0.0
    is_last: bool = False  # the server closes the connection after this answer

    def status(self) -> str | None:
        """Read what has arrived: the status once the answer is complete, else None; BROKEN if the server hung up."""
        try:
            piece = self.socket.recv(RECEIVE_BYTES)
        except OSError:
            piece = b""
        if not piece:
            return BROKEN
        self.received += piece
        if not _is_complete(self.received):
            return None
        # `HTTP/1.1 ` has nine bytes, and the next three are the status.
        status = self.received[9:12].decode("ascii", "replace")
        self.is_last = _CLOSES.search(self.received, 0, self.received.find(b"\r\n\r\n")) is not None
        self.received.clear()
        return status


class Client:
    """Sends a load and tallies the outcomes."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.tally = Tally()
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        head = (
            f"POST {load.path} HTTP/1.1\r\nHost: 127.0.0.1:{load.port}\r\nContent-Type: "
            "application/json\r\n"
        )
        bodies = Path(load.bodies).read_bytes().splitlines()
        self._requests = [
            f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies
        ]
        self._next = load.first

    def closed_loop(self) -> float:
        """Run the clients of a closed loop; returns the time at which they began."""
        connections = [self._connect() for _ in range(self.load.clients)]
        began, cpu = time.perf_counter(), time.process_time()
        end = began + self.load.seconds
        # All connections are open before the first request: a handshake is no part of an answer.
        waiting = {
            connection for connection in connections if self._send(connection, time.perf_counter())
        }
        while waiting and (now := time.perf_counter()) < end + self.load.patience:
            for connection, status in self._answers(end + self.load.patience - now):
                now = time.perf_counter()
                waiting.discard(connection)
                self.tally.answered(status, connection.since, now)
                # A client whose connection ends stops: reconnecting would hide the failure.
                if now < end and _can_go_on(connection, status) and self._send(connection, now):
                    waiting.add(connection)
        # These are not dropped: a server that never answers its slowest requests would have a
        # better p99 than one that does.
        self.tally.outcomes[NO_ANSWER] += len(waiting)
        self._count_cores(began, cpu)
        return began

    def _count_cores(self, began: float, cpu: float) -> None:
        seconds = time.perf_counter() - began
        self.tally.client_cores = (time.process_time() - cpu) / seconds

    def open_loop(self) -> float:
        """Send at a fixed rate, on as many connections as that takes; returns the time at which it began."""
        # Some connections beforehand, so that the first requests do not wait for handshakes; a
        # server that falls behind needs more of them, which are opened on the way.
        free = deque(self._connect() for _ in range(64))
        waiting: set[Connection] = set()
        began, cpu = time.perf_counter(), time.process_time()
        for due in _send_times(self.load, began):
            while (now := time.perf_counter()) < due:
                self._take_answers(due - now, waiting, free)
            # Latency counts from `due`, not from now: a client that falls behind (because the
            # server does) would otherwise leave out the waits it should have seen, known as
            # coordinated omission.
            self.tally.lateness.append(now - due)
            connection = None
            with suppress(OSError):
                if free:
                    connection = free.pop()
                elif len(waiting) < MAX_CONNECTIONS:
                    connection = self._connect()
            if connection is None:
                self.tally.outcomes[NOT_SENT] += 1
            elif self._send(connection, due):
                waiting.add(connection)
            # Without waiting: what has been answered meanwhile frees its connection, so the next
            # request need not open another one.
            self._take_answers(0, waiting, free)
        self._count_cores(began, cpu)
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
            if _can_go_on(connection, status):
                free.append(connection)

    def _answers(self, wait: float) -> Iterator[tuple[Connection, str]]:
        """Answers that arrive within ``wait`` seconds, and connections that broke."""
        # epoll's own timeout is rounded to milliseconds; select on its descriptor is exact.
        if wait > 0 and not select.select([self._epoll], [], [], wait)[0]:
            return
        for number, _ in self._epoll.poll(0):
            connection = self._connections[number]
            status = connection.status()
            # Forgotten before the caller hears of it: the system gives the same number to the next
            # socket that is opened, which must not be taken for this one.
            if status == BROKEN or connection.is_last:
                self._epoll.unregister(number)
                connection.socket.close()
                del self._connections[number]
            if status is not None:
                yield connection, status

    def _send(self, connection: Connection, since: float) -> bool:
        request = self._requests[self._next % len(self._requests)]
        self._next += 1
        connection.since = since
        try:
            # Loopback's buffer takes a whole body without blocking.
            connection.socket.sendall(request)
        except OSError:
            self.tally.outcomes[BROKEN] += 1
            return False
        return True

    def _connect(self) -> Connection:
        connection = Connection(
            socket.create_connection(("127.0.0.1", self.load.port), timeout=self.load.patience)
        )
        # Otherwise the kernel may hold a small request back until earlier bytes are acknowledged,
        # and the wait would look like the server's.
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket.fileno(), select.EPOLLIN)
        return connection


def _can_go_on(connection: Connection, status: str) -> bool:
    return status != BROKEN and not connection.is_last


def _send_times(load: Load, began: float) -> Iterator[float]:
    """The time at which each request of an open loop should be sent."""
    count = round(load.rate * load.seconds)
    if not load.poisson:
        yield from (began + number / load.rate for number in range(count))
        return
    # `first` depends on the round alone, so all servers of a round get the same gaps.
    random = Random(load.first)
    # Given its number of events, the times of a Poisson process are independent and uniform.
    yield from sorted(began + random.uniform(0, load.seconds) for _ in range(count))


def _is_complete(received: bytearray) -> bool:
    # As little HTTP as the servers here need: a length, or chunks whose end is the empty one.
    head = received.find(b"\r\n\r\n")
    if head < 0:
        return False
    length = _LENGTH.search(received, 0, head)
    if length:
        return len(received) >= head + 4 + int(length[1])
    return received.endswith(b"\r\n0\r\n\r\n")  # chunked


def main() -> None:
    load = Load(**json.loads(sys.argv[1]))
    # A server that answers nothing keeps every connection open, far more than the usual 1,024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * MAX_CONNECTIONS), hard))
    client = Client(load)
    gc.disable()  # a pause of the client would look like one of the server
    cpu, wall = time.process_time(), time.perf_counter()
    began = client.closed_loop() if load.clients else client.open_loop()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(json.dumps(client.tally.summary(load, began) | {"wall_s": wall, "client_cpu_s": cpu}))


if __name__ == "__main__":
    main()
