"""The tokenizer of the page against the one of the server, in Node."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from common.text import CLEANINGS, TextTokenizer, cleaner
from inference.exporting.browser import tokenizer_settings
from tests.inference.web import unicode_tables
from tests.processes import REPOSITORY

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="Node runs the page's tokenizer, and is not installed")
WORDPIECE = REPOSITORY / "inference" / "web" / "wordpiece.js"
AG_NEWS = REPOSITORY / "data" / "ag_news" / "test.csv"
SAMPLE = REPOSITORY / "common" / "sample_news"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_TOKENS = 48
# What cleaning and tokenising treat in a way of their own, to be mixed at random.
FRAGMENTS = (
    *("&amp;", "&amp;amp;lt;b&gt;", " #39;s", "  #39;s", " amp;", " quot;", "&#8217;", "&#x2014;", "&#128;", "&#0;"),
    *("&#55296;", "&#1114112;", "&#11;", "&#1;", "&#٣٤;", " #٣٤٥;", "&#1٣;", "&nosuch;", "&NotEqualTilde;", "&hearts;"),
    *("<b>", "</p >", "<a href='x'>", "<br/>", "<MSFT.O>", "<İmg src=1>", "<lıſt>", "<\u212aBD>", "3 < 5", "\\", "\\$"),
    *("\x00", "\x1c", "\x85", "\xa0", "\xad", "\u200b", "\u2028", "\u3000", "\ufeff", "\ufffd", "\ud800", "\udc00"),
    *("É", "e\u0301", "İ", "ΣΑΣ", "Σ", "ß", "ǅ", "ﬁ", "Å", "\u0344", "가", "각", "中文", "𠀀", "ｱ", "🙂", "👨‍👩‍👧"),
    *(
        "[SEP]",
        "[CLS",
        "[UNK]x",
        "[MASK][MASK]",
        "##s",
        "don't",
        "U.S.",
        "1,000.5%",
        "_",
        "…",
        "—",
        "¿",
        "٣",
        "x" * 101,
    ),
    *("a" * 99 + "é", "the", "oil", "prices", "  ", "\n", "\t", "A", "z"),
)


@cache
def rows() -> list[str]:
    if not AG_NEWS.exists():
        pytest.skip("the test rows of AG News are not in data/ag_news/test.csv")
    with AG_NEWS.open(newline="") as file:
        return [" ".join(row[1:]) for row in csv.reader(file)]


def hostile_texts(count: int) -> list[str]:
    draw = random.Random(0)
    codes = [*range(0x20, 0x250), *range(0x300, 0x600), *range(0x1E00, 0x2C00), *range(0xFB00, 0xFFFF), 0x1F468]
    texts = []
    for _ in range(count):
        parts = [draw.choice(FRAGMENTS) if draw.random() < 0.7 else chr(draw.choice(codes)) for _ in range(8)]
        texts.append(draw.choice(("", " ")).join(parts))
    return [*FRAGMENTS, *texts]


def bert_tokenizer(texts: Sequence[str], **options: bool | None) -> Tokenizer:
    """BERT's, with the most frequent words and all letters of some texts."""
    defaults = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    normalizer = normalizers.BertNormalizer(**defaults | options)
    words = Counter(word for text in texts for word in re.findall(r"\w+|\S", normalizer.normalize_str(text)))
    letters = sorted({letter for word in words for letter in word})
    parts = [word[:3] for word, _ in words.most_common(3000)] + [
        f"##{word[-2:]}" for word, _ in words.most_common(3000)
    ]
    pieces = [
        *SPECIAL,
        *letters,
        *(f"##{letter}" for letter in letters),
        *(w for w, _ in words.most_common(3000)),
        *parts,
    ]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    return tokenizer


def in_node(settings: dict[str, Any], texts: Sequence[str]) -> list[tuple[str, list[int], int, bool]]:
    # As ASCII, in which JSON writes half characters too.
    question = json.dumps({"settings": settings, "texts": texts})
    command = ["node", "--no-warnings", Path(__file__).with_name("run_wordpiece.mjs")]
    done = subprocess.run(command, input=question.encode(), capture_output=True, check=True)
    return [tuple(answer) for answer in json.loads(done.stdout)]


def assert_equal_tokens(tokenizer: Tokenizer, cleaning: str, texts: Sequence[str]) -> None:
    served = TextTokenizer(tokenizer, MAX_TOKENS, cleaning)
    settings = tokenizer_settings(Path("tokenizer.json"), json.loads(tokenizer.to_str()), served, cleaning)
    cleaned = [served.clean(text) for text in texts]
    expected = [
        (clean, one.ids, one.num_tokens, one.truncated)
        for clean, one in zip(cleaned, served.encode_cleaned(cleaned), strict=True)
    ]
    for text, found, wanted in zip(texts, in_node(settings, texts), expected, strict=True):
        assert found == wanted, repr(text)


@pytest.mark.parametrize("cleaning", CLEANINGS)
def test_all_test_rows_of_ag_news_get_the_tokens_of_the_server(cleaning: str) -> None:
    assert len(rows()) == 7600
    assert_equal_tokens(bert_tokenizer(rows()), cleaning, rows())


@pytest.mark.parametrize("cleaning", CLEANINGS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lowercase": False},
        pytest.param({"lowercase": False, "strip_accents": True}, marks=pytest.mark.slow),
        {"strip_accents": False},
        {"clean_text": False, "handle_chinese_chars": False},
    ],
    ids=["uncased", "cased", "cased without accents", "with accents", "as it is"],
)
def test_hostile_texts_get_the_tokens_of_the_server(cleaning: str, options: dict[str, bool]) -> None:
    texts = hostile_texts(3000)
    whole = [cleaner("none")(text) for text in texts]  # no half characters
    assert_equal_tokens(bert_tokenizer(whole, **options), cleaning, texts)


def test_icons_that_fonts_keep_in_private_planes_are_dropped_as_the_server_does() -> None:
    texts = ["Shares of Apple\U000f8fff rise", "\U000f0493oil\U000f0493prices", "\U00100000oil\U0010fffd"]
    assert_equal_tokens(bert_tokenizer(["shares of apple rise oil prices"]), "news", texts)


def test_a_vocabulary_of_many_languages_is_read() -> None:
    tokenizer = bert_tokenizer(["oil", *(f"word{number}" for number in range(200_000))])
    tokenizer.model = models.WordPiece(
        {piece: i for i, piece in enumerate([*SPECIAL, *"oil", "oil", *(f"w{n}" for n in range(200_000))])},
        unk_token="[UNK]",
    )
    assert_equal_tokens(tokenizer, "none", ["oil w199999"])


@pytest.mark.slow
def test_every_character_gets_the_tokens_of_the_server() -> None:
    characters = [chr(code) for code in unicode_tables.CODES]
    # A word beside each: characters that are dropped join it, those that split stand alone, unknown ones are [UNK].
    vocabulary = dict.fromkeys([*SPECIAL, "ab", "a", "b", "##b", "##a", *characters[:0x3000]])
    tokenizer = bert_tokenizer([" ".join(vocabulary)])
    assert_equal_tokens(tokenizer, "none", [f"a{character}b" for character in characters])


def test_the_tables_of_characters_are_those_of_the_tokenizers_library() -> None:
    code = re.sub(r'" \+\s+"', "", WORDPIECE.read_text())
    written = dict(re.findall(r'^const (CONTROL|ACCENT|PUNCTUATION) = codesOf\(\s+"(.*)",$', code, re.MULTILINE))
    assert written == unicode_tables.tables()
