"""A small encoder with random weights and a few texts, for the tests of what learns from a teacher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

WORDS = ("sea", "storm", "sun", "sand", "wind", "and", "at", "noon", "##s", "##y")
WIDTH = 64


@pytest.fixture(scope="module", name="teacher")
def fixture_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with random weights that knows some words and all letters."""
    folder = tmp_path_factory.mktemp("teacher") / "encoder"
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    letters = [prefix + letter for prefix in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*special, *WORDS, *letters]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    tokenizer.add_special_tokens(list(special))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module", name="text")
def fixture_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plain text for training and for the test."""
    folder = tmp_path_factory.mktemp("text")
    for split, count in (("train", 200), ("test", 30)):
        lines = [f"{WORDS[i % 5]}s and {WORDS[i * 7 % 5]} at {i * 3 % 12}" for i in range(count)]
        (folder / f"{split}.txt").write_text("\n".join(lines))
    return folder
