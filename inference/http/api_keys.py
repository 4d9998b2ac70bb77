"""API keys, one from the environment and any number from a file that may change."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from inference.errors import SettingsError

logger = logging.getLogger(__name__)

# Keys that a request may carry: as `Authorization` and as `X-API-Key`.
MOST_KEYS = 2
# Seconds between checks whether the key file has changed.
_CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Key:
    """A key that admits requests.

    ``name``: what its requests are counted under, a hash, so that the key itself is not in memory
    dumps or logs. ``per_second``: its own rate limit in texts per second; None for
    RATE_LIMIT_PER_S.
    """

    name: str
    per_second: float | None = None


class ApiKeys:
    """The keys of which a request must carry one; if none is configured, every
    request is admitted.
    """

    def __init__(self, key: str | None = None, file: Path | None = None) -> None:
        """Read the keys.

        Args:
            key: API_KEY.
            file: API_KEYS_FILE, read again when it changes. If it is later missing, damaged or
                empty, none of its keys is valid until it is fixed.

        Raises:
            SettingsError: the file cannot be read, or holds no key.
        """
        self._fixed = [Key(_hash(key.encode()))] if key else []
        self._by_name: dict[str, Key] = {}
        self._file = file
        self._version = self._version_now()
        self._take(read_keys(file) if file else [])
        self._looked_at = time.monotonic()

    @property
    def is_set(self) -> bool:
        return bool(self._fixed) or self._file is not None

    def find(self, given: Iterable[bytes]) -> Key | None:
        """The last valid one of the keys given. Hashes are looked up, so the time it takes says
        nothing about a key.
        """
        self._refresh()
        found = None
        for key in given:
            found = self._by_name.get(_hash(key), found)
        return found

    def _take(self, from_file: list[Key]) -> None:
        self._by_name = {key.name: key for key in (*self._fixed, *from_file)}

    def _refresh(self) -> None:
        if self._file is None or time.monotonic() - self._looked_at < _CHECK_INTERVAL_S:
            return
        self._looked_at = time.monotonic()
        version = self._version_now()
        if version == self._version:
            return
        self._version = version
        try:
            self._take(keys := read_keys(self._file))
            logger.info("API_KEYS_FILE changed: %d keys are valid", len(keys))
        except SettingsError as error:
            self._take([])
            logger.error("%s; no key of this file is valid until it is repaired", error)

    def _version_now(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat() if self._file else None
        except OSError:
            return None
        return (status.st_ino, status.st_size, status.st_mtime_ns) if status else None


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def given_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield credentials.strip()
        elif name == b"x-api-key":
            yield value


def read_keys(file: Path) -> list[Key]:
    """Read a key file: one key per line, optionally followed by its own rate limit; lines with #
    are comments.

    Raises:
        SettingsError: it cannot be read, a line is invalid, or it holds no key.
    """
    try:
        lines = file.read_text(
            encoding="utf-8-sig"
        ).splitlines()  # some editors begin it with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"API_KEYS_FILE: {file} is not readable ({error})", code="api-keys-file"
        ) from None
    keys = [
        _key(file, number, line.split())
        for number, line in enumerate(lines, 1)
        if _is_key_line(line)
    ]
    if not keys:
        raise SettingsError(
            f"API_KEYS_FILE: {file} holds no key; write one key per line", code="api-keys-file"
        )
    return keys


def _is_key_line(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _key(file: Path, number: int, words: list[str]) -> Key:
    # The line is not quoted, because it is a secret.
    wrong = SettingsError(
        f"API_KEYS_FILE: {file}, line {number}: must be KEY, or KEY TEXTS_PER_SECOND above 0",
        code="api-keys-file",
    )
    if len(words) > 2:
        raise wrong
    try:
        per_second = float(words[1]) if len(words) == 2 else None
    except ValueError:
        raise wrong from None
    if per_second is not None and not 0 < per_second < math.inf:
        raise wrong
    return Key(_hash(words[0].encode()), per_second)
