"""The tokenizer of --model is that of the model, and can read the texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    RobertaConfig,
    T5Config,
    XLMRobertaConfig,
)

from common.errors import UserError
from tests.training.data.test_prepare import ALONE, config_for, write_rows
from training.config import TrainConfig
from training.data.prepare import prepare_data
from training.data.tokenized import load_tokenizer, make_tokenizer
from training.model.own import Own

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 466062\n"
FAMILIES = (BertConfig, RobertaConfig, XLMRobertaConfig, MPNetConfig, ModernBertConfig, GPT2Config, T5Config)
# No text below is empty, but this family of tokenizers drops control and format characters.
INVISIBLE = "\u200b\u200b"


def save(folder: Path, texts: list[str], *, rows: int = 0) -> Path:
    """A model folder as far as the tokenizer is concerned: its files, and a config.json with so many embeddings."""
    tokenizer = load_tokenizer("tiny", texts, 16)
    tokenizer.save_pretrained(folder)
    BertConfig(vocab_size=rows or len(tokenizer)).save_pretrained(folder)
    return folder


def prepare(folder: Path, model: Path, own: Own | None = None) -> list[str]:
    said: list[str] = []
    config = config_for(folder).model_copy(update={"model": str(model)})
    prepare_data(config, ALONE, said.append, *([own] if own else []))
    return said


@pytest.mark.parametrize("more", [{}, {"tokenizer_config.json": "{}"}, {"merges.txt": "a b"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_the_vocabulary_of_its_tokenizer_is_refused(
    family: type[PreTrainedConfig], more: dict[str, str], tmp_path: Path
) -> None:
    family().save_pretrained(tmp_path)
    for name, content in more.items():
        (tmp_path / name).write_text(content)

    with pytest.raises(UserError, match=r"has no tokenizer\.json") as refusal:
        load_tokenizer(str(tmp_path), [], 16)

    assert refusal.value.code == "tokenizer-missing"
    assert "one of:" not in str(refusal.value)


def test_a_vocabulary_from_which_a_tokenizer_can_be_made_is_enough(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sea", "storm"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertConfig(vocab_size=len(words)).save_pretrained(tmp_path)

    assert load_tokenizer(str(tmp_path), [], 16)("Sea storm").input_ids == [2, 5, 6, 3]


@pytest.mark.parametrize(("ids", "rows"), [(400, 448), (400, 400 + 256), (30_000, 50_000), (10, 128)])
def test_embeddings_with_rows_to_spare_are_accepted(ids: int, rows: int, tmp_path: Path) -> None:
    folder = save(tmp_path, ["sea"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"word{i}" for i in range(ids - tokenizer.get_vocab_size())])
    tokenizer.save(str(folder / "tokenizer.json"))
    BertConfig(vocab_size=rows).save_pretrained(folder)

    assert len(load_tokenizer(str(folder), [], 16)) == ids


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (7, r"the tokenizer has 10 token ids, the model only 7; .*resize_token_embeddings\(10\)"),
        (
            8800,
            r"the tokenizer has only 10 token ids, the model 8800; use the tokenizer that the model was trained with",
        ),
    ],
)
def test_a_tokenizer_of_another_size_than_the_model_is_refused(rows: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        load_tokenizer(str(save(tmp_path, ["sea"], rows=rows)), [], 16)

    assert refusal.value.code == "tokenizer-unlike"


def test_the_highest_id_counts_and_not_the_number_of_tokens(tmp_path: Path) -> None:
    folder = save(tmp_path, ["sea"], rows=20)
    file = folder / "tokenizer.json"
    parts = json.loads(file.read_text())
    parts["model"]["vocab"]["far"] = 20
    file.write_text(json.dumps(parts))

    with pytest.raises(UserError, match="the tokenizer has 21 token ids, the model only 20"):
        load_tokenizer(str(folder), [], 16)


def test_a_teacher_of_vectors_needs_its_own_tokenizer_too(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", [f"sea {i}" for i in range(20)])
    folder = save(tmp_path / "teacher", ["sea 0123456789"])
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=9, **small)).save_pretrained(folder)

    with pytest.raises(UserError, match=r"^--distill .*: the tokenizer has \d+ token ids, the model only 9"):
        prepare_data(config_for(tmp_path, task="embedding", distill=folder), ALONE, print)


def test_a_network_of_the_users_own_is_made_for_the_tokenizer_and_not_compared_with_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", [f"sea {i}" for i in range(20)])
    model = save(tmp_path / "model", ["sea 0123456789"], rows=4)

    assert prepare(tmp_path, model, Own(network=lambda words, scores: None))  # type: ignore[arg-type,return-value]
    with pytest.raises(UserError, match="the model only 4"):
        prepare(tmp_path, model)


def test_how_someone_else_cut_and_padded_texts_is_not_kept(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", ["sea storm"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=48)
    tokenizer.save(str(folder / "tokenizer.json"))

    load_tokenizer(str(folder), [], 16).save_pretrained(tmp_path / "written")

    written = json.loads((tmp_path / "written" / "tokenizer.json").read_text())
    assert written["truncation"] is None
    assert written["padding"] is None


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors", "vocab.txt"])
def test_a_file_that_git_has_not_fetched_is_named(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, ["sea"])
    (folder / name).write_text(POINTER)

    with pytest.raises(UserError, match=rf"--model .*: {name} is only a pointer of Git LFS .* git lfs pull"):
        load_tokenizer(str(folder), [], 16)


def test_texts_of_which_most_is_unknown_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", [f"море и шторм {i}" for i in range(20)])
    model = save(tmp_path / "model", ["sea and storm 0123456789"])

    with pytest.raises(UserError, match=r"^100% of the characters of the training texts are unknown to the tokenizer"):
        prepare(tmp_path, model)


def test_unknown_words_are_counted_for_every_kind_of_tokenizer(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", [f"qqq {i}" for i in range(20)])
    tokenizer = Tokenizer(models.Unigram([("[UNK]", 0.0), ("▁", -1.0), ("[PAD]", 0.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    make_tokenizer(tokenizer.to_str(), 16).save_pretrained(tmp_path / "model")
    BertConfig(vocab_size=8).save_pretrained(tmp_path / "model")

    with pytest.raises(UserError, match="are unknown to the tokenizer"):
        prepare(tmp_path, tmp_path / "model")


def test_a_share_of_unknown_words_is_a_note(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", [f"sea and storm{' море' * (i % 2)}" for i in range(40)])
    model = save(tmp_path / "model", ["sea and storm"])

    [line] = [line for line in prepare(tmp_path, model) if "unknown to the tokenizer" in line]

    assert line.startswith("15% of the characters of the training texts are unknown")


def test_rows_of_which_the_tokenizer_leaves_nothing_are_counted(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", [f"sea {i}" if i % 10 else INVISIBLE for i in range(1, 41)])
    write_rows(tmp_path / "test.csv", ["sea", INVISIBLE])
    model = save(tmp_path / "model", ["sea 0123456789"])

    said = prepare(tmp_path, model)

    expected = "4 training rows and 1 test row (first: training row 10) have no token besides the special ones, so the "
    assert expected + "model reads nothing of their texts" in said


def test_rows_that_are_mostly_empty_or_have_no_token_at_all_are_refused(tmp_path: Path) -> None:
    model = save(tmp_path / "model", ["sea 0123456789"])
    write_rows(tmp_path / "train.csv", [INVISIBLE if i % 4 else f"sea {i}" for i in range(40)])
    with pytest.raises(
        UserError, match=r"^27 training rows and 3 test rows .* have no token besides the special ones; --m"
    ):
        prepare(tmp_path, model)

    write_rows(tmp_path / "train.csv", [f"sea {i}" if i % 10 else INVISIBLE for i in range(1, 41)])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.Sequence([])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(UserError, match=r"^[34] training rows .* have no token, and a row without a single token"):
        prepare(tmp_path, model)


def test_a_file_of_rows_that_git_has_not_fetched_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(POINTER)

    with pytest.raises(UserError, match=r"train\.csv: is only a pointer of Git LFS .* git lfs pull"):
        prepare_data(TrainConfig(dataset=tmp_path, model="tiny", cache_dir=tmp_path / "cache"), ALONE, print)
