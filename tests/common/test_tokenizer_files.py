from __future__ import annotations

import contextlib
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from common.errors import ModelLoadError
from common.model_folder import read_tokenizer
from common.text import TextTokenizer

TEXTS = [
    "Café owners in ÜLM say: shares fell",
    "中国 shares, 北京fell",
    "@USER says hello@USER now",
    "The bank of the river said the shares of the bank fell by the end of the day again and again and again",
]
_ROOM = 200  # weights for more tokens than the vocabulary has
# What classes of tokenizers treat in different ways: spaces, case, accents, characters that Unicode has twice, tokens.
_WORDS = [
    "shares fell",
    "Shares FELL",
    "naïve Café",
    "cafe\u0301",
    "ﬁnal Ａ１ ½ ①",
    "中国股票 fell",
    "日本語ｶﾅ",
    "🙂 bank 👩‍🚀",
]
_WORDS += ["<s>", "a</s>b", "[CLS] x", "the [MASK] said", "<mask>", " <mask> x", "<unk>", "[UNK]", "<pad>", "<eop>"]
_WORDS += [
    "``said''",
    '"said"',
    "don't",
    "12,345.67",
    "_x_ ▁y",
    "a\u00a0b",
    "a\u200bb",
    "\u3000x",
    "ß ẞ İ ı",
    "#@!?.,;",
]
ODD_TEXTS = ["", " ", "\n", " \t ", "a"]
ODD_TEXTS += [
    change(word) for word in _WORDS for change in (str, "  {}  ".format, "{0}\t{0}\r\n".format, "{0}  {0}".format)
]


def _bert(lower: bool) -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, "cafe CAFÉ ulm ülm"], trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=ends
    )
    return tokenizer, {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}


def _byte_level(name: str) -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>"}
    return tokenizer, {"tokenizer_class": name, "sep_token": "</s>", "mask_token": "<mask>", **names}


def _unigram(name: str, special: list[str], first: str, last: str) -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, *ODD_TEXTS] * 3, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B {last}", special_tokens=ends
    )
    names = {"cls_token": first, "sep_token": last, "pad_token": "<pad>", "unk_token": "<unk>"}
    return tokenizer, {"tokenizer_class": name, **names}


def _xlm_roberta(name: str) -> tuple[Tokenizer, dict[str, Any]]:
    return _unigram(name, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], "<s>", "</s>")


def _albert(name: str) -> tuple[Tokenizer, dict[str, Any]]:
    return _unigram(name, ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"], "[CLS]", "[SEP]")


_KINDS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    "bert": lambda: _bert(True),
    "bert, cased": lambda: _bert(False),
    "roberta": lambda: _byte_level("RobertaTokenizer"),
    "modernbert": lambda: _byte_level("PreTrainedTokenizerFast"),
}
# With a class that takes the vocabulary from tokenizer.json and splits texts in its own way.
_BUILT_BY_ITS_CLASS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    "albert": lambda: _albert("AlbertTokenizer"),
    "barthez": lambda: _xlm_roberta("BarthezTokenizer"),
    "big_bird": lambda: _albert("BigBirdTokenizer"),
    "camembert": lambda: _xlm_roberta("CamembertTokenizer"),
    "deberta-v2": lambda: _albert("DebertaV2TokenizerFast"),
    "fnet": lambda: _albert("FNetTokenizer"),
    "mbart": lambda: _xlm_roberta("MBartTokenizer"),
    "rembert": lambda: _albert("RemBertTokenizer"),
    "t5": lambda: _unigram("T5Tokenizer", ["<pad>", "</s>", "<unk>"], "</s>", "</s>"),
    "xlm-roberta": lambda: _xlm_roberta("XLMRobertaTokenizerFast"),
    "xlnet": lambda: _unigram("XLNetTokenizer", ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>"], "<cls>", "<sep>"),
    "clip": lambda: _byte_level("CLIPTokenizer"),
    "gemma": lambda: _byte_level("GemmaTokenizer"),
    "gpt_neox": lambda: _byte_level("GPTNeoXTokenizer"),
    "llama": lambda: _byte_level("LlamaTokenizer"),
    "openai-gpt": lambda: _byte_level("OpenAIGPTTokenizer"),
    "qwen2": lambda: _byte_level("PreTrainedTokenizerFast"),
    "xglm": lambda: _xlm_roberta("XGLMTokenizer"),
    # Of these transformers takes tokenizer.json as it is, whatever class is named, or builds it with none named.
    "modernbert, named": lambda: _byte_level("RobertaTokenizer"),
    "nystromformer": lambda: _albert("AlbertTokenizer"),
    "llama, no class": lambda: _byte_level(""),
    "xlm-roberta, no class": lambda: _xlm_roberta(""),
    "bert, no class": lambda: (_bert(True)[0], {}),
}


def _charsmap(pairs: dict[str, str]) -> bytes:
    """A map of characters as SentencePiece has it: a trie as a double array, and the texts that its values point to."""
    units, texts, num_nodes = {0: 0}, b"", 1
    bases = {b"": 256}
    units[0] = 256 << 10  # the offset to the root's children
    for character, replacement in pairs.items():
        key = character.encode()
        for end in range(1, len(key) + 1):
            part = key[:end]
            if part in bases:
                continue
            num_nodes += 1
            bases[part] = 256 * num_nodes
            place = bases[part[:-1]] ^ part[-1]
            units[place] = (place ^ bases[part]) << 10 | part[-1] | (end == len(key)) << 8
        units[bases[key]] = 1 << 31 | len(texts)
        texts += replacement.encode() + b"\0"
    trie = b"".join(struct.pack("<I", units.get(place, 0)) for place in range(256 * (num_nodes + 1)))
    return struct.pack("<I", len(trie)) + trie + texts


def _as_on_the_hub(tokenizer: Tokenizer) -> None:
    """Give it the normalizer and pre-tokenizer that conversions from SentencePiece have."""
    charsmap = normalizers.Precompiled(_charsmap({"ﬁ": "fi", "Ａ": "A", "１": "1", "\t": " ", "\n": " ", "①": "1"}))
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("``", '"'), charsmap, spaces])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )


class _Folder:
    """The tokenizer's files in a model folder, and its texts as we and as transformers read them."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        tokenizer, settings = {**_KINDS, **_BUILT_BY_ITS_CLASS}[kind]()
        self.size = tokenizer.get_vocab_size()
        tokenizer.save(str(path / "tokenizer.json"))
        self.config = {"model_type": kind.partition(",")[0], "vocab_size": self.size + _ROOM}
        self.write("config.json", self.config)
        self.write("tokenizer_config.json", {"model_max_length": 16, **settings})

    def write(self, name: str, content: Any) -> None:
        (self.path / name).write_text(json.dumps(content))

    def change(self, name: str, **changes: Any) -> None:
        content = json.loads((self.path / name).read_text())
        self.write(name, {key: value for key, value in {**content, **changes}.items() if value is not ...})

    def ours(self, texts: list[str] = TEXTS) -> list[list[int]]:
        tokenizer = TextTokenizer(Tokenizer.from_str(read_tokenizer(self.path, self.config)), max_length=16)
        return [one.ids for one in tokenizer.encode_cleaned(texts)]

    def theirs(self, texts: list[str] = TEXTS) -> list[list[int]]:
        tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        return list(tokenizer(texts, truncation=True, max_length=16)["input_ids"])

    def refusal(self) -> str:
        with pytest.raises(ModelLoadError) as refusal:
            self.ours()
        assert len(str(refusal.value).splitlines()) == 1
        return str(refusal.value)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> _Folder:
    return _Folder(tmp_path, getattr(request, "param", "bert"))


@pytest.mark.parametrize("folder", list(_KINDS), indirect=True)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"truncation_side": "left"},
        {"strip_accents": False},
        {"strip_accents": True},
        {"tokenize_chinese_chars": False},
        {"additional_special_tokens": ["@USER"]},
    ],
    ids=str,
)
def test_texts_are_read_as_transformers_reads_them_with_each_setting(folder: _Folder, settings: dict[str, Any]) -> None:
    folder.change("tokenizer_config.json", **settings)
    assert folder.ours() == folder.theirs()


@pytest.mark.parametrize(
    ("folder", "settings"),
    [
        ("bert", {"do_lower_case": False}),
        ("bert, cased", {"do_lower_case": True}),
        ("bert, cased", {"do_lower_case": ...}),  # its class makes lower case unless told otherwise
        ("bert, cased", {"do_lower_case": ..., "tokenizer_class": ...}),
        ("roberta", {"add_prefix_space": True}),
        ("roberta", {"add_prefix_space": True, "tokenizer_class": ...}),
    ],
    indirect=["folder"],
    ids=str,
)
def test_a_setting_wins_over_tokenizer_json_as_in_transformers(folder: _Folder, settings: dict[str, Any]) -> None:
    before = folder.ours()
    folder.change("tokenizer_config.json", **settings)
    assert folder.ours() == folder.theirs() != before


@pytest.mark.parametrize("side", [..., "right"])
def test_the_side_on_which_texts_are_cut_may_be_in_tokenizer_json(folder: _Folder, side: object) -> None:
    whole = folder.ours()
    truncation = {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    folder.change("tokenizer.json", truncation=truncation)
    folder.change("tokenizer_config.json", truncation_side=side)
    assert folder.ours() == folder.theirs()
    assert (folder.ours() == whole) == (side == "right")


@pytest.mark.parametrize("folder", list(_KINDS), indirect=True)
@pytest.mark.parametrize("flags", [{}, {"special": True}, {"normalized": True}, {"lstrip": True, "rstrip": True}])
def test_a_token_that_only_the_settings_add_is_one_token(folder: _Folder, flags: dict[str, bool]) -> None:
    token = {"content": "@USER", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    folder.change(
        "tokenizer_config.json", added_tokens_decoder={str(folder.size): {**token, "special": False, **flags}}
    )
    assert folder.ours() == folder.theirs()
    assert folder.ours()[2].count(folder.size) == 2


@pytest.mark.parametrize("folder", list(_KINDS), indirect=True)
def test_a_token_that_only_added_tokens_json_has_is_one_token(folder: _Folder) -> None:
    folder.write("added_tokens.json", {"@USER": folder.size})
    assert folder.ours() == folder.theirs()
    assert folder.ours()[2].count(folder.size) == 2


def test_a_special_token_without_a_weight_is_not_added(folder: _Folder) -> None:
    before = folder.ours()
    folder.config["vocab_size"] = folder.size
    folder.change("tokenizer_config.json", additional_special_tokens=["@USER"])
    assert folder.ours() == before


@pytest.mark.parametrize(
    ("folder", "settings", "what"),
    [
        ("bert", {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, "do_lower_case is False"),
        ("bert", {"do_lower_case": "yes"}, "do_lower_case 'yes'"),
        ("bert", {"truncation_side": "middle"}, "truncation_side 'middle'"),
        ("bert", {"split_special_tokens": True}, "split_special_tokens is True"),
        ("bert", {"tokenizer_class": "RobertaTokenizer"}, "is that of WordPiece"),
        ("bert", {"added_tokens_decoder": {"9999": {"content": "@USER"}}}, "'@USER' has the id 9999"),
        ("bert", {"added_tokens_decoder": {"7": {"content": "@USER"}}}, "'@USER' has the id 7"),
        ("roberta", {"tokenizer_class": "BertTokenizerFast"}, "is that of BPE"),
        ("modernbert", {"add_prefix_space": True}, "add_prefix_space is True"),
    ],
    indirect=["folder"],
    ids=str,
)
def test_files_that_contradict_each_other_are_refused_in_one_line(
    folder: _Folder, settings: dict[str, Any], what: str
) -> None:
    folder.change("tokenizer_config.json", **settings)
    line = folder.refusal()
    assert what in line
    assert "tokenizer_config.json" in line
    assert "save_pretrained" in line


def test_a_class_that_ignores_the_normalizer_of_tokenizer_json_is_refused(folder: _Folder) -> None:
    folder.change("tokenizer.json", normalizer=None)
    assert "tokenizer_config.json and tokenizer.json disagree" in folder.refusal()


@pytest.mark.parametrize("folder", [*_KINDS, *_BUILT_BY_ITS_CLASS], indirect=True)
def test_odd_texts_are_read_as_the_class_of_each_family_reads_them(folder: _Folder) -> None:
    assert folder.ours(ODD_TEXTS) == folder.theirs(ODD_TEXTS)


@pytest.mark.parametrize("folder", ["bert, cased", "roberta"], indirect=True)
@pytest.mark.parametrize(
    "model_type",
    [
        *("bert", "convbert", "distilbert", "electra", "ernie", "layoutlm", "lxmert", "megatron-bert", "mobilebert"),
        *("mpnet", "nezha", "squeezebert", "bart", "blenderbot", "deberta", "gpt2", "gpt_neo", "led", "longformer"),
        *("mvp", "roberta", "roberta-prelayernorm"),
    ],
)
def test_a_type_of_model_alone_decides_as_in_transformers(folder: _Folder, model_type: str) -> None:
    folder.config["model_type"] = model_type
    folder.write("config.json", folder.config)
    folder.change("tokenizer_config.json", tokenizer_class=..., do_lower_case=...)
    with contextlib.suppress(ModelLoadError):  # for example the vocabulary of WordPiece for a class that reads BPE
        assert folder.ours(ODD_TEXTS) == folder.theirs(ODD_TEXTS)


@pytest.mark.parametrize("folder", ["albert", "camembert", "deberta-v2", "t5", "xlm-roberta", "xlnet"], indirect=True)
def test_tokenizers_as_published_and_as_transformers_saves_them_are_read_as_it_reads_them(folder: _Folder) -> None:
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    _as_on_the_hub(tokenizer)
    tokenizer.save(str(folder.path / "tokenizer.json"))
    assert folder.ours(ODD_TEXTS) == (theirs := folder.theirs(ODD_TEXTS))
    AutoTokenizer.from_pretrained(folder.path).save_pretrained(folder.path)
    assert folder.ours(ODD_TEXTS) == folder.theirs(ODD_TEXTS) == theirs


@pytest.mark.parametrize(
    ("folder", "settings"),
    [
        ("albert", {"do_lower_case": False}),
        ("albert", {"keep_accents": True}),
        ("deberta-v2", {"do_lower_case": True}),
        ("deberta-v2", {"split_by_punct": True}),
        ("xlm-roberta", {"truncation_side": "left"}),
        ("xlm-roberta", {"tokenizer_class": ...}),
        ("xlm-roberta", {"additional_special_tokens": ["bank"]}),
    ],
    indirect=["folder"],
    ids=str,
)
def test_settings_of_a_class_are_obeyed_as_in_transformers(folder: _Folder, settings: dict[str, Any]) -> None:
    folder.change("tokenizer_config.json", **settings)
    assert folder.ours(ODD_TEXTS) == folder.theirs(ODD_TEXTS)


def test_a_class_for_which_transformers_cannot_make_a_tokenizer_is_refused(
    folder: _Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.change("tokenizer_config.json", tokenizer_class="AlbertTokenizer")
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    line = folder.refusal()
    assert "tokenizer_config.json and tokenizer.json disagree: AlbertTokenizer" in line
    assert "save_pretrained" in line


@pytest.mark.parametrize("folder", ["deberta-v2"], indirect=True)
def test_tokens_that_a_class_adds_without_weights_for_them_are_dropped(folder: _Folder) -> None:
    folder.config["vocab_size"] = folder.size
    folder.change("tokenizer_config.json", pad_token=...)
    texts = ["[PAD] shares fell"]
    assert max(folder.theirs(texts)[0]) == folder.size  # its class adds [PAD]
    assert max(folder.ours(texts)[0]) < folder.size
