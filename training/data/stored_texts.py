"""Texts in a file, and where each begins in another, so that any number needs no memory."""

from __future__ import annotations

import errno
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.rows import JoinedText
from common.text import Text, num_chars, texts_in
from training.data.array_file import GrowingArray

# At most so many texts are held at a time, and of long ones so many bytes, or a single longer one.
TEXTS_PER_READ = 10_000
BYTES_PER_READ = 8 * 2**20
# Of texts that are chosen, those between them may be read too.
CHOSEN_PER_READ = 1_000
MOST_READ_PER_CHOSEN = 3
# Stands where a joined text has its first space between cells: a byte that no text in UTF-8 has.
JOINT = b"\xff"


def in_chunks(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """The same texts in lists that take a bounded amount of memory."""
    chunk: list[Text] = []
    num_letters = 0
    for text in texts:
        chunk.append(text)
        num_letters += num_chars(text)
        if len(chunk) >= TEXTS_PER_READ or num_letters >= BYTES_PER_READ:
            yield chunk
            chunk, num_letters = [], 0
    if chunk:
        yield chunk


class StoredTexts(Sequence[Text]):
    """Texts, or pairs of texts, one after the other in a file; new ones are added at its end.

    Args:
        file: in UTF-8, with half characters as they are.
        offsets: where each text begins, and the last one ends, from ``begin`` on; int64.
        num_texts: how many there are, of pairs both texts.
        begin: the byte at which the first text begins.
        begin_offsets: the byte at which the first offset begins.
        width: texts per row, 2 for pairs.
    """

    def __init__(
        self,
        file: BinaryIO,
        offsets: BinaryIO,
        num_texts: int,
        begin: int = 0,
        begin_offsets: int = 0,
        width: int = 1,
    ) -> None:
        self.width = width
        self._file, self._begin = file, begin
        self._offsets, self._begin_offsets = offsets, begin_offsets
        self._num_texts, self._end = num_texts, 0
        self._unwritten = array("q")

    @classmethod
    def temporary(cls, folder: Path) -> StoredTexts:
        """None yet, in files that are gone when nobody uses them any more."""
        folder.mkdir(0o700, parents=True, exist_ok=True)  # it holds the texts
        # They live as long as the texts.
        file, offsets = (tempfile.TemporaryFile(dir=folder) for _ in range(2))  # noqa: SIM115
        found = cls(file, offsets, 0)
        found._unwritten.append(0)
        return found

    def append(self, text: Text) -> None:
        parts = texts_in(text)
        self.width = len(parts)
        for part in parts:
            data = _encoded(part)
            self._file.write(data)
            self._end += len(data)
            self._unwritten.append(self._end)
        self._num_texts += self.width
        if len(self._unwritten) >= TEXTS_PER_READ:
            self._write_offsets()

    def _write_offsets(self) -> None:
        self._offsets.write(self._unwritten)
        del self._unwritten[:]

    def arrays(self, folder: Path) -> tuple[GrowingArray, GrowingArray]:
        """The texts, one after the other, uint8, and where each begins, int64."""
        self._write_offsets()
        return (
            GrowingArray(folder, "uint8", self._file, self._end),
            GrowingArray(folder, "int64", self._offsets, self._num_texts + 1),
        )

    def __len__(self) -> int:
        return self._num_texts // self.width

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._read(start, max(start, stop))[::step]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index = int(index) % len(self)
        return self._read(index, index + 1)[0]

    def __iter__(self) -> Iterator[Text]:
        start = 0
        while start < len(self):
            # As many rows as fit into the budget of bytes: where they end is known without reading
            # them.
            ends = self._ends(start, min(start + TEXTS_PER_READ, len(self)))[:: self.width]
            fitting = int(np.searchsorted(ends, ends[0] + BYTES_PER_READ, side="right")) - 1
            stop = start + max(1, fitting)  # a single row may be longer
            yield from self._read(start, stop)
            start = stop

    def _ends(self, start: int, stop: int) -> np.ndarray:
        """Where each text of these rows begins, and the last one ends."""
        # What was appended may still be in Python's buffers, which pread does not see.
        if self._unwritten:
            self._write_offsets()
            self._offsets.flush()
            self._file.flush()
        count = (stop - start) * self.width + 1
        stored = _read_exactly(
            self._offsets, 8 * count, self._begin_offsets + 8 * start * self.width
        )
        return np.frombuffer(stored, dtype=np.int64)

    def _read(self, start: int, stop: int) -> list[Text]:
        ends = self._ends(start, stop).tolist()
        data = _read_exactly(self._file, ends[-1] - ends[0], self._begin + ends[0])
        cuts = [end - ends[0] for end in ends]
        # Most data has no joined texts; one search through all bytes spares one for each text.
        decode = _decoded if JOINT in data else _decoded_plain
        texts = [decode(data[a:b]) for a, b in pairwise(cuts)]
        return texts if self.width == 1 else list(zip(texts[::2], texts[1::2], strict=True))


def _encoded(text: str) -> bytes:
    if isinstance(text, JoinedText) and text.rest:
        return _encoded(text.first) + JOINT + _encoded(text.rest)
    return text.encode("utf-8", "surrogatepass")


def _decoded(data: bytes) -> str:
    first, joint, rest = data.partition(JOINT)
    if not joint:
        return _decoded_plain(data)
    return JoinedText.of([_decoded_plain(first), _decoded_plain(rest)])


def _decoded_plain(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _read_exactly(file: BinaryIO, num_bytes: int, index: int) -> bytes:
    pieces = []
    while num_bytes:
        # System calls and not a mapping, whose pages would count as memory of this process. pread
        # needs no position, which texts and offsets in one file would have to share. One call
        # returns at most 2 GiB.
        pieces.append(os.pread(file.fileno(), num_bytes, index))
        if not pieces[-1]:
            raise OSError(errno.EIO, "ends before the texts that it should hold")
        index, num_bytes = index + len(pieces[-1]), num_bytes - len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class JoinedTexts(Sequence[Text]):
    """The texts of several sequences, one after the other, none of them copied."""

    def __init__(self, *parts: Sequence[Text]) -> None:
        self._parts = parts
        self._firsts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __iter__(self) -> Iterator[Text]:
        return chain.from_iterable(self._parts)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            cuts = [
                np.clip((start, max(start, stop)), *ends) - ends[0]
                for ends in pairwise(self._firsts)
            ]
            found = (part[int(a) : int(b)] for part, (a, b) in zip(self._parts, cuts, strict=True))
            return list(chain.from_iterable(found))[::step]
        part = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._parts[part][int(index) - int(self._firsts[part])]


class ChosenTexts(Sequence[Text]):
    """Some of other texts, in another order, none of them copied.

    Args:
        texts: those to choose from.
        index: the numbers of the chosen ones.
        change: what becomes of a text when it is read, given its number.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        index: np.ndarray,
        change: Callable[[Text, int], Text] = lambda text, row: text,
    ) -> None:
        self._texts, self._index, self._change = texts, index, change

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int | slice) -> Any:
        rows = self._index[index].tolist()
        if isinstance(index, slice):
            return list(map(self._change, self._read(rows), rows))
        return self._change(self._texts[rows], rows)

    def __iter__(self) -> Iterator[Text]:
        for start in range(0, len(self), CHOSEN_PER_READ):
            yield from self[start : start + CHOSEN_PER_READ]

    def _read(self, rows: list[int]) -> list[Text]:
        if not rows:
            return []
        first, span = min(rows), max(rows) + 1 - min(rows)
        # Rows that are close together are read at once: one call costs more than a few texts.
        if span > MOST_READ_PER_CHOSEN * len(rows):
            return [self._texts[row] for row in rows]
        near = self._texts[first : first + span]
        return [near[row - first] for row in rows]
