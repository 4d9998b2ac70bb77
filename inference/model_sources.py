"""Where an exported model is fetched from: an HTTP server, the hub, fsspec, or a folder."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from ipaddress import ip_address
from typing import Protocol
from urllib.error import HTTPError
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import Request, build_opener

from common.credentials import header_token, without_password
from common.errors import ForeseenError, UserError, first_line
from inference.bulk.storage import storage_of
from inference.redirects import RedirectRefused, Redirects

_HUB = "https://huggingface.co"
# A revision with a slash, such as refs/pr/1, is written with %2F, as in the hub's own addresses.
_HUB_ADDRESS = re.compile(
    r"hf://(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w.%-]*))?(?P<folder>(?:/\w[\w.-]*)*)"
)
_PIECE_BYTES = 1 << 20
_SECONDS_OF_SILENCE = 30
# What may be another answer a moment later.
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})


class SourceUnreachable(ForeseenError):
    """The source did not give a file; it may if it is asked again."""

    code = "fetch-unreachable"


class Source(Protocol):
    """What files are read from, each by its path below an address."""

    address: str

    def read(self, path: str) -> Iterator[bytes]:
        """The file in pieces.

        Raises:
            FileNotFoundError: there is none.
            SourceUnreachable: it cannot be read now.
            UserError: it may not be read.
        """


def source_at(address: str, *, is_pinned: bool) -> Source:
    """What reads the files below an address.

    Args:
        address: of a folder: https://..., hf://owner/name[@revision][/folder], s3://bucket/folder,
            or a path.
        is_pinned: the manifest's hash is known, so that it does not matter who could change what
            arrives.
    """
    address = address.rstrip("/")
    if address.startswith("hf://"):
        return HubSource(address)
    if address.startswith(("https://", "http://")):
        url = _checked(address)
        # Nobody is on the way to this machine itself, and a hash says whether anybody was.
        if url.scheme == "http" and not _is_loopback(url) and not is_pinned:
            message = (
                "anyone on the network path could change what arrives over http; use https, or "
                "give --manifest_sha256"
            )
            raise UserError(f"{address}: {message}", code="fetch-address")
        return HttpSource(
            address, address, header_token("FETCH_TOKEN", os.environ.get("FETCH_TOKEN"))
        )
    return StoredSource(address)


@dataclass
class HttpSource:
    """Files below a base address; the token goes to that host alone, wherever it redirects to."""

    address: str
    base: str
    token: str | None

    def read(self, path: str) -> Iterator[bytes]:
        request = self._request(path)
        try:
            redirects = Redirects()
            with build_opener(redirects).open(request, timeout=_SECONDS_OF_SILENCE) as response:
                # The hub redirects large files to a storage, and names the commit in the redirect
                # alone.
                for headers in (*redirects.headers, response.headers):
                    self.answered(headers)
                expected, received = response.headers.get("Content-Length"), 0
                while piece := response.read1(_PIECE_BYTES):
                    received += len(piece)
                    yield piece
                # A connection that is cut looks like the end of the file otherwise.
                if expected is not None and received != int(expected):
                    what = f"{self.address}/{path}: the connection ended after "
                    what += f"{received:,} of {int(expected):,} bytes"
                    raise SourceUnreachable(what)
        except HTTPError as error:
            raise self._why(path, error) from error
        except RedirectRefused as error:
            raise UserError(f"{self.address}/{path}: {error}", code="fetch-address") from error
        # No address in these lines but the one that was given: that of a redirect may hold a
        # signature. Nor the text of a ValueError, which quotes what it rejects: a header, a length.
        except (OSError, HTTPException, ValueError) as error:
            reason = first_line(getattr(error, "reason", None) or error)
            if isinstance(error, ValueError) and not isinstance(error, OSError):
                reason = type(error).__name__
            raise SourceUnreachable(f"{self.address}/{path}: no answer ({reason})") from error

    def _request(self, path: str) -> Request:
        # Not compressed on the way: the bytes are counted against Content-Length and the manifest's
        # sizes.
        request = Request(f"{self.base}/{quote(path)}", headers={"Accept-Encoding": "identity"})
        if self.token:
            if urlsplit(self.base).scheme == "http" and not _is_loopback(urlsplit(self.base)):
                what = f"{self.address}: a token is sent over https only"
                raise UserError(what, code="fetch-address")
            # Unredirected: it is not for the host that a redirect leads to.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        return request

    def answered(self, headers: HTTPMessage) -> None:
        """Look at the headers of an answer, a redirect or the file."""

    def _why(self, path: str, error: HTTPError) -> Exception:
        error.close()
        what = f"{self.address}/{path}: answered {error.code}"
        if error.code in (404, 410):
            return FileNotFoundError(what)
        if error.code in _BUSY:
            return SourceUnreachable(what)
        hint = "; check the address and the token (HF_TOKEN for hf://, else FETCH_TOKEN)"
        return UserError(what + hint, code="fetch-address")


class HubSource(HttpSource):
    """Files of a model repository, by plain addresses: the image has no library of the hub."""

    def __init__(self, address: str) -> None:
        match = _HUB_ADDRESS.fullmatch(address)
        if match is None:
            what = "not an address of the hub; write hf://owner/name[@revision][/folder]"
            raise UserError(f"{without_password(address)}: {what}", code="fetch-address")
        self._repository = (
            f"{os.environ.get('HF_ENDPOINT', _HUB).rstrip('/')}/{match['name']}/resolve"
        )
        self._folder = match["folder"]
        _checked(self._repository)
        super().__init__(address, "", _hub_token())
        self._at(match["revision"] or "main")

    def _at(self, revision: str) -> None:
        self.base = f"{self._repository}/{revision}{self._folder}"

    def answered(self, headers: HTTPMessage) -> None:
        # A branch may move between two files: the rest comes from the commit that the first one
        # came from.
        if re.fullmatch(r"[0-9a-f]{40}", commit := headers.get("X-Repo-Commit", "")):
            self._at(commit)


class StoredSource:
    """Files below an fsspec address, or in a folder of this machine."""

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self._storage = storage_of(address)
        except OSError as error:  # of a driver that connects at once
            raise SourceUnreachable(f"{address}: cannot be read ({first_line(error)})") from error

    def read(self, path: str) -> Iterator[bytes]:
        address = f"{self.address}/{path}"
        try:
            with self._storage.open(address) as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(address) from error
        except PermissionError as error:
            raise UserError(
                f"{address}: may not be read ({first_line(error)})", code="fetch-address"
            ) from error
        # What is not known to be final counts as a failure that may pass, and is asked again.
        except Exception as error:  # every driver has its own errors
            raise SourceUnreachable(f"{address}: cannot be read ({first_line(error)})") from error


def _checked(address: str) -> SplitResult:
    """An HTTP address that can be the base of others, and has nothing that logs may not show."""
    try:
        url = urlsplit(address)
        is_usable = url.scheme in ("https", "http") and url.hostname and url.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        what = "not an address; write https://host/folder"
        raise UserError(f"{without_password(address)}: {what}", code="fetch-address")
    if url.username is not None or url.query or url.fragment:
        what = (
            "the address of a folder has no user, query or fragment; a token comes from FETCH_TOKEN"
        )
        raise UserError(f"{url.scheme}://{url.hostname}: {what}", code="fetch-address")
    return url


def _is_loopback(url: SplitResult) -> bool:
    with contextlib.suppress(ValueError):
        return ip_address(url.hostname or "").is_loopback
    return url.hostname == "localhost"


def _hub_token() -> str | None:
    try:
        from huggingface_hub import get_token
    except ImportError:
        return header_token("HF_TOKEN", os.environ.get("HF_TOKEN"))
    return header_token("HF_TOKEN", get_token())  # that of `hf auth login`, too
