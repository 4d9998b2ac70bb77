from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
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
_ROOM = 20  # weights for more tokens than the vocabulary has


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


_KINDS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    "bert": lambda: _bert(True),
    "bert, cased": lambda: _bert(False),
    "roberta": lambda: _byte_level("RobertaTokenizer"),
    "modernbert": lambda: _byte_level("PreTrainedTokenizerFast"),
}


class _Folder:
    """The tokenizer's files in a model folder, and its texts as we and as transformers read them."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        tokenizer, settings = _KINDS[kind]()
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

    def ours(self) -> list[list[int]]:
        tokenizer = TextTokenizer(Tokenizer.from_str(read_tokenizer(self.path, self.config)), max_length=16)
        return [one.ids for one in tokenizer.encode_cleaned(TEXTS)]

    def theirs(self) -> list[list[int]]:
        tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        return list(tokenizer(TEXTS, truncation=True, max_length=16)["input_ids"])

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
        ("bert", {"tokenizer_class": "RobertaTokenizer"}, "its normalizer is BertNormalizer"),
        ("bert", {"added_tokens_decoder": {"9999": {"content": "@USER"}}}, "'@USER' has the id 9999"),
        ("bert", {"added_tokens_decoder": {"7": {"content": "@USER"}}}, "'@USER' has the id 7"),
        ("roberta", {"tokenizer_class": "BertTokenizerFast"}, "its normalizer is None"),
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
