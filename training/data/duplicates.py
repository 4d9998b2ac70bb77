"""Texts that occur more than once: equal ones, and near duplicates.

Two texts are near duplicates if the sets of their word triples have a Jaccard similarity (the share of common triples
among all) of at least 0.8. Words are compared without case and punctuation.

The search is exact. If two sets of sizes n and m are that similar, they share a triple among the first
n - ceil(0.8 n) + 1 of one and the same of the other, in any order that is fixed for all sets (Chaudhuri et al., 2006,
"A primitive operator for similarity joins in data cleaning"). With rare triples first, hardly any two texts share one
there by chance, so few pairs have to be compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np

from common.text import in_one_line
from training.data.dataset import NewsData, row_numbers
from training.data.stored_texts import JoinedTexts

WORDS_PER_SHINGLE = 3
LEAST_SIMILARITY = 0.8
# If so many texts share a rare triple, each is only compared with that many before it: enough for boilerplate, whose
# texts are alike, and the time does not grow with the square of their number.
MOST_COMPARED = 100
PAIRS_PER_CHUNK = 50_000
ROWS_PER_CHUNK = 1_000_000
# Chinese and Japanese have no spaces, so each character counts as a word.
_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")
# Two odd numbers without a pattern (xxHash's), to mix the numbers of three words into one.
_MIX = np.array([0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)


class Repeats:
    """Finds rows whose texts repeat another's. Rows are numbered through all splits, the training rows first.

    Args:
        data: its splits are compared.
        near: find near duplicates too; not of pairs.
    """

    def __init__(self, data: NewsData, *, near: bool) -> None:
        self._data, self._near = data, near
        texts = [rows.texts for rows in data.splits.values()]
        firsts = np.cumsum([0, *map(len, texts)])
        numbers = row_numbers(int(firsts[-1]))
        self.rows = {split: numbers[slice(*ends)] for split, ends in zip(data.splits, pairwise(firsts), strict=True)}
        self._texts = JoinedTexts(*texts)
        self._hashes = np.fromiter(map(hash, self._texts), np.int64, len(self._texts))
        self._may_repeat = _occurs_again(self._hashes)
        self._shingles = Shingles.of(self._texts, len(self._texts)) if near else None

    def drop(self) -> dict[str, Any]:
        """The training rows that repeat others (``dropped``), and how many there are in words (``lines``).

        Of those that repeat each other the first is kept, of those that repeat a test or validation row none.
        """
        train = self.rows["train"]
        held_out = np.concatenate([rows for split, rows in self.rows.items() if split != "train"])
        rest = train[self.partners(train, held_out) < 0]
        partners = self.partners(rest)
        kept = rest[partners < 0]
        if len(kept) == len(train):
            return {"dropped": [], "lines": []}
        line = (
            f"{len(train) - len(kept):,} of {len(train):,} training rows are left out: {len(train) - len(rest):,} "
            f"{self._repeat} the text of a test or validation row, {len(rest) - len(kept):,} that of an earlier "
            "training row"
        )
        return {"dropped": np.delete(train, kept).tolist(), "lines": [line + self._conflicts(rest, partners)]}

    def describe(self, train: np.ndarray, validation: np.ndarray) -> dict[str, Any]:
        """How many rows repeat a training row in words (``lines``); nothing if none do.

        ``validation``: the rows of the validation split if there is one, otherwise of the training split.
        """
        lines = []
        if "validation" in self.rows:
            validation = self.rows["validation"][validation]
        counts = [
            f"{count:,} of {len(rows):,} {split} rows"
            for split, rows in (("validation", validation), ("test", self.rows["test"]))
            if (count := int((self.partners(rows, train) >= 0).sum()))
        ]
        if counts:
            which = f"{' and '.join(counts)} {self._repeat} the text of a training row"
            lines.append(f"{which}, so their scores are too good")
        partners = self.partners(train)
        if count := int((partners >= 0).sum()):
            which = f"{count:,} of {len(train):,} training rows {self._repeat} the text of an earlier one"
            lines.append(which + self._conflicts(train, partners))
        return {"lines": lines}

    @property
    def _repeat(self) -> str:
        return "repeat or nearly repeat" if self._near else "repeat"

    def _conflicts(self, rows: np.ndarray, partners: np.ndarray) -> str:
        labels, names = self._data.train.labels, self._data.label_names
        # The partner of a row is an earlier one, so it has a label too.
        repeating = np.flatnonzero((partners >= 0) & (rows < len(labels) - self._data.num_unlabelled))
        differ = labels[rows[repeating]] != labels[partners[repeating]]
        differing = repeating[differ.any(axis=1) if differ.ndim > 1 else differ]
        if not len(differing):
            return ""
        row, partner = int(rows[differing[0]]), int(partners[differing[0]])
        return (
            f"; {len(differing):,} of these have another label than the row that they repeat, such as row {row} "
            f"({_in_words(labels[row], names)}) and row {partner} ({_in_words(labels[partner], names)}): "
            f'"{in_one_line(self._texts[row])[:80]}"'
        )

    def partners(self, rows: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
        """For each row one of ``known`` with the same text, or nearly the same; -1 without one.

        Without ``known``, an earlier one of ``rows``. Both are ascending; (rows,).
        """
        found = self._equal(rows, known)
        if self._shingles is not None:
            others = found < 0
            near = self._shingles.partners(rows if known is None else rows[others], known)
            found[others] = near[others] if known is None else near
        return found

    def _equal(self, rows: np.ndarray, known: np.ndarray | None) -> np.ndarray:
        found, among = np.full(len(rows), -1, rows.dtype), rows if known is None else known
        # Most rows repeat none, and need no memory here.
        places, among = np.flatnonzero(self._may_repeat[rows]), among[self._may_repeat[among]]
        if not len(among):
            return found
        # The first row of each hash.
        hashes, firsts = np.unique(self._hashes[among], return_index=True)
        own = self._hashes[rows[places]]
        place = np.minimum(np.searchsorted(hashes, own), len(hashes) - 1)
        found[places] = np.where(hashes[place] == own, among[firsts[place]], -1)
        found[found == rows] = -1
        for i in np.flatnonzero(found >= 0):  # equal hashes are not yet equal texts
            if self._texts[rows[i]] != self._texts[found[i]]:
                found[i] = -1
        return found


def _occurs_again(hashes: np.ndarray) -> np.ndarray:
    """Whether each of these occurs more than once; bool, (rows,)."""
    ordered = np.sort(hashes)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    found = np.zeros(len(hashes), dtype=bool)
    for start in range(0, len(hashes) if len(repeated) else 0, ROWS_PER_CHUNK):
        some = hashes[start : start + ROWS_PER_CHUNK]
        place = np.minimum(np.searchsorted(repeated, some), len(repeated) - 1)
        found[start : start + ROWS_PER_CHUNK] = repeated[place] == some
    return found


def _in_words(label: Any, names: Sequence[str]) -> str:
    """A row's label: that of a class, several of them, or a number."""
    if np.ndim(label):
        return ", ".join(name for name, applies in zip(names, label, strict=True) if applies) or "none"
    return names[label] if isinstance(label, np.integer) else f"{label:g}"


@dataclass(frozen=True)
class Shingles:
    """The sets of word triples of all rows.

    ``keys``: int64, ascending, row x ``num_kinds`` + triple, where triples are numbered from the rarest to the most
    frequent; those of row i are ``keys[offsets[i]:offsets[i + 1]]``. ``num_single``: triples below this number are in
    one row only.
    """

    keys: np.ndarray
    offsets: np.ndarray
    num_kinds: int
    num_single: int

    @classmethod
    def of(cls, texts: Iterable[str], num_rows: int) -> Shingles:
        vocabulary: defaultdict[str, int] = defaultdict(count().__next__)
        vocabulary[""]  # fills texts of one or two words up to a triple
        words, lengths = _numbered_words(texts, num_rows, vocabulary)
        ends = np.cumsum(lengths)
        starts_here = np.ones(len(words), dtype=bool)
        for before_end in range(1, WORDS_PER_SHINGLE):
            starts_here[ends[lengths > 0] - before_end] = False
        starts = np.flatnonzero(starts_here)
        mixed = words[starts].astype(np.uint64)
        for place, factor in enumerate(_MIX, start=1):
            mixed = mixed * factor + words[starts + place].astype(np.uint64)
        rows = np.repeat(np.arange(num_rows), np.maximum(lengths - WORDS_PER_SHINGLE + 1, 0))
        del words, starts, starts_here
        kinds, triples = np.unique(mixed, return_inverse=True)
        num_kinds = max(1, len(kinds))
        del mixed, kinds
        keys = np.unique(rows * num_kinds + triples)  # each triple counts once in a row
        del rows, triples
        frequency = np.bincount(keys % num_kinds, minlength=num_kinds)
        number = np.empty(num_kinds, dtype=np.int64)
        number[np.argsort(frequency, kind="stable")] = np.arange(num_kinds)
        rows, triples = np.divmod(keys, num_kinds)
        keys = np.sort(rows * num_kinds + number[triples])
        offsets = np.searchsorted(keys, np.arange(num_rows + 1) * num_kinds)
        return cls(keys, offsets, num_kinds, int((frequency == 1).sum()))

    def partners(self, rows: np.ndarray, known: np.ndarray | None) -> np.ndarray:
        """As :meth:`Repeats.partners`, for near duplicates."""
        found = np.full(len(self.offsets) - 1, -1)
        sizes = np.diff(self.offsets)
        # The entries that a row is found by: (triple, row), those of one triple together, known rows first.
        everyone = rows if known is None else np.concatenate([known, rows])
        is_query = np.zeros(len(sizes), dtype=bool)
        is_query[rows] = True
        prefix = sizes - np.ceil(LEAST_SIMILARITY * sizes - 1e-9).astype(np.int64) + 1
        entries = _spread(self.offsets[everyone], np.minimum(prefix, sizes)[everyone])
        entry_rows, triples = np.divmod(self.keys[entries], self.num_kinds)
        shared = triples >= self.num_single
        entry_rows, triples = entry_rows[shared], triples[shared]
        order = np.lexsort((entry_rows, is_query[entry_rows] if known is not None else entry_rows, triples))
        entry_rows, triples = entry_rows[order], triples[order]

        # Compare each entry's row with those of the entries before it, one further away at a time.
        first_of_triple = np.searchsorted(triples, triples)
        queries = np.flatnonzero(is_query[entry_rows])
        if known is None:
            nearest = queries - 1
        else:
            known_before = np.concatenate([[0], np.cumsum(~is_query[entry_rows])])
            num_known = known_before[np.searchsorted(triples, triples[queries], side="right")]
            nearest = first_of_triple[queries] + num_known - known_before[first_of_triple[queries]] - 1
        for distance in range(MOST_COMPARED):
            other = nearest - distance
            active = (other >= first_of_triple[queries]) & (found[entry_rows[queries]] < 0)
            if not active.any():
                break
            queries, nearest, other = queries[active], nearest[active], other[active]
            pairs = np.unique(entry_rows[queries] * len(sizes) + entry_rows[other])
            for start in range(0, len(pairs), PAIRS_PER_CHUNK):
                ours, theirs = np.divmod(pairs[start : start + PAIRS_PER_CHUNK], len(sizes))
                similar = self._similar(ours, theirs, sizes)
                # The pairs are in ascending order: assigned backwards, so that the first partner remains.
                found[ours[similar][::-1]] = theirs[similar][::-1]
        return found[rows]

    def _similar(self, ours: np.ndarray, theirs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        total = sizes[ours] + sizes[theirs]
        # Jaccard = common / (total - common).
        needed = np.ceil(total * LEAST_SIMILARITY / (1 + LEAST_SIMILARITY) - 1e-9)
        possible = np.flatnonzero(np.minimum(sizes[ours], sizes[theirs]) >= needed)
        ours, theirs = ours[possible], theirs[possible]
        entries = _spread(self.offsets[ours], sizes[ours])
        wanted = self.keys[entries] + np.repeat((theirs - ours) * self.num_kinds, sizes[ours])
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        pair = np.repeat(np.arange(len(ours)), sizes[ours])
        common = np.bincount(pair, weights=self.keys[place] == wanted, minlength=len(ours))
        similar = np.zeros(len(total), dtype=bool)
        similar[possible] = common >= needed[possible]
        return similar


def _numbered_words(
    texts: Iterable[str], num_rows: int, vocabulary: defaultdict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """All words as numbers, int32, and how many of them are each text's, filled up to a triple if it has any."""
    parts: list[np.ndarray] = []
    lengths = np.zeros(num_rows, dtype=np.int64)
    held: list[int] = []
    for row, text in enumerate(texts):
        found = [vocabulary[word] for word in _WORD.findall(text.lower())]
        if 0 < len(found) < WORDS_PER_SHINGLE:
            found += [0] * (WORDS_PER_SHINGLE - len(found))
        lengths[row] = len(found)
        held += found
        if len(held) > 1_000_000:
            parts.append(np.array(held, dtype=np.int32))
            held = []
    return np.concatenate([*parts, np.array(held, dtype=np.int32)]), lengths


def _spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers start, start + 1, ... of each range, one range after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
