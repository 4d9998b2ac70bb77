"""Data larger than memory: texts and tokens stay in files, and a later start does not read all rows again."""

from __future__ import annotations

import os
import tracemalloc
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from common.rows import JoinedText
from common.text import TextTokenizer
from training.config import FAULTS, TrainConfig
from training.data import stored_texts
from training.data.array_file import ArrayFile, GrowingArray, find_damage, write_arrays
from training.data.batching import LengthBucketSampler
from training.data.dataset import LoadOptions, Rows, TextData, load_data, split_rows
from training.data.duplicates import Repeats
from training.data.prepare import PreparedData, prepare_data
from training.data.report import measure_run
from training.data.stored_texts import TEXTS_PER_READ, ChosenTexts, StoredTexts, in_chunks
from training.data.tokenized import load_tokenizer, write_tokens
from training.distributed.ranks import Ranks
from training.tasks import Classification

T = TypeVar("T")
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
TEXTS = ["A text", "", "Zürich 東京 \u200b", "half \ud83d a character", "line\nends\r\n", "x" * 100_000]


def with_peak(call: Callable[[], T]) -> tuple[T, int]:
    """What it returns, and how many bytes it had allocated at most."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def stored(folder: Path, texts: list[str] | list[tuple[str, str]]) -> StoredTexts:
    found = StoredTexts.temporary(folder)
    for text in texts:
        found.append(text)
    return found


def test_stored_texts_are_those_that_were_stored(tmp_path: Path) -> None:
    many = [*TEXTS, *map(str, range(TEXTS_PER_READ))]
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))

    for texts in (many, pairs):
        found = stored(tmp_path, texts)
        assert len(found) == len(texts)
        assert list(found) == texts
        assert [found[i] for i in range(-2, 4)] == [texts[i] for i in range(-2, 4)]
        assert found[1:5] == texts[1:5]
        assert found[4:2] == []
        with pytest.raises(IndexError):
            found[len(texts)]
    assert list(ChosenTexts(stored(tmp_path, many), np.array([3, 0]))) == [TEXTS[3], TEXTS[0]]
    assert list(tmp_path.iterdir()) == []


def test_texts_are_whole_although_a_call_returns_fewer_bytes_than_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    monkeypatch.setattr(stored_texts.os, "pread", lambda file, count, place: pread(file, min(count, 1000), place))
    texts = [f"{number} é" * 40 for number in range(300)]
    assert stored(tmp_path, texts)[:] == texts


@pytest.mark.parametrize("width", [1, 2])
def test_long_texts_take_no_more_memory_than_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(stored_texts, "BYTES_PER_READ", 100_000)
    texts: list[Any] = [f"{number:05}" * 400 for number in range(2000)]  # 4 MB
    texts = texts if width == 1 else list(zip(texts, texts[::-1], strict=True))
    found = stored(tmp_path, texts)

    assert list(found) == texts
    assert [text for chunk in in_chunks(found) for text in chunk] == texts
    _, peak = with_peak(lambda: deque(in_chunks(found), maxlen=0))
    assert peak < 1_000_000


def test_arrays_that_grow_in_a_file_are_read_back_and_by_the_library_of_the_format_too(tmp_path: Path) -> None:
    growing = GrowingArray(tmp_path, "int32")
    for start in range(0, 5000, 1000):
        growing.extend(np.arange(start, start + 1000))
    whole = {"labels": np.ones((3, 2), dtype=np.uint8), "offsets": np.arange(7)}

    write_arrays(tmp_path / "arrays", {"ids": growing, **whole}, {"name": "some"})

    found, expected = ArrayFile.open(tmp_path / "arrays"), {"ids": np.arange(5000), **whole}
    assert find_damage(tmp_path / "arrays") is None
    assert found.about == {"name": "some"}
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        np.testing.assert_array_equal(load_file(tmp_path / "arrays")[name], array)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_reading_needs_less_memory_than_the_texts(tmp_path: Path, suffix: str) -> None:
    path, text = tmp_path / f"rows{suffix}", "a long text " * 200
    line = {".csv": '"%s %d",%s\n', ".tsv": "%s %d\t%s\n", ".jsonl": '{"text": "%s %d", "label": "%s"}\n'}[suffix]
    header = {".csv": "text,label\n", ".tsv": "text\tlabel\n", ".jsonl": ""}[suffix]
    path.write_text(header + "".join(line % (text, i, "ab"[i % 2]) for i in range(4000)))

    data, most = with_peak(lambda: load_data(str(path), LoadOptions(texts_in=tmp_path / "cache")))

    assert (len(data.train), data.train.texts[0], data.train.texts[5]) == (3600, f"{text} 0", f"{text} 6")
    assert most < path.stat().st_size / 3


@pytest.mark.slow
def test_each_further_row_needs_few_bytes_of_memory_to_be_read_and_tokenised(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_json(load_tokenizer("tiny", ["word"], 16).backend_tokenizer.to_str(), 16)

    def start(num_rows: int) -> int:
        path = tmp_path / f"{num_rows}.csv"
        path.write_text("text,label\n" + "".join(f"word {i % 9},{'ab'[i % 2]}\n" for i in range(num_rows)))
        data, to_read = with_peak(lambda: load_data(str(path), LoadOptions(texts_in=tmp_path)))
        _, to_write = with_peak(lambda: write_tokens(tmp_path, path.stem, data, tokenizer, lambda line: None))
        return max(to_read, to_write)

    few, many = 15_000, 45_000
    assert (start(many) - start(few)) / (many - few) < 50


def test_looking_for_repeats_needs_few_bytes_of_memory_per_row() -> None:
    num_rows = 200_000
    texts, labels = [f"text {i}" for i in range(num_rows)], np.zeros(num_rows, dtype=np.int64)
    data = TextData("some", ["a", "b"], Rows(texts[:-9], labels[:-9]), Rows(texts[-9:], labels[-9:]))
    train, validation = split_rows(data.train.labels, 0.1, seed=0)

    measure = partial(measure_run, data=data, task=Classification, train=train, validation=validation)
    found, most = with_peak(lambda: measure(Repeats(data, near=False)))

    assert [found[fault]["count"] for fault in FAULTS] == [0, 0, 0]
    assert most / num_rows < 30


def test_the_order_of_an_epoch_needs_few_bytes_of_memory_per_row() -> None:
    num_rows = 200_000
    lengths = np.arange(num_rows, dtype=np.int32) % 50

    batches, most = with_peak(lambda: sum(1 for _ in LengthBucketSampler(lengths, 16, seed=0)))

    assert batches == num_rows / 16
    assert most / num_rows < 12


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., PreparedData]:
    """`prepare(**fields)`: read and tokenize `rows.csv`, of which `write` changes the content."""
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"text {i:03},{'ab'[i % 2]}\n" for i in range(200)))

    def start(**fields: object) -> PreparedData:
        same = {"dataset": str(tmp_path / "rows.csv"), "model": "tiny", "max_length": 16}
        return prepare_data(TrainConfig(**same | fields, cache_dir=tmp_path / "cache"), ALONE, lambda line: None)

    return start


def texts_of(data: PreparedData) -> list[str]:
    assert data.texts is not None
    return [*data.texts.train.texts, *data.texts.test.texts]


def test_a_later_start_reads_the_rows_again_only_if_the_file_or_a_flag_has_changed(
    tmp_path: Path, prepare: Callable[..., PreparedData]
) -> None:
    path = tmp_path / "rows.csv"
    first = prepare()
    before = path.stat()
    path.write_text(path.read_text().replace("text 007", "new! 007"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    again = prepare()
    assert texts_of(again) == texts_of(first)
    assert again.tokens.key == first.tokens.key
    assert again.tokenizer.backend_tokenizer.to_str() == first.tokenizer.backend_tokenizer.to_str()
    np.testing.assert_array_equal(again.tokens.train.ids, first.tokens.train.ids)
    np.testing.assert_array_equal(again.train_index, first.train_index)
    assert again.tokens.notes == first.tokens.notes

    assert "new! 007" in texts_of(prepare(seed=3))
    os.utime(path)
    assert "new! 007" in texts_of(prepare())


def test_a_later_start_reads_the_rows_again_if_the_cached_file_is_damaged_or_gone(
    tmp_path: Path, prepare: Callable[..., PreparedData]
) -> None:
    first = texts_of(prepare())
    (cached,) = (tmp_path / "cache").glob("v*.safetensors")
    cached.write_bytes(cached.read_bytes()[:-9])

    assert texts_of(prepare()) == first
    cached.unlink()
    assert texts_of(prepare()) == first


def test_what_repeats_is_looked_for_once(tmp_path: Path, prepare: Callable[..., PreparedData]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(path.read_text() + "text 003,b\n" * 10)
    first = prepare(duplicates="drop")
    (kept,) = (tmp_path / "cache").glob("*-repeats-*.json")
    kept.write_text('{"dropped": [0, 1], "lines": ["as kept"]}')

    again = prepare(duplicates="drop")

    assert (len(first.train_index), len(first.validation_index)) != (len(again.train_index), 0)
    assert again.tokens.notes[-1] == "as kept"
    assert not {0, 1} & {*again.train_index.tolist(), *again.validation_index.tolist()}


def test_a_joined_text_is_read_back_with_the_end_of_its_title(tmp_path: Path) -> None:
    texts = [JoinedText.of(["A title", "what it says"]), "no title", JoinedText.of(["alone"]), "ÿ"]
    found = stored(tmp_path, texts)

    assert list(found) == texts
    assert [getattr(text, "first", None) for text in found] == ["A title", None, None, None]
