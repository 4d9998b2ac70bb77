"""Text in, token ids out: how texts are cleaned, and the tokenizer of training and serving."""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html.entities import html5
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding, Tokenizer

from common.windows import Windows

if TYPE_CHECKING:
    import torch

# Raise it whenever a text may come to other tokens than before: cached tokens are then made again,
# and a run that began with the old ones is not resumed with the new.
VERSION = 3

# AG News lost the ampersand of its references: one space stands in its place ("Israel #39;s", "AT
# amp;T", "about  #36;5"). Only references that are no English word are taken for one without their
# ampersand.
_BARE = (
    r"#(?:3[46-9]|6[02]|0?\d{3,4}|64\d{3}|x[0-9a-fA-F]{2,4})"
    r"|quot|amp|lt|gt|nbsp|apos|hellip|[lr][sd]quo|[mn]dash"
    r"|[A-Za-z](?:acute|grave|uml|tilde|cedil|circ|ring)"
)
_REFERENCE = re.compile(
    rf"(?:&|(?:^|\s)(?=(?:{_BARE});))"
    r"(?:(?:amp|#0?38);)*+"  # escaped twice or more: "amp;amp;quot;"
    r"(?:(#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});)?"
)
# Two spaces before a possessive ("Sudan  #39;s") are a slip of the feed, not an opening quote ("
# #39;big").
_LOOSE_POSSESSIVE = re.compile(r"(?<=\w)\s\s(?=#39;s\b)")

_TAG = re.compile(
    r"</?(?:a|abbr|b|big|blockquote|body|br|center|cite|code|del|div|em|font|h[1-6]|head|hr|html"
    r"|i|iframe|img|input|ins|li|link|meta|nobr|ol|p|pre|q|s|script|small|span|strike|strong|style"
    r"|sub|sup|table|tbody|td|th|title|tr|tt|u|ul|wbr)(?=[\s/>])([^<>]*+)>",
    re.IGNORECASE,
)
# Control characters, lone surrogates, marks without width or for direction, code points with no
# character.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069"
    r"\ud800-\udfff\ufdd0-\ufdef\ufeff\ufffe\uffff]"
)
# White space, and all that is drawn without a mark of its own: joiners, fillers, selectors, marks
# for direction.
_INVISIBLE = re.compile(
    r"[\s\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    r"\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]*+"
)
_LONE_SURROGATES = re.compile(r"[\ud800-\udfff]")
_MAX_ROUNDS = 4
# Words that are remembered take about twenty times as many bytes.
_MOST_REMEMBERED_CHARS = 1_000_000

# A text, or a pair of texts that a model reads together.
Text = str | tuple[str, str]
# The key of config.json of a model that reads pairs: the id of the token between their texts.
PAIR_KEY = "text_pair_separator"

# What a model's texts go through before they are tokenised: chosen in training, kept in the model
# folder.
CLEANINGS = ("news", "none")
MOST_SPARE_ROWS = 256  # of small embeddings; of large ones up to half may be spare


def clean_text(text: str) -> str:
    r"""Turn raw news text into plain prose on one line.

    Backslashes (AG News' line breaks) become spaces, character references are restored and decoded
    even where their ampersand is lost or they are escaped twice, HTML tags are dropped, control
    characters and lone surrogates too, white space is collapsed. Prose such as ``3 < 5`` or
    ``<MSFT.O>`` stays.

    Any string is accepted, the time is linear in its length, and cleaning a cleaned text changes
    nothing.

    Returns:
        The cleaned text; empty if nothing readable is left.
    """
    for _ in range(_MAX_ROUNDS):
        cleaned = _clean_once(text)
        if cleaned == text:
            return cleaned
        text = cleaned
    # Escaped deeper than any feed does it: without these two signs another round finds nothing to
    # decode.
    return _clean_once(text.replace(";", " ").replace("<", " "))


def _clean_once(text: str) -> str:
    # Most texts have none of these characters, and looking for one is much faster than a pattern
    # that finds nothing.
    if "\\" in text:
        text = text.replace("\\$", "$").replace("\\", " ")
    if ";" in text:
        text = _LOOSE_POSSESSIVE.sub(" ", text)
        text = _REFERENCE.sub(_decode_reference, text)
    if "<" in text:
        text = _TAG.sub(_drop_tag, text)
    text = _UNPRINTABLE.sub("", text)
    return "" if _INVISIBLE.fullmatch(text) else " ".join(text.split())


def _clean_traced(text: str) -> tuple[str, list[int]]:
    """`clean_text`, and where each character that is left came from; several times slower."""
    offsets = list(range(len(text)))
    for _ in range(_MAX_ROUNDS):
        cleaned, offsets = _clean_once_traced(text, offsets)
        if cleaned == text:
            return cleaned, offsets
        text = cleaned
    return _clean_once_traced(text.replace(";", " ").replace("<", " "), offsets)


def _clean_once_traced(text: str, offsets: list[int]) -> tuple[str, list[int]]:
    """The steps of `_clean_once`, one substitution after the other."""
    for pattern, replacement in _STEPS:
        parts, kept, end = [], [], 0
        for match in pattern.finditer(text):
            new = replacement if isinstance(replacement, str) else replacement(match)
            parts += [text[end : match.start()], new]
            kept += offsets[end : match.start()] + offsets[match.start() : match.start() + 1] * len(
                new
            )
            end = match.end()
        text, offsets = "".join([*parts, text[end:]]), kept + offsets[end:]
    if _INVISIBLE.fullmatch(text):
        return "", []
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    return text[first:last], offsets[first:last]


def _decode_reference(match: re.Match[str]) -> str:
    name = match[1]
    if name is None:
        return "&"
    if name.startswith("#"):
        return html.unescape(f"&{name};")
    return html5.get(f"{name};", f"&{name};")


def _drop_tag(match: re.Match[str]) -> str:
    # "if a <b and c> d" is prose: a tag carries attributes ("href=...") or nothing.
    attributes = match[1]
    return " " if "=" in attributes or not attributes.strip(" /") else match[0]


_STEPS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\\$"), "$"),
    (re.compile(r"\\"), " "),
    (_LOOSE_POSSESSIVE, " "),
    (_REFERENCE, _decode_reference),
    (_TAG, _drop_tag),
    (_UNPRINTABLE, ""),
    (re.compile(r"\s+"), " "),
)


def _as_it_is(text: str) -> str:
    # Half a character ("\\ud83d" in JSON) is all that no tokenizer takes.
    return "" if _INVISIBLE.fullmatch(text) else _LONE_SURROGATES.sub("\ufffd", text)


def texts_in(text: Text) -> tuple[str, ...]:
    """The text alone, or both texts of a pair."""
    return (text,) if isinstance(text, str) else text


def folded(text: Text) -> Text:
    """What all texts have in common that count as equal: they differ only in case and white space."""
    if isinstance(text, str):
        return " ".join(text.casefold().split())
    first, second = text
    return " ".join(first.casefold().split()), " ".join(second.casefold().split())


def in_one_line(text: Text) -> str:
    """A text as people are shown it; of a pair both, one after the other."""
    return " | ".join(texts_in(text))


def num_chars(text: Text) -> int:
    return sum(map(len, texts_in(text)))


def type_separator(config: Mapping[str, Any]) -> int | None:
    """The id behind which a pair's tokens have type 1; None for single texts or without types."""
    return config.get(PAIR_KEY) if config.get("type_vocab_size", 1) > 1 else None


def segments_of(input_ids: torch.Tensor, separator: int) -> torch.Tensor:
    """Which text of a pair each token belongs to, 0 or 1, int64 (texts, tokens).

    The ids tell: the second text begins behind the first separator. What they say of padding does
    not matter.
    """
    is_separator = (input_ids == separator).long()
    return (is_separator.cumsum(dim=1) - is_separator).clamp(max=1)


def counted(number: int, noun: str) -> str:
    """Such as "1 row" and "2,000 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def vocabulary_misfit(highest_id: int, num_embeddings: int) -> str:
    """Why a tokenizer with ids up to ``highest_id`` is not that of a model; empty if it may be.

    Embeddings may have rows to spare: they are padded to a multiple of 64 or 128, or kept for
    tokens to come.
    """
    num_ids = highest_id + 1
    if num_ids > num_embeddings:
        return f"the tokenizer has {num_ids} token ids, the model only {num_embeddings}"
    if 2 * num_ids < num_embeddings and num_embeddings - num_ids > MOST_SPARE_ROWS:
        return f"the tokenizer has only {num_ids} token ids, the model {num_embeddings}"
    return ""


def cleaner(cleaning: str) -> Callable[[str], str]:
    """What texts go through for one of `CLEANINGS`; empty if there is nothing to read."""
    return clean_text if cleaning == "news" else _as_it_is


@dataclass(frozen=True, slots=True)
class Encoded:
    """One text as token ids.

    Attributes:
        ids: Token ids with special tokens, at most ``max_length`` of them, never padded; of a text
            in windows those of all windows, one after the other.
        num_tokens: How many ids the whole text has before cutting, special tokens included.
        truncated: Whether the text was cut.
        passages: Where each window begins and ends in the cleaned text, in characters; empty if
            there is only one.
        blank: Which text has nothing to classify, because the tokenizer leaves no token of it or
            only special ones: 0, of a pair 0, 1 or both.
    """

    ids: list[int]
    num_tokens: int
    truncated: bool
    passages: tuple[tuple[int, int], ...] = ()
    blank: tuple[int, ...] = ()


class TextTokenizer:
    """Cleans and tokenises texts; may be shared by threads.

    Without ``windows``, long texts are cut, and of a pair always the longer one. ``reads_pairs``
    only tells users of the tokenizer whether its model expects pairs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        cleaning: str = "news",
        windows: Windows | None = None,
        *,
        reads_pairs: bool = False,
    ) -> None:
        if max_length < 3:
            raise ValueError(
                f"max_length {max_length}: must be at least 3 (two special tokens and one word)"
            )
        self.max_length = max_length
        self.windows = windows
        self.reads_pairs = reads_pairs
        self.clean = cleaner(cleaning)
        self._tokenizer = tokenizer
        # A saved tokenizer.json may contain settings for truncation and padding. Only the side is
        # the model's.
        side = (tokenizer.truncation or {}).get("direction", "right")
        self._tokenizer.enable_truncation(
            max_length, stride=windows.overlap if windows else 0, direction=side
        )
        self._tokenizer.no_padding()
        # An unknown word is a word, although its token is a special one.
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._special = frozenset(
            index
            for index, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content != unknown and "unk" not in token.content.lower()
        )

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        max_length: int,
        cleaning: str = "news",
        windows: Windows | None = None,
    ) -> TextTokenizer:
        """Read a ``tokenizer.json``; ``cleaning`` is one of `CLEANINGS`.

        Raises:
            OSError: The file cannot be read.
            ValueError: It holds no tokenizer, or ``max_length`` is below 3.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"), max_length, cleaning, windows)

    @classmethod
    def from_json(
        cls,
        text: str,
        max_length: int,
        cleaning: str = "news",
        windows: Windows | None = None,
        *,
        reads_pairs: bool = False,
    ) -> TextTokenizer:
        """Build the tokenizer from the contents of a ``tokenizer.json``; else as `from_file`."""
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the Rust side raises bare Exception
            raise ValueError(f"not a tokenizer.json: {error}") from error
        return cls(tokenizer, max_length, cleaning, windows, reads_pairs=reads_pairs)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two tokenizers that make the same ids of every text."""
        digest = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        return digest, self.max_length, self.clean, self.windows, self.reads_pairs

    @property
    def most_ids(self) -> int:
        """The most token ids that a text becomes."""
        return self.windows.most_ids if self.windows else self.max_length

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def highest_id(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def many(self) -> ManyTexts:
        """What tokenises a long series of texts fast; for one thread."""
        return ManyTexts(self, self._tokenizer)

    def encode(self, texts: Sequence[Text]) -> list[Encoded]:
        return self.encode_cleaned([self.clean_all(text) for text in texts])

    def clean_all(self, text: Text) -> Text:
        """Clean a text, or both texts of a pair."""
        if isinstance(text, str):
            return self.clean(text)
        return self.clean(text[0]), self.clean(text[1])

    def examples(self, texts: Sequence[str]) -> list[Text]:
        """The texts as the model reads them: one by one, or each with the one after it."""
        if not self.reads_pairs:
            return list(texts)
        return list(zip(texts, [*texts[1:], texts[0]], strict=True))

    def locate(self, text: str, passages: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where passages of the cleaned text are in the text itself."""
        if self.clean is not clean_text:
            return list(passages)
        cleaned, offsets = _clean_traced(text)
        # Up to the character that follows, without the white space between.
        offsets.append(len(text))
        return [
            (offsets[start], len(text[: offsets[min(end, len(cleaned))]].rstrip()))
            for start, end in passages
        ]

    def encode_cleaned(self, texts: Sequence[Text]) -> list[Encoded]:
        """Tokenise texts that `clean` gave; else as `encode`."""
        if self.windows:
            encodings = self._tokenizer.encode_batch(texts)
            found = [_in_windows(encoding, self.windows) for encoding in encodings]
        else:
            # "Fast" leaves out the places in the text, which nobody asks for.
            encodings = self._tokenizer.encode_batch_fast(texts)
            found = [
                _encoded(one)
                if isinstance(text, str) or not one.overflowing
                else self._cut_pair(one, text)
                for one, text in zip(encodings, texts, strict=True)
            ]
        blank = [self._blank_texts(*one) for one in zip(encodings, texts, strict=True)]
        return [
            replace(one, blank=which) if which else one
            for one, which in zip(found, blank, strict=True)
        ]

    def is_blank(self, ids: Iterable[int]) -> bool:
        """Whether ids have nothing to classify: there are none, or only special ones."""
        return self._special.issuperset(ids)

    def _blank_texts(self, encoding: Encoding, text: Text) -> tuple[int, ...]:
        if isinstance(text, str):
            return (0,) if self.is_blank(encoding.ids) else ()
        # Ids of special tokens belong to neither text, so their place is None.
        offsets = list(zip(encoding.sequence_ids, encoding.ids, strict=True))
        return tuple(
            which
            for which in (0, 1)
            if self.is_blank(id_ for offset, id_ in offsets if offset == which)
        )

    def _cut_pair(self, encoding: Encoding, pair: tuple[str, str]) -> Encoded:
        # What was cut off comes in all combinations of the two texts, so each is counted alone.
        alone = sum(_encoded(one).num_tokens for one in self._tokenizer.encode_batch_fast(pair))
        special = [self._tokenizer.num_special_tokens_to_add(is_pair) for is_pair in (False, True)]
        return Encoded(
            ids=encoding.ids, num_tokens=alone - 2 * special[0] + special[1], truncated=True
        )


def _encoded(encoding: Encoding) -> Encoded:
    rest = encoding.overflowing
    # Every cut-off part repeats the special tokens: count only its words.
    num_cut = sum(part.special_tokens_mask.count(0) for part in rest)
    return Encoded(ids=encoding.ids, num_tokens=len(encoding.ids) + num_cut, truncated=bool(rest))


def _in_windows(encoding: Encoding, windows: Windows) -> Encoded:
    parts = [encoding, *encoding.overflowing]
    if len(parts) == 1:
        return Encoded(encoding.ids, len(encoding.ids), truncated=False)
    kept = parts[: windows.most]
    return Encoded(
        ids=[id_ for part in kept for id_ in part.ids],
        # Every further window repeats the special tokens and the overlap.
        num_tokens=len(encoding.ids)
        + sum(part.special_tokens_mask.count(0) - windows.overlap for part in encoding.overflowing),
        truncated=len(parts) > windows.most,
        passages=tuple(_passage(part) for part in kept),
    )


def _passage(part: Encoding) -> tuple[int, int]:
    words = [
        offset
        for offset, special in zip(part.offsets, part.special_tokens_mask, strict=True)
        if not special
    ]
    return words[0][0], words[-1][1]


class ManyTexts:
    """Token ids of a long series of cleaned texts, as `TextTokenizer.encode_cleaned` gives them,
    but faster.

    BERT's tokenizers treat what stands between two spaces apart from the rest, and most words of a
    series have come before. So each is tokenised once and remembered. Other tokenizers look across
    spaces, and of pairs it depends on both texts what is cut: theirs is the usual way.
    """

    def __init__(self, texts: TextTokenizer, tokenizer: Tokenizer) -> None:
        self._texts, self._tokenizer = texts, tokenizer
        self._words: dict[str, list[int]] = {}
        self._num_chars = 0
        self.num_cut = 0  # texts so far
        # The positions of those of the last call that were cut, and that have nothing to classify.
        self.cut: list[int] = []
        self.blank: list[int] = []
        self._frame = _frame_of(tokenizer)

    def token_ids(self, texts: Sequence[Text]) -> list[list[int]]:
        if self._frame is None or (texts and not isinstance(texts[0], str)):
            return self._in_the_usual_way(texts)
        split = [text.split(" ") for text in texts]
        self._remember(set().union(*split))
        framed = [self._framed(words) for words in split]
        self._note_cut(is_cut for _, is_cut in framed)
        found = [ids for ids, _ in framed]
        self.blank = [i for i, ids in enumerate(found) if self._texts.is_blank(ids)]
        return found

    def _in_the_usual_way(self, texts: Sequence[Text]) -> list[list[int]]:
        encoded = self._texts.encode_cleaned(texts)
        self._note_cut(one.truncated for one in encoded)
        self.blank = [i for i, one in enumerate(encoded) if one.blank]
        return [one.ids for one in encoded]

    def _note_cut(self, is_cut: Iterable[bool]) -> None:
        self.cut = [i for i, one in enumerate(is_cut) if one]
        self.num_cut += len(self.cut)

    def _remember(self, words: set[str]) -> None:
        # Typing errors and numbers never come to an end, so all is forgotten from time to time. It
        # takes one call to learn the common words again.
        if self._num_chars > _MOST_REMEMBERED_CHARS:
            self._words, self._num_chars = {}, 0
        new = list(words - self._words.keys())
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._words.update(zip(new, (one.ids for one in encodings), strict=True))
        self._num_chars += sum(map(len, new))

    def _framed(self, words: list[str]) -> tuple[list[int], bool]:
        """A text's ids, cut at the limit, between the special tokens, of windows all of them; and
        whether it was cut.
        """
        assert self._frame is not None
        begin, end = self._frame
        ids: list[int] = []
        for word in words:
            ids += self._words[word]  # a comprehension would go through all ids in Python
        room, windows = self._texts.max_length - len(begin) - len(end), self._texts.windows
        if windows is None or len(ids) <= room:
            return [*begin, *ids[:room], *end], len(ids) > room
        # Each window repeats `overlap` tokens of the one before it. None begins within the last of
        # these tokens, because it would repeat them and have nothing new.
        starts = range(0, len(ids) - windows.overlap, room - windows.overlap)
        found = [
            id_
            for start in starts[: windows.most]
            for id_ in (*begin, *ids[start : start + room], *end)
        ]
        return found, len(starts) > windows.most


# What a tokenizer is made of that treats each word apart, by the parts of tokenizer.json.
_BERT = {
    "normalizer": ("BertNormalizer",),
    "pre_tokenizer": ("BertPreTokenizer",),
    "model": ("WordPiece",),
    "post_processor": ("TemplateProcessing", "BertProcessing"),
}


def _frame_of(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens before and after every text; None if words cannot be tokenised apart."""
    parts = json.loads(tokenizer.to_str())
    cuts_the_end = (parts["truncation"] or {}).get("direction") == "Right"
    if not cuts_the_end or not _reads_words_apart(parts):
        return None
    word = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    starts = [i for i in range(len(whole)) if whole[i : i + len(word)] == word]
    if not word or len(starts) != 1:
        return None
    return whole[: starts[0]], whole[starts[0] + len(word) :]


def _reads_words_apart(parts: dict[str, Any]) -> bool:
    if any((parts[name] or {}).get("type") not in kinds for name, kinds in _BERT.items()):
        return False
    # Added tokens are looked for before a text is split, so one of them may reach across a space.
    return not any(
        " " in token["content"] or token["normalized"] for token in parts["added_tokens"]
    )
