"""Redirects of a source that may not be trusted: where they may lead, and who gets the token."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from http.client import HTTPConnection, HTTPMessage, HTTPResponse, HTTPSConnection
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import IO, Any
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request

_NAT64 = IPv6Network("64:ff9b::/96")
# What ipaddress takes for public depends on the version of Python. Some cloud has its metadata
# service in the first.
_FOR_PROTOCOLS = IPv4Network("192.0.0.0/24")
_PUBLIC_V6 = IPv6Network("2000::/3")


class RedirectRefused(Exception):
    """A redirect is not followed, however often the source is asked; the message says why."""


class Redirects(HTTPRedirectHandler, HTTPHandler, HTTPSHandler):
    """Follows the redirects of one request, never from https to http, nor from a public address to
    an internal one.

    A server that can redirect us could otherwise have us ask what only this machine or its network
    can reach, such as the metadata service of a cloud. The token goes only to where it was sent
    first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[HTTPMessage] = []  # of each redirect
        # Of the address that the user named; known once we have connected to it.
        self._source_kind = ""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        self.headers.append(headers)
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        # To https is always allowed; to http only from http, where nothing is lost.
        if new.scheme not in ("https", old.scheme):
            raise RedirectRefused(
                f"redirected from {old.scheme} to {new.scheme}, which is not followed"
            )
        # A proxy resolves names itself, so behind one the written addresses are all that can be
        # checked.
        self._source_kind = self._source_kind or kind_of(_written_address(old.hostname))
        if address := _written_address(new.hostname):
            self._allow(address)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        # The library drops it on every redirect; another path of the same server may have it.
        if request is not None and _origin(old) == _origin(new):
            for name, value in req.unredirected_hdrs.items():
                if name == "Authorization":
                    request.add_unredirected_header(name, value)
        return request

    def http_open(self, req: Request) -> HTTPResponse:
        return self._open(_Connection, req)

    def https_open(self, req: Request) -> HTTPResponse:
        return self._open(_TlsConnection, req)

    def _open(self, kind: type[_Connection], request: Request) -> HTTPResponse:
        to_proxy = request.host != unquote(urlsplit(request.full_url).netloc)

        def connection(host: str, **options: Any) -> HTTPConnection:
            made = kind(host, **options)
            # Behind a proxy the connection leads to the proxy. Its address was set by the user and
            # is often a private one.
            made.connected_to = (lambda _: None) if to_proxy else self._allow
            return made

        return self.do_open(connection, request)

    def _allow(self, address: str) -> None:
        """Refuse an address unless it is public, or of the same kind as the source's."""
        kind = kind_of(address)
        self._source_kind = self._source_kind or kind
        if kind not in ("public", self._source_kind):
            what = (
                f"redirected to {address}, a {kind} address, which is not followed from a "
                f"{self._source_kind} one"
            )
            raise RedirectRefused(f"{what}; give the address of the server that has the files")


class _Connection(HTTPConnection):
    """Reports the address that it has connected to before it sends anything there.

    A name that was resolved and checked earlier might lead elsewhere by now.
    """

    connected_to: Callable[[str], None]

    def connect(self) -> None:
        super().connect()
        self.connected_to(self.sock.getpeername()[0])


class _TlsConnection(HTTPSConnection, _Connection):
    """HTTPSConnection connects by the next class, which is ours, and then shakes hands."""


def _written_address(host: str | None) -> str | None:
    """The address that a host is, however it is spelled: 2852039166 is 169.254.169.254."""
    host = unquote(host or "-").rstrip(".")
    if f".{host}".endswith(".localhost"):
        return "127.0.0.1"
    with contextlib.suppress(OSError, ValueError):
        return str(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)[0][4][0])
    return None


def kind_of(address: str | None) -> str:
    """Whether an address is public, or only this machine or network reaches it (None: public)."""
    if address is None:
        return "public"
    ip = ip_address(address)
    if isinstance(ip, IPv6Address):
        ip = _embedded_v4(ip) or ip
    # 0.0.0.0 and :: lead to this machine too.
    if ip.is_loopback or ip.is_unspecified:
        return "loopback"
    if ip.is_link_local:
        return "link-local"
    return "public" if ip.is_global and _is_of_one_host(ip) else "private"


def _is_of_one_host(ip: IPv4Address | IPv6Address) -> bool:
    if isinstance(ip, IPv6Address):
        return ip in _PUBLIC_V6
    return not ip.is_multicast and ip not in _FOR_PROTOCOLS


def _embedded_v4(ip: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that packets to this one may reach in the end, by mapping or a gateway."""
    inside = IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
    return ip.ipv4_mapped or ip.sixtofour or inside


def _origin(url: SplitResult) -> tuple[str, str | None, int]:
    # An address may leave out its port and still name the same server.
    return url.scheme, url.hostname, url.port or (443 if url.scheme == "https" else 80)
