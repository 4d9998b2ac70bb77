"""Ends connections that only cost memory and files: too slow, too many, or with an answer that
nobody reads.

uvicorn bounds none of these. A client may open connections and send nothing, send its headers byte
by byte, or never read its answer. This works with both of uvicorn's HTTP protocols, also under
`uvicorn inference.app:app`, because each connection is made by a subclass of the protocol class
that uvicorn has chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.http.admission import as_ipv4
from inference.http.http1 import MAX_HEADER_BYTES, AnswerEarly, corrected

if TYPE_CHECKING:
    from uvicorn import Server

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.5
# A connection that has been idle for less than this is not ended for another: its next request, or
# its first, may be on the way.
_GRACE_S = 1.0
# A refused client has this long to read its answer. Closing at once would send a reset, which may
# overtake the answer.
_REFUSAL_S = 1.0
# Files that the process opens for other things: loading a model, the log, DNS; half of them for
# refused clients.
_SPARE_FILES = 64
# Connections that are accepted in one turn of the event loop, besides the one that uvloop accepts.
_ACCEPTED_AT_ONCE = 64
_CLOSE = (b"connection", b"close")
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\n"
    b"Content-Type: text/plain\r\nContent-Length: 46\r\n\r\n"
    b"all connections are in use; try again in 5 s.\n"
)


class ConnectionKeeper:
    def __init__(
        self,
        max_connections: int,
        timeout_s: float,
        max_age_s: float,
        answer_early: AnswerEarly,
    ) -> None:
        """Create the keeper; `watching` starts it.

        Args:
            max_connections: a new connection beyond this ends the one that has been idle longest;
                if none has been idle for a second, the new one gets 503.
            timeout_s: seconds within which headers must be complete, and within which part of an
                answer must be read.
            max_age_s: seconds after which a connection ends with its next answer; 0 for never.
            answer_early: what answers requests at their headers.
        """
        self._max_connections = max_connections
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s or float("inf")
        self._answer_early = answer_early
        self._open: set[Any] = set()
        self._refused: set[asyncio.Transport] = set()
        self._server: Any = None
        self._will_accept = False
        self._accepting: set[asyncio.Task[Any]] = set()
        # Until then no connection can have been idle for long enough to be ended.
        self._full_until = 0.0

    @contextlib.asynccontextmanager
    async def watching(self, server: Server | None) -> AsyncIterator[None]:
        """Watch the connections of a server that is about to open its port."""
        if server is None:
            yield
            return
        self._max_connections = _within_file_limit(self._max_connections)
        self._server = server
        protocol = server.config.http_protocol_class
        server.config.http_protocol_class = self._watched(protocol)
        task = asyncio.create_task(self._close_stuck_connections())
        try:
            yield
        finally:
            task.cancel()
            server.config.http_protocol_class = protocol

    @property
    def most_requests(self) -> int:
        """On how many connections requests may be in progress, so that some are left for refusals.

        Half of them: clients that are refused for a tenth of a second need as many connections as
        come in that time. With a tenth of 1,000 left for them, 2,000 requests per second soon
        filled all, so that most refusals came on a new connection, which costs several times as
        much.
        """
        return self._max_connections - self._max_connections // 2

    def _watched(self, protocol: type[Any]) -> type[Any]:
        keeper = self

        class WatchedProtocol(corrected(protocol, keeper._answer_early)):
            def connection_made(self, transport: asyncio.Transport) -> None:
                keeper._accept_more_soon()
                if not keeper._has_room():
                    keeper._refuse(transport)
                    return
                super().connection_made(_OneWrite(transport))
                # To a socket for both kinds of addresses, proxies come with mapped ones.
                if self.client:
                    self.client = (as_ipv4(self.client[0]), self.client[1])
                self.idle_since = self.headers_since = time.monotonic()
                # A tenth more or less, or the clients of a server that was full would all come back
                # at once.
                self.given_back_at = self.idle_since + keeper._max_age_s * random.uniform(0.9, 1.1)
                self.header_bytes = 0
                self.unread_bytes = 0
                self.unread_since = 0.0
                keeper._open.add(self)

            def connection_lost(self, exc: Exception | None) -> None:
                keeper._open.discard(self)
                super().connection_lost(exc)

            def data_received(self, data: bytes) -> None:
                self.arriving_bytes = self.header_bytes + len(data)
                self.is_due_back = time.monotonic() > self.given_back_at
                before = self.cycle
                super().data_received(data)
                if not _awaits_headers(self):
                    self.header_bytes = 0
                    if self.cycle is not before or _is_at_work(self):
                        self.idle_since = time.monotonic()  # often over before the next check
                        if self.is_due_back:
                            # As if the client had asked for it: uvicorn answers with the same
                            # header, then closes.
                            self.given_back_at = float("inf")
                            self.cycle.keep_alive = False  # read by its httptools protocol
                            self.cycle.scope["headers"].append(_CLOSE)  # by its h11 protocol
                    return
                if not self.header_bytes and self.cycle is not None:
                    self.headers_since = time.monotonic()
                    # What arrived with them may be the body of the request before.
                    self.header_bytes = 1
                else:
                    self.header_bytes += len(data)
                if self.header_bytes > MAX_HEADER_BYTES:
                    self.transport.abort()

        return WatchedProtocol

    def _accept_more_soon(self) -> None:
        """Accept what else has come, in the next turn of the event loop.

        uvloop accepts one connection per turn of its loop (libuv since 1.45). Under overload a turn
        takes tens of milliseconds, so clients would wait for seconds to be accepted.
        """
        if not self._will_accept:
            self._will_accept = True
            asyncio.get_running_loop().call_soon(self._accept_more)

    def _accept_more(self) -> None:
        self._will_accept = False
        server, loop = self._server, asyncio.get_running_loop()
        if not server.started:
            return

        def connection() -> asyncio.Protocol:  # as uvicorn makes it
            return server.config.http_protocol_class(
                config=server.config,
                server_state=server.server_state,
                app_state=server.lifespan.state,
            )

        # A server that is closed has no sockets any more.
        for one in [one for each in server.servers for one in each.sockets]:
            for accepted in _accepted(one.fileno(), one.family):
                making = loop.connect_accepted_socket(connection, accepted, ssl=server.config.ssl)
                task = loop.create_task(making)
                self._accepting.add(task)
                task.add_done_callback(self._made)

    def _made(self, task: asyncio.Task[Any]) -> None:
        self._accepting.discard(task)
        # A TLS handshake may fail: that is between its client and its log.
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a connection was not made: %s", error)

    def _has_room(self) -> bool:
        """Whether one more may be open; the one that has been idle longest is ended for it."""
        if len(self._open) < self._max_connections:
            return True
        now = time.monotonic()
        if now < self._full_until:
            return False
        idle = [one for one in self._open if not _is_at_work(one)]
        oldest = min(idle, key=lambda one: one.idle_since, default=None)
        if oldest is None or now - oldest.idle_since < _GRACE_S:
            # Under a flood of connections one look at all of them each time would be most of the
            # work.
            self._full_until = (
                now + _CHECK_INTERVAL_S if oldest is None else oldest.idle_since + _GRACE_S
            )
            return False
        self._open.discard(oldest)
        oldest.transport.abort()
        return True

    def _refuse(self, transport: asyncio.Transport) -> None:
        # The server's own protocol, which has not been told of the connection, is not to be told of
        # its end either.
        transport.set_protocol(_Refused(transport, self._refused))
        transport.write(_FULL)
        if len(self._refused) >= _SPARE_FILES // 2:
            transport.close()
            return
        self._refused.add(transport)
        transport.write_eof()  # the client closes when it has read this
        asyncio.get_running_loop().call_later(_REFUSAL_S, transport.abort)

    async def _close_stuck_connections(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            now = time.monotonic()
            for connection in list(self._open):
                if _is_at_work(connection):
                    connection.idle_since = now
                if self._is_stuck(connection, now):
                    connection.transport.abort()

    def _is_stuck(self, connection: Any, now: float) -> bool:
        if _awaits_headers(connection) and now - connection.headers_since > self._timeout_s:
            return True
        # uvicorn ends idle connections itself, but stops its timer at the first byte, whatever that
        # is.
        if now - connection.idle_since > connection.timeout_keep_alive + self._timeout_s:
            return True
        # An answer that nobody reads: the write buffer is not empty and has not shrunk since the
        # last check.
        unread, before = connection.transport.get_write_buffer_size(), connection.unread_bytes
        connection.unread_bytes = unread
        if not unread or not before or unread < before:
            connection.unread_since = now
        return now - connection.unread_since > self._timeout_s


class _OneWrite:
    """A transport that sends together what is written in one turn of the event loop.

    uvicorn writes an answer's headers and its body one after the other: two system calls and two
    packets.
    """

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._held = data
            self._loop.call_soon(self._send)
        else:
            self._held += data
            self._send()

    def _send(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._transport.write(held)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Refused(asyncio.Protocol):
    """Takes what a refused client still sends."""

    def __init__(self, transport: asyncio.Transport, still_open: set[asyncio.Transport]) -> None:
        self._transport, self._still_open = transport, still_open

    def connection_lost(self, exc: Exception | None) -> None:
        self._still_open.discard(self._transport)


def _accepted(number: int, family: int) -> Iterator[socket.socket]:
    """The connections that wait at a listening socket, but no more than are accepted at once."""
    # uvloop shows its sockets without their `accept`, and the file stays its own.
    listening = socket.socket(family, socket.SOCK_STREAM, fileno=number)
    try:
        for _ in range(_ACCEPTED_AT_ONCE):
            accepted, _ = listening.accept()
            accepted.setblocking(False)
            yield accepted
    except OSError:  # none is left, or the process may open no more files
        pass
    finally:
        listening.detach()


def _awaits_headers(connection: Any) -> bool:
    """Whether headers are incomplete: of the first request, or a later one that has begun."""
    # httptools' protocol creates the scope with the first byte of a request and the cycle with the
    # last of its headers. h11's creates both at once; it bounds headers itself, and their time is
    # bounded as idle time.
    return connection.cycle is None or connection.scope is not connection.cycle.scope


def _is_at_work(connection: Any) -> bool:
    return connection.cycle is not None and not connection.cycle.response_complete


def _within_file_limit(max_connections: int) -> int:
    """Raise the process's limit of open files, or lower the number of connections to fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = sum(1 for _ in Path("/proc/self/fd").iterdir()) + _SPARE_FILES
    wanted = max_connections + others
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            max_connections = max(1, soft - others)
            logger.warning(
                "MAX_CONNECTIONS: %d, as the process may open %d files (ulimit -n)",
                max_connections,
                soft,
            )
    return max_connections
