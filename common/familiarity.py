"""How unlike the training texts a text is, from its tokens and the model's scores.

Two things are looked at. The tokens: how surprising each is after the one before it, to somebody
who has read the training texts (a table of their pairs of tokens). Code, other languages and
nonsense surprise. The scores: the sum of their exponentials, which falls where no label fits
(Liu et al., arXiv 2010.03759). Topics that no label is for, in the language of the others, lack
evidence. Together they cost a few microseconds a text and run in a browser too. The vector of a
frozen encoder, which is often used for this, would cost a second forward pass; of MiniLM the last
layer found less, the third one more: benchmarks/honest_answers.md has the comparison.

Short texts surprise and convince otherwise than long ones, so both are judged against held-out
texts of the same length: whole ones, and their beginnings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.problem_types import MULTI_LABEL, SINGLE_LABEL, ProblemType

Floats = NDArray[np.float64]
Ids = Sequence[Sequence[int]]

# A text that is less familiar than all but this share of the held-out texts is taken for foreign.
LIMIT = 0.01
# Fewer texts would leave most ordinary pairs of tokens unseen.
FEWEST_TEXTS = 1000
_MOST_BITS = 18  # 256 KiB; with half of that, 82 instead of 84% of foreign texts were found
_NATS_PER_LEVEL = 1 / 12  # of the byte that says how rare a token is
_RARITY = np.arange(256) * _NATS_PER_LEVEL  # in nats, of each level
_PRIOR = 20.0  # how many times a pair counts as seen, on top, as often as its second token is usual
_QUANTILES = (0.0005, 0.001, 0.002, 0.005, *(i / 100 for i in range(1, 101)))
_LEAST_SPREAD = 0.05
_BEFORE, _AFTER = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
# How often a pair was seen, by its level: 0, and then the middle of each power of two.
_TIMES = np.concatenate([[0.0], np.exp2(np.arange(1, 16) - 0.5)])


def beginnings(ids: Ids) -> list[list[int]]:
    """Each text cut after its first 4 to 19 tokens, as a headline is shorter than its story."""
    lengths = np.random.default_rng(0).integers(4, 20, len(ids))
    return [[*one[: 1 + n], *one[-1:]] for one, n in zip(ids, lengths.tolist(), strict=True)]


def fit(
    kind: ProblemType, training_ids: Ids, held_out: Sequence[tuple[Ids, Floats]], vocabulary: int
) -> tuple[dict[str, Any], bytes]:
    """Learn what is familiar.

    Args:
        training_ids: token ids of training texts, with their special tokens.
        held_out: token ids and scores, (texts, labels), of texts that are not among them; the first
            are whole texts and say what is usual, others (their beginnings) only how that depends
            on the length.
        vocabulary: how many ids there are.

    Returns:
        What the manifest keeps, and the table for a file beside it.
    """
    ids = np.concatenate([np.asarray(one[1:-1], dtype=np.int64) for one in training_ids])
    counts = np.bincount(ids, minlength=vocabulary)
    rarity = -np.log((counts + 0.5) / (counts.sum() + 0.5 * vocabulary))
    rarity = np.clip(np.rint(rarity / _NATS_PER_LEVEL), 0, 255).astype(np.uint8)
    pairs, bits = _table_of_pairs(training_ids, vocabulary)
    record: dict[str, Any] = {
        "texts": len(training_ids),
        "held_out": len(held_out[0][0]),
        "tokens": int(counts.sum()),
        "vocabulary": vocabulary,
        "bits": bits,
        "limit": LIMIT,
        "by_length": [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]],
        "quantiles": [[0.0, 1.0], [1.0, 0.0]],
    }
    table = rarity.tobytes() + pairs.tobytes()
    plain = Familiarity(record, table, kind)
    flat = [_flat(ids) for ids, _ in held_out]
    surprise = np.concatenate([plain.surprise(*one) for one in flat])
    shortness = np.concatenate([1 / _num_inner(lengths) for _, lengths in flat])
    record["by_length"] = _usual_by_length(shortness, surprise)
    if kind in (SINGLE_LABEL, MULTI_LABEL):
        evidence = np.concatenate([evidence_of(kind, scores) for _, scores in held_out])
        record["by_length"] += _usual_by_length(shortness, evidence)
    strange = Familiarity(record, table, kind).strangeness(*flat[0], held_out[0][1])
    # From the strangest on, so that `np.interp` finds rising numbers: strangeness, and the share of
    # the held-out texts that is at least as strange.
    shares = np.array(_QUANTILES)[::-1]
    record["quantiles"] = [np.quantile(strange, 1 - shares).round(5).tolist(), shares.tolist()]
    return record, table


def _usual_by_length(shortness: Floats, values: Floats) -> list[list[float]]:
    """Mean and spread (mean absolute deviation) as polynomials in one over the length."""
    powers = np.stack([np.ones_like(shortness), shortness, shortness**2], axis=1)
    mean = np.linalg.lstsq(powers, values, rcond=None)[0]
    spread = np.linalg.lstsq(powers, np.abs(values - powers @ mean), rcond=None)[0]
    return [mean.tolist(), spread.tolist()]


def _table_of_pairs(training_ids: Ids, vocabulary: int) -> tuple[NDArray[np.uint8], int]:
    """How often each pair of neighbours was seen, in a byte at the place that the pair's number
    says; of pairs with the same place the most frequent one.
    """
    inner = [np.asarray(one[1:-1], dtype=np.int64) for one in training_ids]
    # Texts of a single word have no pairs.
    numbers = np.concatenate([one[:-1] * vocabulary + one[1:] for one in inner])
    pairs, times = np.unique(numbers, return_counts=True)
    # Pairs seen only once are mostly chance, and there are more of them than of all others.
    pairs, times = pairs[times > 1], times[times > 1]
    order = np.argsort(times, kind="stable")
    pairs, times = pairs[order], times[order]  # the last one written to a place stays
    bits = min(_MOST_BITS, max(10, math.ceil(math.log2(max(1, len(pairs))))))
    mixed = _mixed(pairs // vocabulary, pairs % vocabulary)
    table = np.zeros(1 << bits, dtype=np.uint8)
    levels = np.minimum(15, 1 + np.log2(times).astype(np.int64)).astype(np.uint8)
    table[mixed & np.uint32(len(table) - 1)] = ((mixed >> np.uint32(28)) << 4).astype(
        np.uint8
    ) | levels
    return table, bits


def _flat(ids: Ids) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    lengths = np.array([len(one) for one in ids], dtype=np.int32)
    return np.concatenate([np.asarray(one, dtype=np.int32) for one in ids]), lengths


class Familiarity:
    """Compares texts with those that a model was trained on."""

    def __init__(self, record: Mapping[str, Any], table: bytes, kind: ProblemType) -> None:
        """``record`` and ``table`` are as `fit` returned them.

        Raises:
            ValueError: they do not belong together.
        """
        bits = int(record["bits"])
        if not 0 < bits <= _MOST_BITS:
            raise ValueError(f"bits {bits}: must be from 1 to {_MOST_BITS}")
        num_tokens, slots = int(record["vocabulary"]), 1 << bits
        if len(table) != num_tokens + slots:
            raise ValueError(f"the table has {len(table)} bytes, {num_tokens + slots} are expected")
        self.limit = float(record["limit"])
        self._kind = kind
        # A server may hold many models, so what depends on a token is kept by its level of rarity:
        # for each token it would take three times as much memory as the table itself.
        self._levels = np.frombuffer(table, np.uint8, num_tokens)
        self._pairs = np.frombuffer(table, np.uint8, offset=num_tokens)
        share = np.exp(-_RARITY)  # of a token among all, (levels,)
        self._usual = _PRIOR * share
        self._log_seen = np.log(int(record["tokens"]) * share + _PRIOR)
        # (mean and spread of the surprise, and of the evidence; 1), for each power
        norms = np.asarray(record["by_length"], dtype=np.float64)[:, :, None]
        self._constant, self._linear, self._square = norms.transpose(1, 0, 2)
        self._strangeness, self._shares = np.asarray(record["quantiles"], dtype=np.float64)

    def of(self, ids: NDArray[np.int32], lengths: NDArray[np.int32], scores: Floats) -> Floats:
        """For each text, the share of held-out texts that are no more familiar, (texts,).

        ``ids``: of all texts, one after another; ``lengths``: of each; ``scores``: calibrated,
        (texts, labels).
        """
        strange = self.strangeness(ids, lengths, scores)
        return np.interp(strange, self._strangeness, self._shares)

    def strangeness(
        self, ids: NDArray[np.int32], lengths: NDArray[np.int32], scores: Floats
    ) -> Floats:
        shortness = 1 / _num_inner(lengths)
        # What is usual at this length.
        usual = self._constant + (self._linear + self._square * shortness) * shortness
        strange = (self.surprise(ids, lengths) - usual[0]) / np.maximum(usual[1], _LEAST_SPREAD)
        if len(usual) == 4:
            evidence = evidence_of(self._kind, scores) - usual[2]
            strange -= evidence / np.maximum(usual[3], _LEAST_SPREAD)
        return strange

    def surprise(self, ids: NDArray[np.int32], lengths: NDArray[np.int32]) -> Floats:
        """Nats per token, (texts,): -log of how often it follows the one before it."""
        # An id of another tokenizer, beyond the vocabulary, counts as the last one.
        ids = np.minimum(ids, len(self._levels) - 1)
        # `clip` looks numbers up faster; a single text waits for some twenty such small steps.
        levels = self._levels.take(ids, mode="clip")
        mixed = _mixed(ids[:-1], ids[1:])
        found = self._pairs.take(mixed & np.uint32(len(self._pairs) - 1))
        # The low four bits say how often, the high four are a part of the pair's own number: of 16
        # unseen pairs that meet a taken place, 15 are told from the one in it.
        times = _TIMES.take(found & 15) * ((found >> 4) == (mixed >> np.uint32(28)))
        # -log of (times + prior x share of the token) / (times of the one before + prior)
        surprise = np.zeros(len(ids))
        surprise[:-1] = np.log(times + self._usual.take(levels[1:], mode="clip"))
        surprise[:-1] -= self._log_seen.take(levels[:-1], mode="clip")
        # Each text's first and last token are special ones, [CLS] and [SEP], so pairs with one of
        # them do not count, nor those of two texts. The token after the first has none before it,
        # and counts by how rare it is. Each text is summed on its own, over as many numbers as it
        # has tokens: so the sum is the same, to the last bit, among whatever other texts.
        ends = lengths.cumsum()
        begins = ends - lengths
        for places in (begins, ends - 2, ends - 1):
            surprise[places] = 0
        inner = np.add.reduceat(surprise, begins)
        first = levels.take(begins + 1, mode="clip")
        alone = _RARITY.take(first, mode="clip")
        return (alone - inner) * (lengths > 2) / _num_inner(lengths)


def _num_inner(lengths: NDArray[np.int32]) -> Floats:
    return np.maximum(1.0, lengths - 2.0)  # tokens but for the two special ones


def evidence_of(kind: ProblemType, scores: Floats) -> Floats:
    """How much the scores speak for any label, (texts,)."""
    if kind is SINGLE_LABEL:
        return np.logaddexp.reduce(scores, axis=1)
    return np.logaddexp(0, scores).sum(axis=1)


def _mixed(before: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.uint32]:
    """A number for a pair of tokens, in 32 bits, as a browser computes it too."""
    return _stirred((before.astype(np.uint32) * _BEFORE) ^ (after.astype(np.uint32) * _AFTER))


def _stirred(mixed: NDArray[np.uint32]) -> NDArray[np.uint32]:
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x2C1B3C6D)
    mixed ^= mixed >> np.uint32(12)
    return mixed
