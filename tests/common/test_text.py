from __future__ import annotations

import csv
import hashlib
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from common.rows import SAMPLE_NEWS
from common.text import CLEANINGS, VERSION, TextTokenizer, clean_text, cleaner, counted

# Left as AG News has it, right as the news agency wrote it.
AG_NEWS = [
    (
        "Syria dismisses Israel #39;s conditional talks offer",
        "Syria dismisses Israel's conditional talks offer",
    ),
    ("crisis in Sudan  #39;s Darfur region", "crisis in Sudan's Darfur region"),
    ("Expos #39; new home", "Expos' new home"),
    ("Shaquille O #39;Neal", "Shaquille O'Neal"),
    ("China  #39;regrets #39; submarine #39;s trip", "China 'regrets' submarine's trip"),
    ("If you can #39;t beat  #39;em, join  #39;em", "If you can't beat 'em, join 'em"),
    ("#39;Human error #39; crashed DWP", "'Human error' crashed DWP"),
    (
        "Sharon under  quot;certain conditions quot; as falling short",
        'Sharon under "certain conditions" as falling short',
    ),
    ("quot;Hang on, quot; he said", '"Hang on," he said'),
    ("AT amp;T Wireless, Barnes  amp; Noble", "AT&T Wireless, Barnes & Noble"),
    ("AT amp;T; Total to Hit 20", "AT&T; Total to Hit 20"),
    ("M amp;amp;T Bank Stadium", "M&T Bank Stadium"),
    ("the Olympic women amp;apos;s triathlon", "the Olympic women's triathlon"),
    ("planning a  #36;400 million data center", "planning a $400 million data center"),
    ("posted profit of US #36;1.8 billion", "posted profit of US$1.8 billion"),
    (r"sell in a \$1.75 billion deal", "sell in a $1.75 billion deal"),
    ("Sept. 8  #151; A NASA capsule", "Sept. 8 — A NASA capsule"),
    ("Ch #225;vez declares victory at the Elys eacute;e", "Chávez declares victory at the Elysée"),
    ("Google rsquo;s founders   hellip;. and more", "Google’s founders …. and more"),
    ("by reserves, No. #160;2 oil company", "by reserves, No. 2 oil company"),
    (r"Ariel Sharon\rejected peace overtures, saying\it", "Ariel Sharon rejected peace overtures, saying it"),
    (r"Keyhole\\After a tip \\\\ from Andy", "Keyhole After a tip from Andy"),
    ("as the &lt;b&gt;...&lt;/b&gt; said", "as the ... said"),
    (
        'Oracle Corp. &lt;A HREF="http://www.reuters.com/FullQuote.aspx?ticker=ORCL.O '
        'target=/stocks/quickinfo/fullquote"&gt;ORCL.O&lt;/A&gt; on Friday',
        "Oracle Corp. ORCL.O on Friday",
    ),
    ("Barrel&lt;/a&gt;&lt;br/&gt;What sold", "Barrel What sold"),
    ("Microsoft Corp. &lt;MSFT.O&gt; filed", "Microsoft Corp. <MSFT.O> filed"),
    ("Suzuki Motor Corp.  lt;7269.T gt; said", "Suzuki Motor Corp. <7269.T> said"),
]
PROSE = [
    "3 < 5 and 7 > 6",
    "if a <b and c> d",
    "a<b",
    "R&D, AT&T and Q&A; more",
    "the issue #12; the next",
    "fish & chips",
    "Ünïcödé, 日本語, العربية 🎉",
    "&notaname; and &copy",
]


@pytest.mark.parametrize(("raw", "clean"), AG_NEWS)
def test_ag_news_rows_read_as_the_agency_wrote_them(raw: str, clean: str) -> None:
    assert clean_text(raw) == clean


@pytest.mark.parametrize("text", PROSE)
def test_prose_stays_as_it_is(text: str) -> None:
    assert clean_text(text) == text


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("a\x00b\x07c\x9f", "abc"),
        ("soft\xadhyphen\u200b\ufeff", "softhyphen"),
        ("half \ud83d a pair \udc00", "half a pair"),
        ("&#0;&#xD800;x", "\ufffd\ufffdx"),
        (" tab\tline\r\nbreak\xa0space ", "tab line break space"),
        ("&amp;amp;lt;b&amp;gt;bold", "bold"),
        (r" <p> </p> \ &nbsp; ", ""),
        ("", ""),
    ],
)
def test_what_nobody_can_read_is_dropped(raw: str, clean: str) -> None:
    assert clean_text(raw) == clean


def test_cleaning_twice_changes_nothing() -> None:
    pieces = [
        "&",
        "amp;",
        "#39;",
        "#38;",
        " ",
        "  ",
        "\\",
        "\\$",
        "<",
        ">",
        "b",
        "/",
        "lt;",
        "gt;",
        "quot;",
        "=",
    ]
    pieces += ["&#", "5", "3;", ";", "s", "\ud800", "\x00", "\u200b", "\n", "&#92;", "&#60;", "a href", "é"]
    generator = random.Random(0)
    for _ in range(20_000):
        text = "".join(generator.choices(pieces, k=generator.randint(1, 14)))
        cleaned = clean_text(text)
        assert clean_text(cleaned) == cleaned, repr(text)


@pytest.mark.parametrize("depth", [1, 4, 5, 50, 5000])
def test_a_reference_nested_however_deep_is_cleaned_for_good(depth: int) -> None:
    cleaned = clean_text("&#" * depth + "&#53;" + "3;" * depth)
    assert clean_text(cleaned) == cleaned


@pytest.mark.parametrize(
    "piece",
    ["<a ", "<a =", "<b>", "&amp;", "&#38;", " amp;", " ", "\\", "&#", "&lt;", "a  #39;", "&#&#53;3;"],
)
def test_no_text_takes_more_than_linear_time(piece: str) -> None:
    text = (piece * 400_000)[:400_000]
    start = time.thread_time()  # processor time, to which other programs add nothing
    clean_text(text)
    assert time.thread_time() - start < 3  # quadratic time would be minutes


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> TextTokenizer:
    return TextTokenizer.from_file(model_folder / "tokenizer.json", max_length=8)


def test_a_short_text_is_neither_cut_nor_padded(tokenizer: TextTokenizer) -> None:
    short, long = tokenizer.encode(["Goal!", "stocks fall on Wall Street " * 9])
    assert not short.truncated
    assert len(short.ids) == short.num_tokens < 8
    assert len(long.ids) == 8


def test_a_cut_text_tells_how_long_it_was(tokenizer: TextTokenizer, model_folder: Path) -> None:
    text = "stocks fall on Wall Street " * 9
    whole = TextTokenizer.from_file(model_folder / "tokenizer.json", max_length=500).encode([text])[0]
    cut = tokenizer.encode([text])[0]
    assert cut.truncated
    assert cut.num_tokens == whole.num_tokens == len(whole.ids)
    assert cut.ids == [*whole.ids[:7], whole.ids[-1]]


def test_encoding_cleans_first(tokenizer: TextTokenizer) -> None:
    raw, clean = tokenizer.encode(["stocks\\fall &lt;b&gt;\ud800", "stocks fall"])
    assert raw == clean


def test_threads_may_share_a_tokenizer(tokenizer: TextTokenizer) -> None:
    texts = [f"shares rose {i} percent" for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        from_threads = list(pool.map(lambda text: tokenizer.encode([text])[0], texts))
    assert from_threads == tokenizer.encode(texts)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
def test_a_server_tokenizes_on_the_thread_that_asks(model_folder: Path) -> None:
    code = """
import os, sys
from inference.settings import keep_tokenizer_on_one_thread
from common.text import TextTokenizer
keep_tokenizer_on_one_thread()
TextTokenizer.from_file(sys.argv[1], 8).encode(["stocks fall"] * 32)
print(len(os.listdir("/proc/self/task")))
"""
    command = [sys.executable, "-c", code, str(model_folder / "tokenizer.json")]
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "1\n"


def test_a_tokenizer_that_is_none_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        TextTokenizer.from_json("{}", max_length=8)


def test_a_max_length_without_room_for_a_word_is_refused(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="max_length 2: must be at least 3"):
        TextTokenizer.from_file(model_folder / "tokenizer.json", max_length=2)


def test_whoever_changes_what_a_text_comes_to_raises_the_version() -> None:
    with (SAMPLE_NEWS / "test.csv").open(newline="", encoding="utf-8") as file:
        texts = [" ".join(fields[1:]) for fields in csv.reader(file)]
    texts += [raw for raw, _ in AG_NEWS]
    cleaned = "\0".join(cleaner(name)(text) for name in CLEANINGS for text in texts)

    assert (VERSION, hashlib.sha256(cleaned.encode()).hexdigest()[:16]) == (3, "96f7788383c69a50")


def _trained(normalizer: object, pre_tokenizer: object) -> TextTokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    tokenizer.train_from_iterator((SAMPLE_NEWS / "test.csv").read_text().splitlines(), trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return TextTokenizer(tokenizer, max_length=24)


@pytest.mark.parametrize("is_bert", [True, False])
def test_many_texts_have_the_ids_that_each_has_alone(is_bert: bool) -> None:
    generator = random.Random(0)
    pieces = [
        *"aB é\u0301ÇßΣς中文\u3000\t\n\u00a0\x1c.,-'\u200d😀İﬁ½",
        " ",
        " ",
        "[SEP]",
        "[MASK]",
        "##ing",
        "oil",
        "x" * 120,
    ]
    texts = ["".join(generator.choices(pieces, k=generator.randint(1, 90))) for _ in range(2000)]
    texts += (SAMPLE_NEWS / "test.csv").read_text().splitlines()
    tokenizer = (
        _trained(normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer())
        if is_bert
        else _trained(normalizers.Lowercase(), pre_tokenizers.Metaspace())
    )
    many, num_cut = tokenizer.many(), 0

    for start in range(0, len(texts), 500):
        some = texts[start : start + 500]
        alone = tokenizer.encode_cleaned(some)
        num_cut += sum(encoded.truncated for encoded in alone)
        assert many.token_ids(some) == [encoded.ids for encoded in alone]
        assert many.cut == [i for i, encoded in enumerate(alone) if encoded.truncated]
    assert 0 < many.num_cut == num_cut < len(texts)


def test_one_of_a_thing_is_singular() -> None:
    assert [counted(number, "row") for number in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
