"""What is computed once and kept in ``--cache_dir``, in files named after what they come from.

A name covers everything that the contents depend on. So a file is never compared with its sources:
it is there and undamaged, or it is made.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import write_json
from common.text import Text, texts_in
from training.data.array_file import find_damage


def digest_of(pieces: Iterable[str | memoryview]) -> str:
    """A name for exactly what these pieces hold, one after the other."""
    digest = hashlib.sha256()
    for piece in pieces:
        # Half characters, which JSON can bring, have no UTF-8 of their own.
        digest.update(piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece)
    return digest.hexdigest()[:24]


def measured(texts: Iterable[Text]) -> Iterator[str]:
    """The texts, each with its length: no other texts come to the same bytes in a row."""
    for text in texts:
        joined = "\x01".join(texts_in(text))
        yield f"{len(joined)} {joined}"


def kept(file: Path, make: Callable[[str], None]) -> bool:
    """Have ``make`` write the file unless it is there; whether it was.

    ``make`` is told what is wrong with the file, and nothing if there is none.

    Raises:
        UserError: the folder cannot be written.
    """
    # None stands for a file that is whole, and an empty text for one that is not there.
    damage = find_damage(file) if file.exists() else ""
    if damage is None:
        return True
    try:
        with writing_to(file.parent):
            file.parent.mkdir(0o700, parents=True, exist_ok=True)  # it holds texts
            make(damage)
    except UserError:
        # Several starts may make the same file at once, and the first to finish removes what all
        # of them have worked on. The others fail then, but what they wanted is there.
        if not file.exists() or find_damage(file) is not None:
            raise
    return False


def remembered(file: Path, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file of JSON holds; without it what ``find`` returns, which it then holds."""
    if known := read_known(file):
        return known
    found = find()
    with contextlib.suppress(OSError):  # it will be found again
        write_json(file, found)
    return found


def read_known(file: Path | None) -> dict[str, Any]:
    """What such a file holds; nothing if it is not there or cannot be read."""
    if file is None:
        return {}
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


@contextlib.contextmanager
def writing_to(folder: Path, *, only_full: bool = False) -> Iterator[None]:
    """Say in one line that the folder cannot be written.

    ``only_full``: for work that also reads other files, whose errors are not the folder's.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if only_full and not is_full:
            raise
        remedy = "; free some space, or name another folder" if is_full else ""
        raise UserError(
            f"--cache_dir {folder}: cannot be written ({error.strerror or error}){remedy}",
            code="not-writable",
        ) from error
