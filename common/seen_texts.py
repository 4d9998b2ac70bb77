"""Which texts a model has seen in training, as hashes in its folder.

A model is too sure of the rows that it was trained on, and better than elsewhere on those that
chose its best epoch, so its confidence must be calibrated on other rows. The hashes let anybody
test whether a text was in the training data. So they stay in the model folder: exported artefacts,
images and what is published do not have them.

The file is a header and then the hashes, ascending, each once. With n hashes of 32 bits, n / 2**32
of all unseen texts are taken for seen ones by chance: at most one in 4,096 below ``MANY_TEXTS``,
and all that it costs is that such a text is left out. From there on the hashes have 64 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelLoadError
from common.files import writing_whole
from common.model_folder import PRECISIONS, SEEN_TEXTS_FILE, file_inside, is_artefact
from common.text import Text, folded, texts_in

MANY_TEXTS = 2**20
_NARROW, _WIDE = np.dtype("<u4"), np.dtype("<u8")
_HEADER = struct.Struct("<4sHHQ")  # magic, format, bytes per hash, number of hashes
_MAGIC, _FORMAT = b"SEEN", 1
_REMEDY = "copy the model folder from its training run again, or train the model again"


def text_hash(text: Text) -> int:
    """64 bits of a text or a pair; texts that differ only in case and white space have the same."""
    # No folded text has a line break, so no other pair and no single text is joined to the same.
    whole = "\n".join(texts_in(folded(text)))
    # Half characters, which JSON can bring, have no UTF-8 of their own.
    digest = blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=_WIDE.itemsize).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class SeenTexts:
    """``hashes``: ascending, each once; of each its upper 32 bits (uint32) or all 64 (uint64)."""

    hashes: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[Text], before: SeenTexts | None = None) -> SeenTexts:
        """These texts, and those that the model had seen ``before`` with which training began."""
        hashes = np.unique(_hashes(texts))
        if before is None:
            return cls(np.unique(_cut(hashes, _NARROW if len(hashes) < MANY_TEXTS else _WIDE)))
        # The lower half of an earlier hash cannot be recovered, so the new ones are cut like it.
        return cls(np.union1d(_cut(hashes, before.hashes.dtype), before.hashes))

    def which_seen(self, texts: Iterable[Text]) -> np.ndarray:
        """Whether the model has seen each of these texts; bool, (texts,)."""
        wanted = _cut(_hashes(texts), self.hashes.dtype)
        ends = (np.searchsorted(self.hashes, wanted, side=side) for side in ("left", "right"))
        return np.not_equal(*ends)

    def write(self, folder: Path) -> None:
        """Write the file of a model folder, whole or not at all."""
        header = _HEADER.pack(_MAGIC, _FORMAT, self.hashes.itemsize, len(self.hashes))
        with writing_whole(folder / SEEN_TEXTS_FILE) as file:
            file.write(header)
            file.write(memoryview(self.hashes))

    @classmethod
    def read(cls, model: Path) -> SeenTexts | None:
        """The file of a model folder; None if there is none, as in models from elsewhere.

        Raises:
            ModelLoadError: it is damaged, holds something else, or is of a later version.
        """
        path = model / SEEN_TEXTS_FILE
        if not path.exists():
            return None
        try:
            data = file_inside(model, SEEN_TEXTS_FILE).read_bytes()
        except OSError as error:
            raise ModelLoadError(path, f"cannot be read ({error.strerror})", _REMEDY) from error
        if what := _fault_in(data):
            raise ModelLoadError(path, what, _REMEDY)
        _, _, width, _ = _HEADER.unpack_from(data)
        hashes = np.frombuffer(data, f"<u{width}", offset=_HEADER.size)
        if not (hashes[1:] > hashes[:-1]).all():
            raise ModelLoadError(path, "is damaged: its hashes are not in ascending order", _REMEDY)
        return cls(hashes)


def unseen(
    models: Sequence[Path], texts: Sequence[Text]
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, int]]:
    """The places of the texts that none of the models has seen, of equal ones the first; of those
    that one has; and how many are left out, by why. Only if every model knows what it has seen is
    there a number for `seen_in_training`.
    """
    known = [seen for model in models if (seen := seen_by(model))]
    is_seen = np.zeros(len(texts), dtype=bool)
    for seen in known:
        is_seen |= seen.which_seen(texts)
    # A text that is there twice would count as two witnesses.
    first_at: dict[Any, int] = {}
    for i, text in enumerate(texts):
        first_at.setdefault(folded(text), i)
    is_first = np.zeros(len(texts), dtype=bool)
    is_first[list(first_at.values())] = True
    left_out = {"repeated": int((~is_first & ~is_seen).sum())}
    if known:
        name = "seen_in_training" if len(known) == len(models) else "seen_by_one_model"
        left_out[name] = int(is_seen.sum())
    return np.flatnonzero(is_first & ~is_seen), np.flatnonzero(is_seen), left_out


def seen_by(path: Path) -> SeenTexts | None:
    """What a model has seen in training; None if nobody knows."""
    # X.pt and its artefact X.native lie beside the model folder X; other artefacts lie inside it.
    # An artefact may also have a copy of the file itself.
    folders = [path]
    if is_artefact(path):
        folders.append(path.parent)
    if path.is_file() or path.suffix.removeprefix(".") in PRECISIONS:
        folders.append(path.with_suffix(""))
    return next(filter(None, map(SeenTexts.read, folders)), None)


def _fault_in(data: bytes) -> str:
    """Why these bytes cannot be hashes behind their header; empty if they can."""
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        return "is not a list of seen texts"
    _, found, width, count = _HEADER.unpack_from(data)
    if found != _FORMAT:
        return f"has format {found}, but this version reads format {_FORMAT}"
    if width not in (_NARROW.itemsize, _WIDE.itemsize) or len(data) != _HEADER.size + width * count:
        return f"is damaged: {count:,} hashes of {width} bytes do not fit its {len(data):,} bytes"
    return ""


def _hashes(texts: Iterable[Text]) -> np.ndarray:
    return np.fromiter(map(text_hash, texts), _WIDE)


def _cut(hashes: np.ndarray, width: np.dtype) -> np.ndarray:
    """Of each hash its upper 32 bits, or all 64, which keeps their order."""
    return hashes if width == _WIDE else (hashes >> np.uint64(32)).astype(_NARROW)
