"""Texts that occur more than once: equal ones, and near duplicates.

Two texts are equal if they only differ in case and white space. They are near duplicates if the
sets of their word triples have a Jaccard similarity (the share of common triples among all) of at
least 0.8. Words are compared without case and punctuation. Of pairs, both texts must be equal, or
both near.

The search is exact. If two sets of sizes n and m are that similar, they share a triple among the
first n - ceil(0.8 n) + 1 of one and the same of the other, in any order that is fixed for all sets
(Chaudhuri et al., 2006, "A primitive operator for similarity joins in data cleaning"). With rare
triples first, hardly any two texts share one there by chance, so few pairs have to be compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np

from common.text import Text, folded, texts_in
from training.data.dataset import TextData, row_numbers
from training.data.stored_texts import JoinedTexts

WORDS_PER_SHINGLE = 3
LEAST_SIMILARITY = 0.8
# If so many texts share a rare triple, each is only compared with that many before it: enough for
# boilerplate, whose texts are alike, and the time does not grow with the square of their number.
MOST_COMPARED = 100
PAIRS_PER_CHUNK = 50_000
# Which pairs of rows count, given the numbers of both: bool, (pairs,).
Counts = Callable[[np.ndarray, np.ndarray], np.ndarray]
# Numbers are labels of one text that contradict each other if they are further apart than this, in
# standard deviations.
FAR_APART = 0.5
ROWS_PER_CHUNK = 1_000_000
# Chinese and Japanese have no spaces, so each character counts as a word.
_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")
# Two odd numbers without a pattern (xxHash's), to mix the numbers of three words into one.
_MIX = np.array([0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)


class Repeats:
    """Finds rows whose texts repeat another's. Rows are numbered through all splits.

    Args:
        data: its splits are compared.
        near: find near duplicates too.
    """

    def __init__(self, data: TextData, *, near: bool) -> None:
        self.data, self.near = data, near
        texts = [rows.texts for rows in data.splits.values()]
        firsts = np.cumsum([0, *map(len, texts)])
        numbers = row_numbers(int(firsts[-1]))
        self.rows = {
            split: numbers[slice(*ends)]
            for split, ends in zip(data.splits, pairwise(firsts), strict=True)
        }
        self.texts = JoinedTexts(*texts)
        # Eight bytes per row instead of its text: equal hashes are compared as texts later.
        self._hashes = np.fromiter(map(hash, map(folded, self.texts)), np.int64, len(self.texts))
        self._may_repeat = _occurs_again(self._hashes)
        self._shingles, self._second = _shingles_of(self.texts) if near else (None, None)

    def drop(self) -> dict[str, Any]:
        """The training rows that repeat others (``dropped``), and a line about them (``lines``).

        Of those that repeat each other the first is kept, of those that repeat a test or validation
        row none.
        """
        train = self.rows["train"]
        # First those that repeat held-out rows, which are lost in any case; then, of the rest, all
        # but the first. The other way round, the one that is kept could be dropped after its
        # repeats.
        held_out = np.concatenate([rows for split, rows in self.rows.items() if split != "train"])
        rest = train[self.partners(train, held_out) < 0]
        kept = rest[self.partners(rest) < 0]
        if len(kept) == len(train):
            return {"dropped": [], "lines": []}
        repeat = "repeat or nearly repeat" if self.near else "repeat"
        line = (
            f"{len(train) - len(kept):,} of {len(train):,} training rows are left out: "
            f"{len(train) - len(rest):,} {repeat} the text of a test or validation row, "
            f"{len(rest) - len(kept):,} that of an earlier training row"
        )
        labelled = rest[rest < len(train) - self.data.num_unlabelled]
        if count := int((self.conflicts(labelled) >= 0).sum()):
            line += f"; {count:,} have another label than an earlier row with this text"
        return {"dropped": np.delete(train, kept).tolist(), "lines": [line]}

    def partners(self, rows: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
        """For each row one of ``known`` with the same text, or nearly the same; -1 without one.

        Without ``known``, an earlier one of ``rows``. Both are ascending; (rows,).
        """
        found = self._equal(rows, known)
        if self._shingles is not None:
            others = found < 0
            near = self._shingles.partners(
                rows if known is None else rows[others], known, self._both_near
            )
            found[others] = near[others] if known is None else near
        return found

    def conflicts(self, rows: np.ndarray) -> np.ndarray:
        """For each row an earlier one of these with the same text, or nearly the same, under
        another label; -1 without one. All of them have a label; (rows,).
        """
        labels = self.data.train.labels
        apart = FAR_APART * labels.std() if labels.dtype.kind == "f" else 0.0

        def differ(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
            distance = abs(self.labels(ours).astype(np.float64) - self.labels(theirs))
            return (distance.max(axis=1) if distance.ndim > 1 else distance) > apart

        found = np.full(len(rows), -1, rows.dtype)
        # The first row of each label, by text.
        earlier: defaultdict[Text, dict[bytes, int]] = defaultdict(dict)
        repeating = np.flatnonzero(self._may_repeat[rows])
        for position, row, label in zip(
            repeating, rows[repeating], self.labels(rows[repeating]), strict=True
        ):
            same, key = earlier[folded(self.texts[row])], label.tobytes()
            if same.keys() <= {key}:
                same.setdefault(key, row)
                continue
            others = np.fromiter(same.values(), rows.dtype, len(same))
            is_other = differ(np.full(len(others), row), others)
            if is_other.any():
                found[position] = others[is_other][0]
            same.setdefault(key, row)
        if self._shingles is not None:
            near = self._shingles.partners(
                rows, None, lambda *pair: differ(*pair) & self._both_near(*pair)
            )
            found = np.where(found < 0, near, found)
        return found

    def labels(self, rows: np.ndarray) -> np.ndarray:
        """The labels of rows of any split: (rows, ...)."""
        parts = [one.labels for one in self.data.splits.values()]
        firsts = np.cumsum([0, *map(len, parts)])
        found = np.empty((len(rows), *parts[0].shape[1:]), parts[0].dtype)
        for part, (first, end) in zip(parts, pairwise(firsts), strict=True):
            here = (rows >= first) & (rows < end)
            found[here] = part[rows[here] - first]
        return found

    def are_equal(self, row: int, other: int) -> bool:
        return self._hashes[row] == self._hashes[other] and folded(self.texts[row]) == folded(
            self.texts[other]
        )

    def _both_near(self, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        """Whether the texts of pairs that were not searched are near too; (pairs,)."""
        if self._second is None:
            return np.ones(len(ours), dtype=bool)
        return self._second.similar(ours, theirs)

    def _equal(self, rows: np.ndarray, known: np.ndarray | None) -> np.ndarray:
        found, among = np.full(len(rows), -1, rows.dtype), rows if known is None else known
        # Most rows repeat none, and need no memory here.
        positions, among = np.flatnonzero(self._may_repeat[rows]), among[self._may_repeat[among]]
        if not len(among):
            return found
        # The first row of each hash.
        hashes, firsts = np.unique(self._hashes[among], return_index=True)
        own = self._hashes[rows[positions]]
        position = np.minimum(np.searchsorted(hashes, own), len(hashes) - 1)
        found[positions] = np.where(hashes[position] == own, among[firsts[position]], -1)
        # The first row of a hash finds itself.
        found[found == rows] = -1
        for i in np.flatnonzero(found >= 0):  # equal hashes are not yet equal texts
            if not self.are_equal(rows[i], found[i]):
                found[i] = -1
        return found


def _shingles_of(texts: JoinedTexts) -> tuple[Shingles, Shingles | None]:
    """Those to search by, and of pairs those of the other texts."""
    width = len(texts_in(texts[0]))
    parts = [lambda i=i: (texts_in(text)[i] for text in texts) for i in range(width)]
    # If many pairs share a text, as questions on one paragraph do, a search by that text would
    # compare all of them with each other: it is by the one that fewer share.
    parts.sort(key=lambda part: len(set(map(hash, part()))) if width > 1 else 0)
    *second, first = (Shingles.of(part(), len(texts)) for part in parts)
    return first, second[0] if second else None


def _occurs_again(hashes: np.ndarray) -> np.ndarray:
    """Whether each of these occurs more than once; bool, (rows,)."""
    ordered = np.sort(hashes)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    found = np.zeros(len(hashes), dtype=bool)
    for start in range(0, len(hashes) if len(repeated) else 0, ROWS_PER_CHUNK):
        some = hashes[start : start + ROWS_PER_CHUNK]
        position = np.minimum(np.searchsorted(repeated, some), len(repeated) - 1)
        found[start : start + ROWS_PER_CHUNK] = repeated[position] == some
    return found


@dataclass(frozen=True)
class Shingles:
    """The sets of word triples of all rows.

    ``keys``: int64, ascending, row x ``num_kinds`` + triple, where triples are numbered from the
    rarest to the most frequent; those of row i are ``keys[offsets[i]:offsets[i + 1]]``.
    ``num_single``: triples below this number are in one row only.
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
        # A triple begins at every word of a text but its last two.
        starts_here = np.ones(len(words), dtype=bool)
        for before_end in range(1, WORDS_PER_SHINGLE):
            starts_here[ends[lengths > 0] - before_end] = False
        starts = np.flatnonzero(starts_here)
        # Three words become one number of 64 bits, in which two different triples practically never
        # meet.
        mixed = words[starts].astype(np.uint64)
        for position, factor in enumerate(_MIX, start=1):
            mixed = mixed * factor + words[starts + position].astype(np.uint64)
        rows = np.repeat(np.arange(num_rows), np.maximum(lengths - WORDS_PER_SHINGLE + 1, 0))
        del words, starts, starts_here
        kinds, triples = np.unique(mixed, return_inverse=True)
        num_kinds = max(1, len(kinds))
        del mixed, kinds
        # One number for (row, triple) lets numpy sort and search all sets of all rows at once.
        keys = np.unique(rows * num_kinds + triples)  # each triple counts once in a row
        del rows, triples
        frequency = np.bincount(keys % num_kinds, minlength=num_kinds)
        number = np.empty(num_kinds, dtype=np.int64)
        # Renumbered from rare to frequent, so that a prefix of a row's sorted keys is its rarest
        # triples: those by which few other rows are found.
        number[np.argsort(frequency, kind="stable")] = np.arange(num_kinds)
        rows, triples = np.divmod(keys, num_kinds)
        keys = np.sort(rows * num_kinds + number[triples])
        offsets = np.searchsorted(keys, np.arange(num_rows + 1) * num_kinds)
        return cls(keys, offsets, num_kinds, int((frequency == 1).sum()))

    def partners(self, rows: np.ndarray, known: np.ndarray | None, counts: Counts) -> np.ndarray:
        """As :meth:`Repeats.partners`, for near duplicates of which ``counts`` is true."""
        found = np.full(len(self.offsets) - 1, -1)
        sizes = np.diff(self.offsets)
        # The entries that a row is found by: (triple, row), those of one triple together, known
        # rows first.
        everyone = rows if known is None else np.concatenate([known, rows])
        is_query = np.zeros(len(sizes), dtype=bool)
        is_query[rows] = True
        # As many triples as can differ, and one more: two rows that are similar share one of these.
        prefix = sizes - np.ceil(LEAST_SIMILARITY * sizes - 1e-9).astype(np.int64) + 1
        entries = _spread(self.offsets[everyone], np.minimum(prefix, sizes)[everyone])
        entry_rows, triples = np.divmod(self.keys[entries], self.num_kinds)
        # A triple of a single row leads to no other row.
        shared = triples >= self.num_single
        entry_rows, triples = entry_rows[shared], triples[shared]
        order = np.lexsort(
            (entry_rows, is_query[entry_rows] if known is not None else entry_rows, triples)
        )
        entry_rows, triples = entry_rows[order], triples[order]

        # Compare each entry's row with those of the entries before it, one further away at a time.
        first_of_triple = np.searchsorted(triples, triples)
        queries = np.flatnonzero(is_query[entry_rows])
        if known is None:
            nearest = queries - 1
        else:
            known_before = np.concatenate([[0], np.cumsum(~is_query[entry_rows])])
            num_known = known_before[np.searchsorted(triples, triples[queries], side="right")]
            nearest = (
                first_of_triple[queries] + num_known - known_before[first_of_triple[queries]] - 1
            )
        for distance in range(MOST_COMPARED):
            other = nearest - distance
            active = (other >= first_of_triple[queries]) & (found[entry_rows[queries]] < 0)
            if not active.any():
                break
            queries, nearest, other = queries[active], nearest[active], other[active]
            # Rows that share several rare triples meet several times: each pair is compared once.
            pairs = np.unique(entry_rows[queries] * len(sizes) + entry_rows[other])
            for start in range(0, len(pairs), PAIRS_PER_CHUNK):
                ours, theirs = np.divmod(pairs[start : start + PAIRS_PER_CHUNK], len(sizes))
                counting = counts(ours, theirs)
                ours, theirs = ours[counting], theirs[counting]
                similar = self.similar(ours, theirs)
                # The pairs are in ascending order: assigned backwards, so that the first partner
                # remains.
                found[ours[similar][::-1]] = theirs[similar][::-1]
        return found[rows]

    def similar(self, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        """Which of these pairs of rows are near duplicates: bool, (pairs,)."""
        sizes = np.diff(self.offsets)
        total = sizes[ours] + sizes[theirs]
        # Jaccard = common / (total - common).
        needed = np.ceil(total * LEAST_SIMILARITY / (1 + LEAST_SIMILARITY) - 1e-9)
        possible = np.flatnonzero(np.minimum(sizes[ours], sizes[theirs]) >= needed)
        ours, theirs = ours[possible], theirs[possible]
        entries = _spread(self.offsets[ours], sizes[ours])
        # The keys of our triples as they would be in the other row; each is there or not.
        wanted = self.keys[entries] + np.repeat((theirs - ours) * self.num_kinds, sizes[ours])
        position = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        pair = np.repeat(np.arange(len(ours)), sizes[ours])
        common = np.bincount(pair, weights=self.keys[position] == wanted, minlength=len(ours))
        similar = np.zeros(len(total), dtype=bool)
        similar[possible] = common >= needed[possible]
        return similar


def _numbered_words(
    texts: Iterable[str], num_rows: int, vocabulary: defaultdict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """All words as numbers, int32, and how many each text has, at least a triple if any."""
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
