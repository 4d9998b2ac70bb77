"""What a run reads before its first step: validation rows, repeated texts, and models that cannot be trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, DebertaConfig, DistilBertConfig

from common.errors import UserError
from common.rows import Columns
from training.config import TrainConfig
from training.data.dataset import LoadOptions, load_data
from training.data.prepare import class_weights_of, prepare_data, prepare_model
from training.data.teacher_vectors import VectorTeacher, write_vectors
from training.data.tokenized import load_tokenizer
from training.distributed.ranks import Ranks
from training.tasks import Embedding

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")


def write_rows(path: Path, texts: list[str]) -> None:
    path.write_text("text,label\n" + "".join(f"{text},{'ab'[i % 2]}\n" for i, text in enumerate(texts)))


def config_for(folder: Path, **fields: object) -> TrainConfig:
    return TrainConfig(dataset=str(folder), model="tiny", max_length=16, cache_dir=folder / "cache", **fields)


def test_validation_rows_that_the_data_brings_are_validated_on_and_train_on_none(tmp_path: Path) -> None:
    for split, count in (("train", 20), ("validation", 6), ("test", 4)):
        write_rows(tmp_path / f"{split}.csv", [f"{split} {i}" for i in range(count)])
    said: list[str] = []

    data = prepare_data(config_for(tmp_path, max_train_rows=10), ALONE, said.append)

    assert len(data.train_index) == 10
    assert data.validation_index.tolist() == [*range(6)]
    assert data.validation_rows is data.tokens.validation
    assert (len(data.tokens.train), len(data.tokens.validation or []), len(data.tokens.test)) == (20, 6, 4)
    assert f"Validation on the 6 rows of {tmp_path}/validation.csv" in said


def test_texts_repeated_between_training_and_other_splits_are_counted_in_one_line(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", [f"row {i}" for i in range(20)])
    write_rows(tmp_path / "dev.csv", [f"row {i}" for i in range(18, 24)])
    write_rows(tmp_path / "test.csv", [f"row {i}" for i in range(5)])
    said: list[str] = []

    data = prepare_data(config_for(tmp_path), ALONE, said.append)

    line = "2 of 6 validation rows and 5 of 5 test rows repeat the text of a training row, so their scores are too good"
    assert [one for one in said if one.startswith(line)] == said[-1:]
    assert data.figures["leakage"]["splits"] == {"validation": {"count": 2, "of": 6}, "test": {"count": 5, "of": 5}}


def test_repeated_texts_are_counted_between_the_parts_of_the_training_rows_too(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", ["the same text"] * 40)
    write_rows(tmp_path / "test.csv", ["another text", "one more"])
    said: list[str] = []

    prepare_data(config_for(tmp_path), ALONE, said.append)

    assert "4 of 4 validation rows repeat the text of a training row, so their scores are too good" in said


def _rare(folder: Path) -> None:
    for split in ("train", "test"):
        rows = "".join(f"{split} {i},{'ab'[i % 10 == 0]}\n" for i in range(60))
        (folder / f"{split}.csv").write_text("text,label\n" + rows)


def test_automatic_class_weights_make_all_labels_together_count_alike(tmp_path: Path) -> None:
    _rare(tmp_path)
    config = config_for(tmp_path, class_weights="auto")
    data = prepare_data(config, ALONE, lambda text: None)

    weights = class_weights_of(config, data)

    counts = np.bincount(data.tokens.train.labels[data.train_index])
    assert weights is not None
    assert (weights * counts).tolist() == pytest.approx([len(data.train_index) / 2] * 2)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("a: 1", "has no weight for the label 'b'"),
        ("a: 1\nb: 2\nc: 3", "'c' is not a label of the data, which has a, b"),
        ("a: 1\nb: 0", "the weight of 'b' is 0; it must be a number above 0"),
        ("a: 1\nb: many", "the weight of 'b' is 'many'"),
        ("a: .inf\nb: 1", "the weight of 'a' is inf"),
        ("[1, 2]", "must hold a weight for each label, such as `a: 2.5`"),
        ("a: [", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_class_weights_that_cannot_be_used_is_one_line(
    tmp_path: Path, content: str | None, what: str
) -> None:
    _rare(tmp_path)
    file = tmp_path / "weights.yaml"
    if content is not None:
        file.write_text(content)
    config = config_for(tmp_path, class_weights=str(file))
    data = prepare_data(config, ALONE, lambda text: None)

    with pytest.raises(UserError) as refused:
        class_weights_of(config, data)

    assert what in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.code == "class-weights"


def test_class_weights_are_read_by_the_names_of_the_labels(tmp_path: Path) -> None:
    _rare(tmp_path)
    (tmp_path / "weights.json").write_text('{"b": 9, "a": 0.5}')
    config = config_for(tmp_path, class_weights=str(tmp_path / "weights.json"))

    weights = class_weights_of(config, prepare_data(config, ALONE, lambda text: None))

    assert weights is not None
    assert weights.tolist() == [0.5, 9]


def test_a_run_validates_on_the_rows_that_the_data_brings(
    train_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for split, count in (("train", 24), ("validation", 6), ("test", 4)):
        write_rows(tmp_path / f"{split}.csv", [f"{split} {i}" for i in range(count)])
    for path in tmp_path.glob("*.csv"):
        path.write_text(path.read_text().replace("text,label", "headline;category").replace(",", ";"))
    flags = ["--dataset", tmp_path, "--text_column", "headline", "--label-column", "Category", "--max_train_rows", 0]

    code = train_here(*flags, "--epochs", 1, "--output_dir", tmp_path / "model")

    assert code == 0, capfd.readouterr().err
    assert "24 training, 6 validation, 4 test rows" in capfd.readouterr().out
    metrics = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert (metrics["validation"]["rows"], metrics["text_column"], metrics["label_column"]) == (
        6,
        "headline",
        "Category",
    )


def write_model(folder: Path) -> Path:
    tokenizer = load_tokenizer("tiny", ["a row 0 1 2 3 4 5 6 7 8 9"], 16)
    tokenizer.save_pretrained(folder)
    size = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 32}
    config = DistilBertConfig(vocab_size=len(tokenizer), **size)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def need_code(folder: Path) -> None:
    config = {"model_type": "made_up", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('ran the code of a model')")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (pickle_weights, "has no model.safetensors; only safetensors weights are read, save_pretrained writes them"),
        (need_code, "brings its own code, which is never run; use a model of an architecture that transformers has"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_with_the_reason(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    write_rows(tmp_path / "train.csv", [f"row {i}" for i in range(20)])
    model = write_model(tmp_path / "model")
    spoil(model)
    config = config_for(tmp_path).model_copy(update={"model": str(model)})

    with pytest.raises(UserError) as refusal:
        prepare_model(config, ALONE, prepare_data(config, ALONE, print), "fp32", print)

    assert str(refusal.value) == f"--model {model}: {message}"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("checkpoints/no/such", ": no folder of that name"),
        ("./tiny", ": no folder of that name"),
        ("checkpoints/tiny.pt", ": no folder of that name"),
        ("acme/encoder@v2", ": a revision has a flag of its own; use --model acme/encoder --model_revision v2"),
    ],
)
def test_a_model_that_no_hub_can_have_is_refused_before_the_data_are_read(
    tmp_path: Path, model: str, message: str
) -> None:
    said: list[str] = []

    with pytest.raises(UserError) as refusal:
        prepare_data(config_for(tmp_path).model_copy(update={"model": model}), ALONE, said.append)

    assert str(refusal.value).startswith(f"--model {model}{message}")
    assert said == []


def write_deberta(folder: Path, texts: list[str]) -> Path:
    """Masks with the smallest number of fp32, which bf16 cannot hold."""
    tokenizer = load_tokenizer("tiny", texts, 16)
    tokenizer.save_pretrained(folder)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DebertaConfig(vocab_size=len(tokenizer), relative_attention=True, pos_att_type=["p2c", "c2p"], **size)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def test_a_model_that_half_precision_breaks_is_trained_in_fp32_or_refused_in_one_line(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", [f"row {i}" for i in range(20)])
    model = write_deberta(tmp_path / "model", ["row 0 1 2 3 4 5 6 7 8 9"])
    said: list[str] = []
    config = config_for(tmp_path).model_copy(update={"model": str(model)})
    data = prepare_data(config, ALONE, print)

    assert prepare_model(config, ALONE, data, "bf16", said.append)[1] == "fp32"
    assert prepare_model(config, ALONE, data, "fp32", said.append)[1] == "fp32"
    assert [
        line for line in said if line.startswith(f"--model {model}: cannot be computed in bf16 (") and "fp32" in line
    ]
    asked = config.model_copy(update={"precision": "bf16"})
    with pytest.raises(UserError, match=r"cannot be computed in bf16 \(.*\); use --precision fp32"):
        prepare_model(asked, ALONE, data, "bf16", print)


def test_a_teacher_that_half_precision_breaks_is_asked_in_fp32(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", [f"row {i}" for i in range(20)])
    teacher = write_deberta(tmp_path / "teacher", ["row 0 1 2 3 4 5 6 7 8 9"])
    columns = Columns("text", "")
    data = load_data(str(tmp_path), LoadOptions(columns=columns, task=Embedding))

    asked = VectorTeacher(str(teacher), "none", 16, ALONE.device, "bf16")
    write_vectors(tmp_path / "v.safetensors", asked, data, print)

    assert (tmp_path / "v.safetensors").is_file()


def test_a_model_that_half_precision_does_not_break_keeps_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", [f"row {i}" for i in range(20)])
    model = write_model(tmp_path / "model")
    config = config_for(tmp_path).model_copy(update={"model": str(model)})

    assert prepare_model(config, ALONE, prepare_data(config, ALONE, print), "bf16", print)[1] == "bf16"
