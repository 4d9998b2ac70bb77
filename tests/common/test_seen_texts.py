"""A model folder tells which texts training has read, as hashes."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from common.errors import ModelLoadError
from common.model_folder import SEEN_TEXTS_FILE
from common.seen_texts import MANY_TEXTS, SeenTexts, text_hash
from common.text import Text

READ: list[Text] = ["Oil prices rise", "Öl wird teurer", "half a \ud83d character", "", ("Who won?", "Nobody")]


def test_what_was_written_is_read_again_and_tells_seen_texts_from_others(tmp_path: Path) -> None:
    SeenTexts.of(READ).write(tmp_path)

    seen = SeenTexts.read(tmp_path)

    assert seen.which_seen(READ).tolist() == [True] * len(READ)
    assert seen.which_seen(["Oil prices fall", ("Nobody", "Who won?"), "Who won? Nobody"]).tolist() == [False] * 3
    assert [path.name for path in tmp_path.iterdir()] == [SEEN_TEXTS_FILE]
    assert (tmp_path / SEEN_TEXTS_FILE).stat().st_size == 16 + 4 * len(READ)


def test_a_text_in_other_case_and_white_space_is_the_same_and_one_with_other_punctuation_is_not() -> None:
    seen = SeenTexts.of(READ)

    assert seen.which_seen(["  OIL\tprices \n rise ", ("who won? ", "NOBODY")]).all()
    assert not seen.which_seen(["Oil prices rise.", "Oilprices rise"]).any()


def test_a_hash_stays_what_it_is_because_files_hold_it() -> None:
    assert text_hash("Oil prices rise") == 15224841997798911212
    assert text_hash(("Who won?", "Nobody")) == 17678724069109739617


def test_from_a_million_texts_on_all_64_bits_are_kept(tmp_path: Path) -> None:
    SeenTexts.of(map(str, range(MANY_TEXTS))).write(tmp_path)

    assert (tmp_path / SEEN_TEXTS_FILE).stat().st_size == 16 + 8 * MANY_TEXTS
    seen = SeenTexts.read(tmp_path)
    assert seen.which_seen(["0", str(MANY_TEXTS - 1), str(MANY_TEXTS)]).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
def test_what_an_earlier_model_has_seen_is_added_at_the_width_of_its_hashes(dtype: str, tmp_path: Path) -> None:
    hashes = np.sort(np.array([text_hash(text) for text in READ], np.uint64))
    SeenTexts((hashes >> np.uint64(64 - 8 * np.dtype(dtype).itemsize)).astype(dtype)).write(tmp_path)

    both = SeenTexts.of(["Shares fall", READ[0]], SeenTexts.read(tmp_path))

    assert both.hashes.dtype == dtype
    assert len(both.hashes) == len(READ) + 1
    assert both.which_seen([*READ, "Shares fall"]).all()
    assert not both.which_seen(["Shares rise"]).any()


def test_a_model_from_elsewhere_does_not_say_what_it_has_seen(tmp_path: Path) -> None:
    assert SeenTexts.read(tmp_path) is None
    assert SeenTexts.read(tmp_path / "model.pt") is None


def _header(magic: bytes = b"SEEN", version: int = 1, width: int = 4, count: int = 2) -> bytes:
    return struct.pack("<4sHHQ", magic, version, width, count)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a list of seen texts"),
        (_header()[:-1], "is not a list of seen texts"),
        (_header(magic=b"PK\3\4") + bytes(8), "is not a list of seen texts"),
        (_header(version=2) + bytes(8), "has format 2, but this version reads format 1"),
        (_header() + bytes(7), "is damaged: 2 hashes of 4 bytes do not fit its 23 bytes"),
        (_header(width=3) + bytes(6), "is damaged: 2 hashes of 3 bytes do not fit its 22 bytes"),
        (_header(count=2**63) + bytes(8), "is damaged: 9,223,372,036,854,775,808 hashes of 4 bytes do not fit"),
        (_header() + struct.pack("<2I", 7, 7), "is damaged: its hashes are not in ascending order"),
    ],
)
def test_a_damaged_or_foreign_file_is_one_line_with_a_remedy(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / SEEN_TEXTS_FILE).write_bytes(content)

    with pytest.raises(
        ModelLoadError, match=f"^{re.escape(f'{tmp_path}/seen_texts.bin: {message}')}.*; copy the model"
    ):
        SeenTexts.read(tmp_path)


def test_a_link_out_of_the_model_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    SeenTexts.of(READ).write(tmp_path)
    (tmp_path / "model" / SEEN_TEXTS_FILE).symlink_to(tmp_path / SEEN_TEXTS_FILE)

    with pytest.raises(ModelLoadError, match="outside of the model"):
        SeenTexts.read(tmp_path / "model")
