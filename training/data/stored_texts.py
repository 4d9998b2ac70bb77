"""Texts in a file, of which only the places are in memory: 8 bytes per text, however long they are."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO, overload

import numpy as np

from common.text import Text
from training.data.array_file import GrowingArray

TEXTS_PER_READ = 10_000


class StoredTexts(Sequence[Text]):
    """Texts, or pairs of texts, one after the other in a file; new ones are added at its end.

    Read with system calls instead of a mapping, so that pages of the file do not count as memory of this process.

    Args:
        file: in UTF-8, with half characters as they are.
        begin: the byte at which the first text begins.
        offsets: where each text begins, and the last one ends, from ``begin`` on; int64.
        width: texts per row, 2 for pairs.
    """

    def __init__(self, file: BinaryIO, begin: int = 0, offsets: np.ndarray | None = None, width: int = 1) -> None:
        self.width = width
        self._file, self._begin = file, begin
        self._offsets: array[int] | np.ndarray = array("q", [0]) if offsets is None else offsets
        self._is_written = True

    @classmethod
    def temporary(cls, folder: Path) -> StoredTexts:
        """None yet, in a file that is gone when nobody uses it any more."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(tempfile.TemporaryFile(dir=folder))

    def append(self, text: Text) -> None:
        assert isinstance(self._offsets, array)
        parts = (text,) if isinstance(text, str) else text
        self.width = len(parts)
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            self._file.write(data)
            self._offsets.append(self._offsets[-1] + len(data))
        self._is_written = False

    @property
    def offsets(self) -> np.ndarray:
        """Where each text begins, and the last one ends; int64, (texts + 1,)."""
        return np.frombuffer(self._offsets, dtype=np.int64)

    def bytes(self, folder: Path) -> GrowingArray:
        """The texts without anything between, of a file that has nothing else; uint8."""
        return GrowingArray(folder, "uint8", self._file, int(self._offsets[-1]))

    def __len__(self) -> int:
        return (len(self._offsets) - 1) // self.width

    @overload
    def __getitem__(self, place: int) -> Text: ...

    @overload
    def __getitem__(self, place: slice) -> list[Text]: ...

    def __getitem__(self, place: int | slice) -> Text | list[Text]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            return self._read(start, max(start, stop))[::step]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place = int(place) % len(self)
        return self._read(place, place + 1)[0]

    def __iter__(self) -> Iterator[Text]:
        for start in range(0, len(self), TEXTS_PER_READ):
            yield from self[start : start + TEXTS_PER_READ]

    def _read(self, start: int, stop: int) -> list[Text]:
        if not self._is_written:
            self._file.flush()
            self._is_written = True
        ends = [int(end) for end in self._offsets[start * self.width : stop * self.width + 1]]
        data = os.pread(self._file.fileno(), ends[-1] - ends[0], self._begin + ends[0])
        cuts = [end - ends[0] for end in ends]
        texts = [data[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(cuts)]
        return texts if self.width == 1 else list(zip(texts[::2], texts[1::2], strict=True))


class JoinedTexts(Sequence[Text]):
    """The texts of several sequences, one after the other, none of them copied."""

    def __init__(self, *parts: Sequence[Text]) -> None:
        self._parts = parts
        self._firsts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __iter__(self) -> Iterator[Text]:
        return chain.from_iterable(self._parts)

    @overload
    def __getitem__(self, place: int) -> Text: ...

    @overload
    def __getitem__(self, place: slice) -> list[Text]: ...

    def __getitem__(self, place: int | slice) -> Text | list[Text]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            cuts = [np.clip((start, max(start, stop)), *ends) - ends[0] for ends in pairwise(self._firsts)]
            found = (part[int(a) : int(b)] for part, (a, b) in zip(self._parts, cuts, strict=True))
            return list(chain.from_iterable(found))[::step]
        part = int(np.searchsorted(self._firsts, place, side="right")) - 1
        return self._parts[part][int(place) - int(self._firsts[part])]


class ChosenTexts(Sequence[Text]):
    """Some of other texts, in another order, none of them copied."""

    def __init__(self, texts: Sequence[Text], index: np.ndarray) -> None:
        self._texts, self._index = texts, index

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, place: int) -> Text: ...

    @overload
    def __getitem__(self, place: slice) -> list[Text]: ...

    def __getitem__(self, place: int | slice) -> Text | list[Text]:
        if isinstance(place, slice):
            return [self._texts[int(i)] for i in self._index[place]]
        return self._texts[int(self._index[place])]
