"""Corrects how uvicorn reads and answers HTTP/1: offers of other protocols, huge headers, clients
of HTTP/1.0, requests that can be refused at their headers.

All JDK clients and `curl --http2` offer to continue in HTTP/2 (`Upgrade: h2c`). A server that does
not accept an offer has to ignore it (RFC 9110, 7.8). But httptools ends such a request at its
headers, so uvicorn would answer it without its body and then run the body as the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools

# Bytes of a request's headers; the same limit as in uvicorn's other parser, h11.
MAX_HEADER_BYTES = 64 * 1024

Headers = list[tuple[bytes, bytes]]
# From the URL and the headers of a POST, and the headers that are part of every answer: the complete
# answer, or None if the application is to give it.
AnswerEarly = Callable[[bytes, Headers, Headers], bytes | None]


def corrected(protocol: type[Any], answer_early: AnswerEarly) -> type[Any]:
    """Subclass one of uvicorn's two protocols; h11's only has to learn to accept no offer."""

    class Http1Protocol(protocol):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            # There is no route for WebSockets, so no offer is ever accepted.
            self.ws_protocol_class = None
            self.arriving_bytes = 0  # of the headers, and at most what arrived with them
            self.is_due_back = False  # the next answer closes the connection
            if hasattr(self, "parser"):
                self.parser = _OfferIgnoringParser(self)

        def _unsupported_upgrade_warning(self) -> None:
            pass  # it would be logged for each request of such a client

        # The rest is called by httptools' parser.

        def on_headers_complete(self) -> None:
            # Counted only if so much has arrived that they may be too large.
            is_large = (
                self.arriving_bytes > MAX_HEADER_BYTES
                and _num_bytes(self.headers) > MAX_HEADER_BYTES
            )
            # CONNECT ends at its headers, too: this is no proxy.
            if is_large or self.parser.get_method() == b"CONNECT":
                raise ValueError  # answered with 400, and the connection is closed
            if self.parser.should_upgrade():
                return
            if self._may_be_answered_early():
                answer = answer_early(self.url, self.headers, self.server_state.default_headers)
                if answer is not None:
                    # To uvicorn, a request whose answer is complete: it skips the body as it comes.
                    # Its keep-alive timer would be a sixth of the cost of the answer, and
                    # `ConnectionKeeper` ends idle connections, too.
                    self.cycle = _AnsweredCycle(self.scope)
                    self.transport.write(answer)
                    self.server_state.total_requests += 1
                    return
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                self.cycle.transport = _WithoutChunks(self.cycle.transport)

        def _may_be_answered_early(self) -> bool:
            # Not before the answers to the requests before it; nor to a client that does not read,
            # which only the application waits for.
            is_next = self.cycle is None or self.cycle.response_complete
            return (
                is_next
                and not (self.flow.write_paused or self.is_due_back or self.root_path)
                and self.parser.get_method() == b"POST"
                and self.parser.get_http_version() == "1.1"
                and self.parser.should_keep_alive()
            )

        def on_message_complete(self) -> None:
            if not self.parser.should_upgrade():
                super().on_message_complete()

    return Http1Protocol


class _AnsweredCycle:
    """Stands for uvicorn's cycle of a request that was answered early."""

    response_complete = True
    message_event = asyncio.Event()  # set when a connection is lost; nobody waits for it

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope


class _OfferIgnoringParser(httptools.HttpRequestParser):
    """If an offer stops the parser, it continues with the same headers without the offer."""

    def __init__(self, protocol: Any) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._protocol = protocol

    def feed_data(self, data: bytes | memoryview) -> None:
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                # The parser has ended the request at its headers. It is told of a new one, the same
                # without the offer, and then reads on at the byte where it had stopped: the body.
                super().feed_data(self._headers_without_offer())
                data = memoryview(data)[stop.args[0] :]

    def _headers_without_offer(self) -> bytes:
        version = self.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.get_method(), self._protocol.url, version)]
        lines += [
            b"%s: %s" % header for header in self._protocol.headers if header[0] != b"upgrade"
        ]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class _WithoutChunks:
    """A transport to a client of HTTP/1.0, which knows no chunks: the end of the connection ends
    its answer.

    uvicorn writes the headers, and then each chunk, with one call.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._has_chunks: bool | None = None

    def write(self, data: bytes) -> None:
        if self._has_chunks is None:
            # The first write is the headers. Without the one about chunks the client reads until
            # the connection ends.
            whole, data = data, data.replace(b"transfer-encoding: chunked\r\n\r\n", b"\r\n")
            self._has_chunks = data != whole
        elif self._has_chunks:
            # "LENGTH\r\nchunk\r\n"; the last one has the length 0 and no bytes.
            length, _, chunk = data.partition(b"\r\n")
            data = chunk[: int(length or b"0", 16)]
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _num_bytes(headers: Headers) -> int:
    return sum(len(name) + len(value) for name, value in headers)
