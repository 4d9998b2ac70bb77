"""Texts as people really type them: shouted, without punctuation, with typing errors, cut short.

Every function is pure: the same text, seed and row give the same rough text on any machine, so a
measurement can be repeated and a run that trains on such texts resumes exactly. ``row`` is the
number of the row, so that equal texts get different typing errors. Where nothing can be changed (a
title without a clause, "???" without its punctuation), the text stays as it is. Of a pair, both
texts are changed.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np

from common.rows import JoinedText
from common.text import Text
from training.data.stored_texts import ChosenTexts

# From a text, a seed and the number of its row to a rough text.
Roughen = Callable[[Text, int, int], Text]

# An initial or an abbreviation at the beginning ("Ky. Company wins ...") ends no sentence.
_FEWEST_WORDS = 3
# The first one that occurs ends the first part. Chinese and Japanese have no space behind it.
_ENDS = (
    re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]"),
    re.compile(r"[,;:](?=\s)|\s[-–—]+(?=\s)|—|[，；：、]"),
)
_WORD_OF_LETTERS = re.compile(r"[^\W\d_]{3,}")
_APOSTROPHES = frozenset("'’ʼ`")
_WORDS_PER_ERROR = 10
_MOST_WORDS = 10
_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_NEIGHBOURS = {
    letter: row[max(0, position - 1) : position] + row[position + 1 : position + 2]
    for row in _KEYBOARD
    for position, letter in enumerate(row)
}


def first_part(text: Text, seed: int, row: int) -> Text:
    """The title if there are several columns; otherwise the first sentence or its first clause."""
    if isinstance(text, tuple):
        return tuple(first_part(part, seed, row) for part in text)
    if isinstance(text, JoinedText) and text.first.strip():
        return text.first
    for end in _ENDS:
        for found in end.finditer(text):
            part = text[: found.start() + 1] if end is _ENDS[0] else text[: found.start()]
            if _has_words(part) and text[found.end() :].strip():
                return part.strip()
    return text


def _has_words(part: str) -> bool:
    # Chinese and Japanese have no spaces between theirs.
    return len(part.split()) >= _FEWEST_WORDS or not part.isascii()


def upper_case(text: Text, seed: int, row: int) -> Text:
    """All letters in upper case."""
    return _each(text, str.upper)


def without_punctuation(text: Text, seed: int, row: int) -> Text:
    """Apostrophes are dropped (dont), all other punctuation becomes a space (well known)."""

    def bare(part: str) -> str:
        kept = (
            "" if one in _APOSTROPHES else " " if unicodedata.category(one)[0] == "P" else one
            for one in part
        )
        return " ".join("".join(kept).split()) or part

    return _each(text, bare)


def with_typing_errors(text: Text, seed: int, row: int) -> Text:
    """One error per ten words: letters swapped, one dropped, doubled, or its neighbour hit."""
    # Seeded by a text's bytes, as in every version of Python since 3.2.
    draw = random.Random(f"{seed} {row}")

    def mistyped(part: str) -> str:
        words = list(_WORD_OF_LETTERS.finditer(part))
        count = min(len(words), max(1, round(len(part.split()) / _WORDS_PER_ERROR)))
        # From the last to the first, so that the places of those before it stay right.
        for word in sorted(draw.sample(words, count), key=lambda word: -word.start()):
            part = part[: word.start()] + _mistype(word[0], draw) + part[word.end() :]
        return part

    return _each(text, mistyped)


def first_words(text: Text, seed: int, row: int) -> Text:
    """The first ten words."""
    return _each(text, lambda part: " ".join(part.split()[:_MOST_WORDS]))


# What --robustness measures, by the name that people see.
KINDS: dict[str, Roughen] = {
    "title or first clause alone": first_part,
    "upper case": upper_case,
    "no punctuation": without_punctuation,
    "one typing error in ten words": with_typing_errors,
    "first ten words": first_words,
}


# What a training text is changed by, one after the other: how it is cut, then what else happens to
# it, each with its probability. Half of the texts are as short as a headline.
_CUTS = ((0.5, first_part), (0.15, first_words))
_MORE = ((0.25, with_typing_errors), (0.2, without_punctuation), (0.15, upper_case))


def rough_version(text: Text, seed: int, row: int) -> Text:
    """A training text as somebody might type it: mostly cut short, some with other changes too."""
    draw = random.Random(f"rough {seed} {row}")
    # One draw decides between the cuts, so a text gets one of them at most.
    position, rough = draw.random(), text
    for probability, cut in _CUTS:
        if 0 <= position < probability:
            rough = cut(text, seed, row)
        position -= probability
    for probability, change in _MORE:
        if draw.random() < probability:
            rough = change(rough, seed, row)
    return rough if rough != text else with_typing_errors(text, seed, row)


def rough_texts(
    texts: Sequence[Text], rows: np.ndarray, seed: int, clean: Callable[[str], str]
) -> ChosenTexts:
    """Rough versions of the rows with these numbers, made when they are asked for."""
    # Cleaned first: a character reference without its punctuation could no longer be decoded.
    return ChosenTexts(
        texts, rows, lambda text, row: rough_version(cleaned(text, clean), seed, row)
    )


def cleaned(text: Text, clean: Callable[[str], str]) -> Text:
    """The text, cleaned, which still knows where its first cell ends."""
    if isinstance(text, tuple):
        return tuple(cleaned(part, clean) for part in text)
    if isinstance(text, JoinedText):
        return JoinedText.of([clean(text.first), clean(text.rest)])
    return clean(text)


def _each(text: Text, change: Callable[[str], str]) -> Text:
    return change(text) if isinstance(text, str) else tuple(change(part) for part in text)


def _mistype(word: str, draw: random.Random) -> str:
    position = draw.randrange(len(word) - 1)
    before, one, other, after = (
        word[:position],
        word[position],
        word[position + 1],
        word[position + 2 :],
    )
    changes = [
        before + other + one + after,
        before + other + after,
        before + one + one + other + after,
    ]
    changes += [before + neighbour + other + after for neighbour in _NEIGHBOURS.get(one, "")[:1]]
    # Two equal letters that are swapped are no error.
    return draw.choice([changed for changed in changes if changed != word])
