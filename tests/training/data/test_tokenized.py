from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.text import TextTokenizer
from training.data.dataset import Rows, TextData, load_data, texts_on_disk
from training.data.rough_text import cleaned, rough_version
from training.data.tokenized import (
    Copies,
    TokenizedData,
    cache_key,
    encode_rows,
    load_tokenizer,
    read_texts,
    read_tokens,
    write_tokens,
)

LENGTH = 24


def small_data() -> TextData:
    data = load_data("sample")
    return TextData("small", data.label_names, data.train.take(np.arange(60)), data.test.take(np.arange(20)))


NEWS = small_data()
TOKENIZER = load_tokenizer("tiny", NEWS.train.texts, LENGTH).backend_tokenizer.to_str()


class Told(list[str]):
    """What was said, line by line."""

    def __call__(self, line: str) -> None:
        self.append(line)


def write(folder: Path, data: TextData = NEWS, told: Told | None = None) -> str:
    key = cache_key(data, TOKENIZER, LENGTH)
    tokenizer = TextTokenizer.from_json(TOKENIZER, LENGTH)
    write_tokens(folder, key, data, tokenizer, Told() if told is None else told)
    return key


def assert_same_data(found: TokenizedData, expected: TokenizedData) -> None:
    assert (found.key, found.name, found.label_names) == (expected.key, expected.name, expected.label_names)
    assert (found.notes, found.vocab_size) == (expected.notes, expected.vocab_size)
    for mine, other in ((found.train, expected.train), (found.test, expected.test)):
        assert mine.num_cut == other.num_cut
        for part in ("ids", "offsets", "labels"):
            np.testing.assert_array_equal(getattr(mine, part), getattr(other, part))


def test_a_second_run_reads_the_same_from_the_cache_and_writes_nothing(tmp_path: Path) -> None:
    told = Told()
    key = write(tmp_path, told=told)
    first, (file,) = read_tokens(tmp_path, key), list(tmp_path.iterdir())
    written, said = file.stat().st_mtime_ns, len(told)

    again = write(tmp_path, told=told)

    assert again == key
    assert file.stat().st_mtime_ns == written
    assert len(told) == said == 2
    assert_same_data(read_tokens(tmp_path, again), first)


@pytest.mark.parametrize("keep", [write, texts_on_disk], ids=["tokens", "texts"])
def test_a_new_cache_folder_is_for_its_owner_alone_and_one_that_is_shared_stays_shared(
    tmp_path: Path, keep: Callable[[Path], object]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)

    keep(tmp_path / "new" / "cache")
    keep(shared)

    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    assert shared.stat().st_mode & 0o777 == 0o775


def test_what_is_read_is_what_was_tokenised(tmp_path: Path) -> None:
    data = read_tokens(tmp_path, write(tmp_path))

    expected = encode_rows(TextTokenizer.from_json(TOKENIZER, LENGTH), NEWS.train)

    np.testing.assert_array_equal(data.train.ids, expected.ids)
    np.testing.assert_array_equal(data.train.labels, NEWS.train.labels)
    assert (len(data.train), len(data.test)) == (60, 20)
    assert (data.train.ids.dtype, data.train.offsets.dtype, data.train.labels.dtype) == (np.uint16, np.int64, np.int64)
    assert data.vocab_size == TextTokenizer.from_json(TOKENIZER, LENGTH).vocab_size
    assert data.label_names == NEWS.label_names


@pytest.mark.parametrize(("highest", "kind"), [(2**16 - 1, np.uint16), (2**16, np.int32)])
def test_cached_ids_take_two_bytes_if_the_highest_fits(tmp_path: Path, highest: int, kind: type) -> None:
    parts = json.loads(TOKENIZER)
    parts["model"]["vocab"] |= {"highest": highest}
    tokenizer = TextTokenizer.from_json(json.dumps(parts), LENGTH)
    rows = Rows(["highest oil", "highest"], np.zeros(2, int))

    write_tokens(tmp_path, "key", changed(train=rows, test=rows), tokenizer, lambda line: None)

    ids = read_tokens(tmp_path, "key").train.ids
    assert ids.dtype == kind
    assert ids.tolist() == [one for encoded in tokenizer.encode(rows.texts) for one in encoded.ids]
    assert highest in ids


def changed(**changes: object) -> TextData:
    return TextData(**{**vars(NEWS), **changes})


def test_another_text_label_name_length_or_tokenizer_gives_another_key() -> None:
    texts = [NEWS.train.texts[0] + "!", *NEWS.train.texts[1:]]
    labels = (NEWS.train.labels + 1) % 4
    tokenizer = load_tokenizer("tiny", NEWS.train.texts[:30], LENGTH).backend_tokenizer.to_str()

    keys = [
        cache_key(NEWS, TOKENIZER, LENGTH),
        cache_key(NEWS, TOKENIZER, LENGTH + 1),
        cache_key(NEWS, TOKENIZER, LENGTH, "none"),
        cache_key(NEWS, tokenizer, LENGTH),
        cache_key(changed(train=Rows(texts, NEWS.train.labels)), TOKENIZER, LENGTH),
        cache_key(changed(train=Rows(NEWS.train.texts, labels)), TOKENIZER, LENGTH),
        cache_key(changed(test=NEWS.test.take(np.arange(19))), TOKENIZER, LENGTH),
        cache_key(changed(label_names=["a", "b", "c", "d"]), TOKENIZER, LENGTH),
        cache_key(changed(train=NEWS.test, test=NEWS.train), TOKENIZER, LENGTH),
    ]

    assert len(set(keys)) == len(keys)
    assert cache_key(small_data(), TOKENIZER, LENGTH) == keys[0]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda content: b"", ""),
        (lambda content: content[:100], ""),
        (lambda content: content[:5000], ""),
        (lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "they do not match their SHA-256"),
        (lambda content: b"\x02\x00\x00\x00\x00\x00\x00\x00{}", ""),
    ],
    ids=["empty", "its beginning", "half of it", "a changed byte", "something else"],
)
def test_a_damaged_cache_file_is_reported_and_written_again(
    tmp_path: Path, spoil: Callable[[bytes], bytes], why: str
) -> None:
    key = write(tmp_path)
    # A copy, because what is mapped changes with its file.
    whole, (file,) = copy.deepcopy(read_tokens(tmp_path, key)), list(tmp_path.iterdir())
    content = file.read_bytes()
    file.write_bytes(spoil(content))

    write(tmp_path, told=(told := Told()))

    assert told[0].startswith(f"The cached tokens {file} are damaged ({why}")
    assert file.read_bytes() == content
    assert_same_data(read_tokens(tmp_path, key), whole)


def test_cut_texts_are_counted() -> None:
    tokenizer = TextTokenizer.from_json(TOKENIZER, 8)
    rows = Rows(["oil", "oil prices rise and fall and rise and fall", "a b c d e f", "a b c d e f g"], np.zeros(4, int))

    encoded = encode_rows(tokenizer, rows)

    assert encoded.num_cut == sum(one.truncated for one in tokenizer.encode(rows.texts))
    assert encoded.lengths.tolist() == [len(one.ids) for one in tokenizer.encode(rows.texts)]
    assert encoded.lengths[1:].tolist() == [8, 8, 8]
    assert encoded.num_cut == 2


def test_ids_are_those_that_serving_gives(tmp_path: Path) -> None:
    texts = [*NEWS.train.texts[:20], "AT amp;T  #39;s shares\\rose &lt;b&gt;5%&lt;/b&gt;", "Zürich 東京 \u200b naïve"]
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    serving = TextTokenizer.from_file(tmp_path / "tokenizer.json", LENGTH)

    rows = encode_rows(TextTokenizer.from_json(TOKENIZER, LENGTH), Rows(texts, np.zeros(len(texts), int)))

    for i, encoded in enumerate(serving.encode(texts)):
        assert rows.ids[rows.offsets[i] : rows.offsets[i + 1]].tolist() == encoded.ids


def test_the_tiny_vocabulary_repeats_exactly_in_another_process() -> None:
    program = (
        "import hashlib\nfrom training.data.dataset import load_data\n"
        "from training.data.tokenized import load_tokenizer\n"
        f"text = load_tokenizer('tiny', load_data('sample').train.texts[:60], {LENGTH}).backend_tokenizer.to_str()\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    # This process has another hash seed, so a set's order would show.
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    found = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)

    assert found.stdout.strip() == hashlib.sha256(TOKENIZER.encode()).hexdigest()


def test_the_tiny_vocabulary_knows_every_letter_and_the_common_words() -> None:
    tokenizer = load_tokenizer("tiny", load_data("sample").train.texts, LENGTH)

    ids = tokenizer("The president said on Tuesday that oil prices fell").input_ids

    assert tokenizer.vocab_size <= 8192
    assert tokenizer.model_max_length == LENGTH
    assert tokenizer.pad_token_id == 0
    assert tokenizer.unk_token_id not in ids
    assert len(ids) == 11  # nine words and two special tokens
    assert tokenizer.unk_token_id not in tokenizer("zyxwvutsrqponm").input_ids


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--model .*: the folder cannot be read as a model"):
        load_tokenizer(str(tmp_path), [], LENGTH)


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(UserError, match=r"--cache_dir .*file/cache: cannot be written \(Not a directory\)"):
        write(tmp_path / "file" / "cache")


def test_rough_copies_stand_behind_the_rows_and_the_rows_are_what_they_are_without(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_json(TOKENIZER, LENGTH)
    plain = read_tokens(tmp_path, write(tmp_path, NEWS))
    copies = Copies(share=1.0, seed=5)
    key = cache_key(NEWS, TOKENIZER, LENGTH, copies=copies)
    write_tokens(tmp_path, key, NEWS, tokenizer, print, copies=copies)
    found = read_tokens(tmp_path, key)

    assert_same_data(replace(found, read_in_training=found.train, key=plain.key), plain)
    read = found.read_in_training
    assert read.copies_of.tolist() == list(range(len(NEWS.train)))
    for row, text in enumerate(NEWS.train.texts):
        copy = len(NEWS.train) + row
        rough = rough_version(cleaned(text, tokenizer.clean), 5, row)
        assert read.ids[read.offsets[copy] : read.offsets[copy + 1]].tolist() == tokenizer.many().token_ids([rough])[0]
    assert read_texts(tmp_path, key).train.texts[:] == list(NEWS.train.texts)
    assert key != cache_key(NEWS, TOKENIZER, LENGTH)
