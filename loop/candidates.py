"""Which of the kept texts are worth a label.

Most are those that the model is least sure of: least confidence is the cheapest rule that is
hard to beat with transformers (https://arxiv.org/abs/2107.05687). A tenth each are texts about which
somebody disagrees with the model, texts that a candidate in shadow answered otherwise, texts unlike
those it knows, and texts that were drawn uniformly.
Only the last say how often the model is right, so they are asked for that reason and no other.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.text import folded
from inference.observing.feedback import REVIEW
from inference.observing.store import Feedback, KeptText, ShadowAnswer

UNIFORM, DISAGREEING, SHADOW = "uniform", "disagreeing", "shadow"
UNFAMILIAR, UNCERTAIN = "unfamiliar", "uncertain"
REASONS = (UNIFORM, DISAGREEING, SHADOW, UNFAMILIAR, UNCERTAIN)
_SHARE = 0.1  # of each reason but the last
_HASHED_WORDS = 256
# Texts among which unlike ones are looked for, per text that is wanted, and reviewed texts that
# they must be unlike.
_POOL = 10
_MOST_CENTRES = 1_000


@dataclass(frozen=True, slots=True)
class Item:
    """A text to review; ``request``: id of the kept text; ``answered``: the model's label."""

    text: str
    request: str
    revision: str
    answered: str
    caller: str
    why: str


def choose(
    kept: Sequence[KeptText],
    statements: Sequence[Feedback],
    count: int,
    second: Sequence[KeptText] = (),
    shadows: Sequence[ShadowAnswer] = (),
) -> list[Item]:
    """At most ``count`` texts, none twice and none that was reviewed, in random order.

    Args:
        kept: the texts of a model, the newest first.
        statements: corrections and reviews of it, the oldest first.
        second: the texts of another model that was asked the same.
        shadows: what candidates in shadow answered, the newest first.
    """
    reviewed = [one.text for one in statements if one.kind == REVIEW]
    left = _distinct(kept, reviewed)
    # In an order that has nothing to do with the answers.
    drawn = sorted((one for one in left if one.why == UNIFORM), key=lambda one: _hash(one.request))
    others = [one for one in left if one.why != UNIFORM]
    share = round(_SHARE * count)
    chosen = drawn[:share]
    for reason, found in (
        (DISAGREEING, _disagreeing(others, kept, statements, second, reviewed)),
        (SHADOW, _in_shadow(others, kept, shadows)),
        (UNFAMILIAR, _unfamiliar(others, kept, reviewed, share)),
        (UNCERTAIN, others),
    ):
        taken = {folded(one.text) for one in chosen}
        new = [one for one in found if folded(one.text) not in taken]
        most = count - len(chosen) if reason == UNCERTAIN else share
        chosen += [_because(one, reason) for one in new[:most]]
    chosen += drawn[share : share + count - len(chosen)]
    random.Random(len(statements)).shuffle(chosen)
    return chosen


def _because(one: Item, why: str) -> Item:
    return Item(one.text, one.request, one.revision, one.answered, one.caller, why)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _distinct(kept: Sequence[KeptText], reviewed: Iterable[str]) -> list[Item]:
    """Each text once, as drawn uniformly if any of its copies was, the least sure first."""
    known = {folded(text) for text in reviewed}
    found: dict[str, KeptText] = {}
    for one in sorted(kept, key=lambda one: -one.uniform):
        if (key := folded(one.text)) not in known:
            found.setdefault(key, one)
    ranking = sorted(found.values(), key=lambda one: one.confidence)
    return [
        Item(
            *(one.text, one.id, one.revision, one.label, one.caller),
            UNIFORM if one.uniform else UNCERTAIN,
        )
        for one in ranking
    ]


def _disagreeing(
    others: Sequence[Item],
    kept: Sequence[KeptText],
    statements: Sequence[Feedback],
    second: Sequence[KeptText],
    reviewed: Iterable[str],
) -> list[Item]:
    """Texts that got different labels: from users, from the second model or another revision."""
    known = {folded(text) for text in reviewed}
    # A text that was drawn uniformly is not reviewed for another reason, whatever is said of it.
    known |= {folded(one.text) for one in kept if one.uniform}
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for one in (*kept, *second):
        labels[folded(one.text)].add(one.label)
    for one in statements:
        labels[folded(one.text)] |= {one.label, one.answered} - {""}
    corrected = [
        Item(one.text, one.request, one.revision, one.answered, one.caller, DISAGREEING)
        for one in reversed(statements)
    ]
    found: dict[str, Item] = {}
    for one in (*others, *corrected):
        key = folded(one.text)
        if len(labels[key]) > 1 and key not in known:
            found.setdefault(key, one)
    return list(found.values())


def _in_shadow(
    others: Sequence[Item], kept: Sequence[KeptText], shadows: Sequence[ShadowAnswer]
) -> list[Item]:
    """Texts that the newest candidate answered otherwise. Those come first on which both models are
    sure: one of the two is wrong and does not know it.
    """
    newest = shadows[0].revision if shadows else ""
    confidence = {one.id: one.confidence for one in kept}
    # A text is compared once per request that brought it; the newest time counts.
    answers = {folded(one.text): one for one in reversed(shadows) if one.revision == newest}
    found = [
        (min(answer.confidence, confidence[one.request]), one)
        for one in others
        if (answer := answers.get(folded(one.text))) and answer.label != one.answered
    ]
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])]


def _unfamiliar(
    others: Sequence[Item], kept: Sequence[KeptText], reviewed: Sequence[str], count: int
) -> list[Item]:
    """Of the least familiar texts those that are least alike, and least like what was reviewed:
    greedy k-centre on counts of hashed words.
    """
    familiarity = {one.id: one.familiarity for one in kept if one.familiarity is not None}
    ranking = sorted(
        (one for one in others if one.request in familiarity),
        key=lambda one: familiarity[one.request],
    )
    pool = ranking[: _POOL * count]
    if not pool:
        return []
    vectors = hashed_words([one.text for one in pool])
    centres = hashed_words(reviewed[-_MOST_CENTRES:])
    nearest = (vectors @ centres.T).max(axis=1, initial=-1.0)
    found: list[Item] = []
    for _ in range(min(count, len(pool))):
        farthest = int(nearest.argmin())
        found.append(pool[farthest])
        nearest = np.maximum(nearest, vectors @ vectors[farthest])
        nearest[farthest] = np.inf
    return found


def hashed_words(texts: Sequence[str]) -> NDArray[np.float32]:
    """(texts, 256), of length 1: their product is 1 for texts with the same words."""
    counts = np.zeros((len(texts), _HASHED_WORDS), np.float32)
    for row, text in zip(counts, texts, strict=True):
        for word in folded(text).split():
            row[zlib.crc32(word.encode("utf-8", "replace")) % _HASHED_WORDS] += 1
    return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)
