"""Tokenize once: texts become flat arrays of token ids, in files that every rank maps."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from tokenizers import Tokenizer

from common.errors import ForeseenError, UserError, first_line
from common.files import is_lfs_pointer
from common.text import VERSION, Text, TextTokenizer, cleaner, texts_in, vocabulary_misfit
from common.windows import count_windows, window_lengths
from training.config import STARTER, STARTER_FOLDER, model_place
from training.data.array_file import ArrayFile, GrowingArray, find_damage, write_arrays
from training.data.dataset import Rows, TextData, row_numbers
from training.data.hub_access import ask_hub, did_you_mean, looks_local, refuse_revision
from training.data.kept import digest_of, kept
from training.data.rough_text import rough_texts
from training.data.stored_texts import StoredTexts, in_chunks
from training.facts import TINY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
TINY_VOCABULARY = 8192
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
MOST_PARTS = 100_000
PARTS = ("ids", "offsets", "labels")
NO_ROWS = np.array([], dtype=np.int32)


@dataclass(frozen=True)
class TokenizedRows:
    """Rows without padding, one after the other.

    Row ``i`` is ``ids[offsets[i]:offsets[i + 1]]``. ``ids``: (tokens,), int32, or uint16 in files
    if that is enough; ``offsets``: int64, (rows + 1,); ``labels``: (rows, ...), as the task takes
    them; ``num_cut``: rows that were longer than the maximum. ``window``: ids per window, of which
    a long row has several, joined; 0 if every row is one input. ``copies_of``: of which rows the
    last ones are rough copies, (copies,), ascending.
    """

    ids: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    num_cut: int
    window: int = 0
    copies_of: np.ndarray = field(default_factory=lambda: NO_ROWS)

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per row: int32, (rows,)."""
        # Offsets need 64 bits in large sets, lengths never do.
        return np.subtract(self.offsets[1:], self.offsets[:-1], dtype=np.int32, casting="unsafe")

    def without_copies(self) -> TokenizedRows:
        """The rows as the data has them."""
        count = len(self) - len(self.copies_of)
        ids, offsets = self.ids[: self.offsets[count]], self.offsets[: count + 1]
        return replace(
            self, ids=ids, offsets=offsets, labels=self.labels[:count], copies_of=NO_ROWS
        )

    def with_copies(self, index: np.ndarray) -> np.ndarray:
        """These rows, and behind them their rough copies."""
        # Copies are behind all rows, in the order of their originals.
        copies = np.flatnonzero(np.isin(self.copies_of, index)) + (len(self) - len(self.copies_of))
        return np.concatenate([index, copies.astype(index.dtype)])

    def originals(self, index: np.ndarray) -> np.ndarray:
        """These rows, and in place of a rough copy the row that it was made from."""
        if not len(self.copies_of):
            return index
        first = len(self) - len(self.copies_of)
        return np.where(index < first, index, self.copies_of[np.maximum(index - first, 0)])

    def num_inputs(self, index: np.ndarray) -> np.ndarray:
        """How many inputs of the model each of these rows is: its windows, or 1. int64, (rows,)."""
        if not self.window:
            return np.ones(len(index), np.int64)
        return count_windows(self.lengths[index], self.window)

    def input_lengths(self, index: np.ndarray) -> np.ndarray:
        """Tokens of each input, one row after the other: int64, (inputs,)."""
        lengths = self.lengths[index]
        return window_lengths(lengths, self.window) if self.window else lengths

    def cut(self, length: int) -> TokenizedRows:
        """At most ``length`` tokens of each row; the last token stays: it ends the text."""
        lengths = np.minimum(self.lengths, length)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        # Each row begins at its old offset; what is before it among the kept ids has moved up by
        # what was cut.
        ids = self.ids[
            np.arange(offsets[-1]) + np.repeat(self.offsets[:-1] - offsets[:-1], lengths)
        ]
        ids[offsets[1:] - 1] = self.ids[self.offsets[1:] - 1]
        num_cut = max(self.num_cut, int((self.lengths > length).sum()))
        return replace(self, ids=ids, offsets=offsets, num_cut=num_cut)


@dataclass(frozen=True)
class TokenizedData:
    """Tokenized training and test rows, and validation rows if the data has any.

    ``key`` identifies data, tokenizer and length together. ``num_unlabelled``: how many of the last
    training rows have no label. ``read_in_training``: the training rows, and behind them the rough
    copies of some of them.
    """

    key: str
    name: str
    label_names: list[str]
    read_in_training: TokenizedRows
    test: TokenizedRows
    notes: list[str]
    vocab_size: int
    validation: TokenizedRows | None = None
    num_unlabelled: int = 0

    @cached_property
    def train(self) -> TokenizedRows:
        return self.read_in_training.without_copies()

    @property
    def num_labelled(self) -> int:
        """How many training rows have a label: the first ones."""
        return len(self.train) - self.num_unlabelled

    @property
    def num_texts(self) -> int:
        return sum(map(len, self._splits))

    @property
    def num_cut(self) -> int:
        return sum(rows.num_cut for rows in self._splits)

    @property
    def _splits(self) -> list[TokenizedRows]:
        return [self.train, self.test, *([self.validation] if self.validation else [])]


def check_model_name(model: str, revision: str = "") -> None:
    """Refuse early what is neither a folder nor a possible hub name."""
    if model == STARTER and not STARTER_FOLDER.is_dir():
        raise UserError(
            f"--model starter: {STARTER_FOLDER} is not there; it comes with the repository, or "
            "make one from your own texts with python -m training.starter",
            code="model-not-found",
        )
    if is_local_model(model):
        if revision:
            raise UserError(
                f"--model_revision {revision} and --model {model}: only models on the hub have "
                "revisions; drop one",
                code="flags-conflict",
            )
        return
    if looks_local(model):
        raise UserError(f"--model {model}: no folder of that name", code="model-not-found")
    refuse_revision("--model", model)


def load_tokenizer(
    model: str,
    train_texts: Sequence[Text],
    max_length: int,
    say: Callable[[str], None] = print,
    cleaning: str = "news",
    revision: str = "",
    *,
    for_own_network: bool = False,
) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, or for ``tiny`` one that is trained on the training texts.

    Raises:
        UserError: no such model, it has no fast tokenizer, or one for another vocabulary
            (``for_own_network``: which is made for it).
        HubUnavailable: the hub did not respond.
    """
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    # Nothing is asked of the hub, and equal texts give an equal vocabulary on every machine.
    if model == TINY:
        parts = chain.from_iterable(map(texts_in, train_texts))
        return _train_wordpiece(map(cleaner(cleaning), parts), max_length)

    source = model_place(model)

    def ask() -> PreTrainedTokenizerBase:
        # Asked for first and separately, because without a network AutoTokenizer would wait for one
        # file after the other.
        version = {"revision": revision} if revision else {}
        config = json.loads(
            Path(cached_file(source, "config.json", **version)).read_text(encoding="utf-8")
        )
        has_file = cached_file(
            source, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **version
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **version)
        except Exception as error:
            if has_file or "trust_remote_code" in str(error):
                raise
            raise _no_tokenizer(model, first_line(error)) from error
        # Without any files transformers makes a tokenizer that knows special tokens only.
        others = [
            tokenizer.init_kwargs.get(name)
            for name in tokenizer.vocab_files_names
            if name != "tokenizer_file"
        ]
        if not tokenizer.is_fast or not (has_file or all(others)):
            raise _no_tokenizer(model)
        rows = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
        highest = max(tokenizer.get_vocab().values())
        if not for_own_network and isinstance(rows, int):
            check_vocabulary(f"--model {model}", highest, rows)
        return tokenizer

    tokenizer = load_from(model, ask, say)
    tokenizer.model_max_length = max_length
    # Whoever saved it may have cut or padded texts, which the tokenizer of the written model must
    # not.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def check_vocabulary(asked: str, highest_id: int, num_embeddings: int) -> None:
    """Refuse a tokenizer that is not that of the model, whose ids would be looked up in vain."""
    if what := vocabulary_misfit(highest_id, num_embeddings):
        raise UserError(
            f"{asked}: {what}; use the tokenizer that the model was trained with, or fit the "
            f"model to this one with resize_token_embeddings({highest_id + 1})",
            code="tokenizer-unlike",
        )


def _no_tokenizer(model: str, reason: str = "") -> UserError:
    more = f" ({reason})" if reason and not reason.endswith(":") else ""
    return UserError(
        f"--model {model}: has no tokenizer.json{more}; copy it from the model that this one was "
        "trained from, or write it with "
        "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)",
        code="tokenizer-missing",
    )


def is_local_model(model: str) -> bool:
    return model in (TINY, STARTER) or Path(model).expanduser().is_dir()


def load_from(
    model: str, load: Callable[[], T], say: Callable[[str], None], flag: str = "--model"
) -> T:
    """Load a part of a model, from the hub if it is not a folder, and turn errors into one line.

    Raises:
        UserError: no such model, or one that cannot be trained here.
        HubUnavailable: the hub did not respond.
    """
    try:
        if pointer := _lfs_pointer(model):
            raise UserError(
                f"{flag} {model}: {pointer} is only a pointer of Git LFS to the file; run git lfs "
                "pull in the folder",
                code="model-unreadable",
            )
        return load() if is_local_model(model) else ask_hub(f"{flag} {model}", load, say)
    except ForeseenError:
        raise
    except Exception as error:  # every library below has errors of its own, its HTTP client too
        raise UserError(
            f"{flag} {model}: {_why_not_loaded(model, error)}", code="model-unreadable"
        ) from error


def _lfs_pointer(model: str) -> str:
    """The name of a file in the model's folder that Git has not fetched; empty without one."""
    files = sorted(Path(model).expanduser().glob("*"))
    kinds = (".json", ".model", ".safetensors", ".txt")
    read = (file for file in files if file.suffix in kinds and file.is_file())
    return next((file.name for file in read if is_lfs_pointer(file)), "")


def _why_not_loaded(model: str, error: Exception) -> str:
    text, first = str(error), first_line(error)
    if "trust_remote_code" in text:
        architecture = "use a model of an architecture that transformers has"
        return f"brings its own code, which is never run; {architecture}"
    if "safetensors" in text and ("no file named" in text or "not appear to have a file" in text):
        remedy = "only safetensors weights are read, save_pretrained writes them"
        return f"has no model.safetensors; {remedy}"
    if Path(model).expanduser().is_dir():
        return f"the folder cannot be read as a model ({first})"
    return (
        f"not a folder, and could not be downloaded from the Hub ({first})"
        f"{did_you_mean(model, (STARTER, TINY, 'distilbert-base-uncased'))}; without a network use "
        "--model starter, or --model FOLDER with config.json, model.safetensors and tokenizer.json"
    )


def cache_key(
    data: TextData,
    tokenizer_json: str,
    max_length: int,
    cleaning: str = "news",
    blocks: Blocks | None = None,
    long: str = "cut",
    copies: Copies | None = None,
) -> str:
    """A name for exactly these texts and labels, and for all that their tokens depend on."""
    # Added only if used, so that data without them keeps the names it had before they existed.
    more = [*(asdict(blocks).values() if blocks else ()), *([long] if long != "cut" else ())]
    more += [data.num_unlabelled] if data.num_unlabelled else []
    if copies and copies.share:
        more.append(f"rough {copies.VERSION} {copies.share} {copies.seed}")
    about = [data.name, data.label_names, data.notes, max_length, cleaning, *more]
    pieces: list[Iterable[str | memoryview]] = [[json.dumps(about), tokenizer_json]]
    for rows in data.splits.values():
        pieces += [_separated(rows.texts), [np.ascontiguousarray(rows.labels).data]]
    return f"v{VERSION}-{digest_of(chain.from_iterable(pieces))}"


def _separated(texts: Iterable[Text]) -> Iterator[str]:
    # Not with their lengths, as other names are made: checkpoints hold this one, and a run is only
    # resumed if it has not changed.
    for number, text in enumerate(texts):
        yield "\x00" * bool(number) + "\x01".join(texts_in(text))


@dataclass(frozen=True)
class Copies:
    """Which share of the training rows, drawn with the seed, are read again as rough texts."""

    share: float
    seed: int
    VERSION: ClassVar[int] = 1  # raise it whenever the same row may give another rough text

    def of(self, data: TextData, clean: Callable[[str], str]) -> tuple[np.ndarray, Sequence[Text]]:
        """The numbers of the rows, ascending, and their rough texts."""
        drawn = np.random.default_rng([self.seed, 29]).random(len(data.train)) < self.share
        rows = row_numbers(len(drawn))[drawn]
        return rows, rough_texts(data.train.texts, rows, self.seed, clean)


@dataclass(frozen=True)
class Blocks:
    """How texts become blocks: their size in tokens, and the id that ends each text, if any."""

    size: int
    end: int | None

    def joined(self, texts: Iterable[list[int]]) -> Iterator[list[int]]:
        """The ids of each text, ended."""
        for ids in texts:
            # A tokenizer may have ended the text itself.
            yield ids if self.end is None or ids[-1:] == [self.end] else [*ids, self.end]

    def offsets(self, num_tokens: int) -> np.ndarray:
        """Where blocks begin and end; nothing can be learned from a single token that is left."""
        edges = np.arange(0, num_tokens, self.size)
        has_rest = num_tokens - edges[-1] > 1 or len(edges) == 1
        return np.append(edges, num_tokens) if has_rest else edges


def write_tokens(
    folder: Path,
    key: str,
    data: TextData,
    tokenizer: TextTokenizer,
    say: Callable[[str], None],
    blocks: Blocks | None = None,
    copies: Copies | None = None,
) -> None:
    """Tokenize ``data`` into ``folder`` unless a complete file with that key exists.

    With ``blocks``, a row is a block of the texts of a split, one after the other, instead of a
    text. With ``copies``, rough copies of some training rows stand behind them.
    """
    file = _file(folder, key)

    def make(damage: str) -> None:
        if damage:
            say(f"The cached tokens {file} are damaged ({damage}): tokenizing again")
        started = time.perf_counter()
        say(f"Tokenizing {sum(map(len, data.splits.values())):,} texts ...")
        about: dict[str, Any] = {
            "name": data.name,
            "label_names": data.label_names,
            "notes": data.notes,
            "left_out": data.left_out,
            "vocab_size": tokenizer.highest_id + 1,
            "cut": {},
            "width": {},
            "window": tokenizer.windows.length if tokenizer.windows else 0,
            "unlabelled": data.num_unlabelled,
        }
        arrays: dict[str, np.ndarray | GrowingArray] = {}
        for split, rows in data.splits.items():
            tokens, texts = _GrowingRows(folder, tokenizer), StoredTexts.temporary(folder)
            about["cut"][split] = tokens.extend(rows, blocks, texts)
            about["width"][split] = texts.width
            found = {"ids": tokens.ids, "offsets": tokens.offsets, "labels": rows.labels}
            if blocks:
                # Rows are cut again at the edges of blocks, whatever the texts were.
                edges = blocks.offsets(tokens.ids.shape[0])
                found["offsets"] = edges
                found["labels"] = np.zeros(len(edges) - 1, rows.labels.dtype)
            found["texts"], found["text_offsets"] = texts.arrays(folder)
            if split == "train" and copies and copies.share:
                # Behind the rows, and without texts: a copy is made from that of its original.
                numbers, rough = copies.of(data, tokenizer.clean)
                tokens.extend(Rows(rough, rows.labels[numbers]), cleaned=True)
                found["labels"] = np.concatenate([rows.labels, rows.labels[numbers]])
                found["copies_of"] = numbers
            arrays |= {f"{split}.{part}": array for part, array in found.items()}
        write_arrays(file, arrays, about)
        say(f"Tokenized in {time.perf_counter() - started:.1f}s, kept in {file}")

    kept(file, make)


class _GrowingRows:
    """The tokens of a split while they are made, in files: they may need more than the memory."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        # Two bytes per token if they are enough: they are for most encoders, and halve the file.
        self.ids = GrowingArray(folder, "uint16" if tokenizer.highest_id < 2**16 else "int32")
        self.offsets = GrowingArray(folder, "int64")
        self.offsets.extend(np.zeros(1))

    def extend(
        self,
        rows: Rows,
        blocks: Blocks | None = None,
        texts: StoredTexts | None = None,
        *,
        cleaned: bool = False,
    ) -> int:
        """Add the tokens of these rows, and their texts to ``texts``; returns how many were cut."""
        total_cut = 0
        for chunk, ids, lengths, num_cut in _encoded(self.tokenizer, rows, blocks, cleaned=cleaned):
            self.offsets.extend(self.ids.shape[0] + np.cumsum(lengths))
            self.ids.extend(ids)
            total_cut += num_cut
            for text in chunk if texts is not None else ():
                texts.append(text)
            del chunk  # before the next one is read
        return total_cut


def _encoded(
    tokenizer: TextTokenizer, rows: Rows, blocks: Blocks | None = None, *, cleaned: bool = False
) -> Iterator[tuple[list[Text], np.ndarray, np.ndarray, int]]:
    """Chunks of texts; their ids, int32, row after row; their lengths; how many are cut."""
    many = tokenizer.many()
    for chunk in in_chunks(rows.texts):
        # It counts through all chunks.
        before = many.num_cut
        texts = many.token_ids(chunk if cleaned else [tokenizer.clean_all(text) for text in chunk])
        texts = list(blocks.joined(texts)) if blocks else texts
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        ids = np.fromiter(chain.from_iterable(texts), np.int32, int(lengths.sum()))
        yield chunk, ids, lengths, many.num_cut - before
        del chunk, texts


def encode_rows(tokenizer: TextTokenizer, rows: Rows) -> TokenizedRows:
    _, parts, lengths, cut = zip(*_encoded(tokenizer, rows), strict=True)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    window = tokenizer.windows.length if tokenizer.windows else 0
    return TokenizedRows(np.concatenate(parts), offsets, rows.labels, sum(cut), window)


def read_tokens(folder: Path, key: str) -> TokenizedData:
    cached = ArrayFile.open(_file(folder, key))
    about = cached.about

    def rows(split: str) -> TokenizedRows:
        parts = [*PARTS, *(["copies_of"] if f"{split}.copies_of" in cached.entries else [])]
        arrays = {part: cached[f"{split}.{part}"] for part in parts}
        return TokenizedRows(**arrays, num_cut=about["cut"][split], window=about.get("window", 0))

    validation = rows("validation") if "validation" in about["cut"] else None
    return TokenizedData(
        key=key,
        name=about["name"],
        label_names=about["label_names"],
        read_in_training=rows("train"),
        test=rows("test"),
        notes=about["notes"],
        vocab_size=about["vocab_size"],
        validation=validation,
        num_unlabelled=about.get("unlabelled", 0),
    )


def read_texts(folder: Path, key: str) -> TextData | None:
    """The rows that were tokenized, whose texts stay in the file; None if it is damaged."""
    # Read from beginning to end once per start: later the file is only mapped, and a damaged page
    # of it would be trained on without a word.
    if find_damage(_file(folder, key)):
        return None
    cached = ArrayFile.open(_file(folder, key))
    about, file = cached.about, cached.path.open("rb")

    def rows(split: str) -> Rows:
        begin = cached.entries[f"{split}.texts"][2]
        _, (count,), begin_offsets = cached.entries[f"{split}.text_offsets"]
        texts = StoredTexts(file, file, count - 1, begin, begin_offsets, about["width"][split])
        return Rows(texts, cached[f"{split}.labels"][: len(texts)])

    splits = {split: rows(split) for split in about["cut"]}
    return TextData(
        name=about["name"],
        label_names=about["label_names"],
        notes=about["notes"],
        left_out=about["left_out"],
        num_unlabelled=about.get("unlabelled", 0),
        **splits,
    )


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key}.safetensors"


def _train_wordpiece(texts: Iterable[str], max_length: int) -> PreTrainedTokenizerBase:
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    special = list(SPECIAL_TOKENS.values())
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for parts in _counted_parts(texts):
        for part, count in parts.items():
            for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(part)):
                words[word] += count
    pieces = special + _frequent_pieces(words, TINY_VOCABULARY - len(special))
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    return make_tokenizer(tokenizer.to_str(), max_length)


def _counted_parts(texts: Iterable[str]) -> Iterator[Counter[str]]:
    # What is between two spaces, some at a time: BERT's tokenizers split it apart from the rest,
    # and most of it occurs again and again, so each part is split once for many texts.
    parts: Counter[str] = Counter()
    for text in texts:
        parts.update(text.split(" "))
        if len(parts) > MOST_PARTS:
            yield parts
            parts = Counter()
    yield parts


def make_tokenizer(tokenizer_json: str, max_length: int) -> PreTrainedTokenizerBase:
    """The tokenizer of ``tiny``."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(tokenizer_json)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length, **SPECIAL_TOKENS
    )


def _frequent_pieces(words: Counter[str], size: int) -> list[str]:
    """All letters, then words that occur more than once, then parts of words, each by frequency."""
    # The library's own trainer breaks ties by the order of a hash map, so the same texts would give
    # a different vocabulary each time, and no run could be repeated. Words of more than 30 letters
    # give letters only.
    # WordPiece marks with ## what continues a word, so letters and parts count apart by where they
    # are.
    letters: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for word, count in words.items():
        letters[word[0]] += count
        for letter in word[1:]:
            letters[f"##{letter}"] += count
        if len(word) <= 30:
            for start in range(1, len(word) - 1):
                parts[word[: start + 1]] += count
                parts[f"##{word[start:]}"] += count
    repeated = Counter({word: count for word, count in words.items() if count > 1})
    # A piece can be a letter, a word and a part; the dict keeps the first place of each.
    ordered = dict.fromkeys(
        piece
        for pieces in (letters, repeated, parts)
        for piece in sorted(pieces, key=lambda p: (-pieces[p], p))
    )
    return list(ordered)[:size]
