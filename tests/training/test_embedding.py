"""Learning a teacher's vectors, and the small encoder that it begins with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification

from common.encoders import BERT
from common.errors import ModelLoadError
from common.model_folder import read_saved_model
from common.text import TextTokenizer
from tests.training.small_teacher import WIDTH, WORDS, fixture_teacher, fixture_text  # noqa: F401
from training.data.array_file import ArrayFile
from training.model.pooling import POOLER, trained_pooling
from training.model.shrink import choose_ids, count_ids, shrink, smaller_tokenizer
from training.quiet import quiet_libraries

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]


def _flags(text: Path, teacher: Path, output: Path) -> tuple[object, ...]:
    flags = ("--task", "embedding", "--dataset", text, "--distill", teacher, "--output_dir", output)
    return (*flags, "--model", "tiny", "--max_length", 32, "--batch_size", 16, "--epochs", 2)


@pytest.fixture
def shrunk(teacher: Path) -> tuple[Tokenizer, list[int], Counter[int]]:
    """The teacher's tokenizer, and the ids that a vocabulary of 83 pieces keeps of it."""
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    counts = count_ids(tokenizer, [["storm and sun", "storms at sea"], ["storm"]])
    return tokenizer, choose_ids(tokenizer, counts, 83), counts


def test_the_student_learns_the_directions_that_the_teacher_gives_to_texts(
    text: Path, teacher: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path
) -> None:
    assert train_here(*_flags(text, teacher, tmp_path / "model"), "--learning_rate", "3e-3", "--epochs", 6) == 0

    epochs = [epoch["validation"]["cosine"] for epoch in metrics_of(tmp_path / "model.run", "epoch")]
    assert 1 - epochs[-1] < 0.8 * (1 - epochs[0])
    test = json.loads((tmp_path / "model" / "metrics.json").read_text())["test"]
    assert test["cosine"] > 0.95
    assert test["spearman"] > 0.3


def test_the_targets_are_the_mean_of_the_teachers_hidden_states(
    text: Path, teacher: Path, train_here: Train, tmp_path: Path
) -> None:
    flags = (*_flags(text, teacher, tmp_path / "model"), "--cache_dir", tmp_path / "cache", "--precision", "fp32")
    assert train_here(*flags, "--epochs", 1) == 0
    [file] = (tmp_path / "cache").glob("*vectors*")

    tokenizer, network = AutoTokenizer.from_pretrained(teacher), AutoModel.from_pretrained(teacher).eval()
    for row, line in enumerate((text / "train.txt").read_text().splitlines()[:3]):
        with torch.inference_mode():
            hidden = network(**tokenizer(line, return_tensors="pt", return_token_type_ids=False)).last_hidden_state[0]
        expected = torch.nn.functional.normalize(hidden.mean(dim=0), dim=0)
        np.testing.assert_allclose(ArrayFile.open(file)["train"][row], expected, atol=1e-5)


def test_a_second_start_asks_the_teacher_nothing(
    text: Path, teacher: Path, train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = (*_flags(text, teacher, tmp_path / "model"), "--cache_dir", tmp_path / "cache", "--epochs", 1)
    assert train_here(*flags) == 0
    assert "has read 230 of 230 texts" in capfd.readouterr().out
    assert train_here(*flags, "--resume", "none") == 0
    assert "has read" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), id="ddp"),
        pytest.param(("--strategy", "zero3"), id="zero3"),
        pytest.param(("--strategy", "tp"), id="tp"),
        pytest.param(("--strategy", "pp", "--gradient_accumulation", "2", "--batch_size", "8"), id="pp"),
    ],
)
def test_two_ranks_learn_vectors_as_one_process_does(
    layout: tuple[str, ...],
    text: Path,
    teacher: Path,
    launch: Callable[..., Any],
    metrics_of: Metrics,
    tmp_path: Path,
) -> None:
    losses = []
    sharded = ("--batch_size", 8) if layout in ((), ("--strategy", "zero3")) else ()
    for ranks, flags in ((1, ()), (2, (*sharded, *layout))):
        output = tmp_path / f"by{ranks}"
        ended = launch(ranks, *_flags(text, teacher, output), "--epochs", 1, "--precision", "fp32", *flags)
        assert ended.process.returncode == 0, ended.err
        losses.append([step["loss"] for step in metrics_of(tmp_path / f"by{ranks}.run")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_what_is_written_is_a_base_for_fine_tuning_and_nothing_to_serve(
    text: Path, teacher: Path, train_here: Train, tmp_path: Path
) -> None:
    assert train_here(*_flags(text, teacher, tmp_path / "model"), "--epochs", 1) == 0

    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert "pre_classifier.weight" in weights
    assert not any(name.startswith("classifier.") for name in weights)
    assert not (tmp_path / "model.pt").exists()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "id2label" not in config
    assert trained_pooling(tmp_path / "model") == POOLER
    with pytest.raises(ModelLoadError, match="an encoder without classes"):
        read_saved_model(tmp_path / "model")
    rows = "\n".join(f"{'calm' if i % 2 else 'rough'},{WORDS[i % 5]}" for i in range(40))
    (tmp_path / "rows.csv").write_text(f"label,text\n{rows}\n")
    tuning = ("--dataset", tmp_path / "rows.csv", "--model", tmp_path / "model", "--output_dir", tmp_path / "tuned")
    assert train_here(*tuning, "--epochs", 1) == 0


def test_without_a_teacher_there_is_nothing_to_learn(
    text: Path, train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    quiet_libraries()
    flags = ("--dataset", text, "--output_dir", tmp_path / "model")
    assert train_here("--task", "embedding", *flags) == 2
    assert "--task embedding: give the encoder whose vectors" in capfd.readouterr().err
    assert train_here("--task", "embedding", *flags, "--distill", tmp_path) == 2
    assert f"--distill {tmp_path}: has no config.json" in capfd.readouterr().err


def test_a_smaller_vocabulary_splits_texts_of_its_own_words_as_before(
    shrunk: tuple[Tokenizer, list[int], Counter[int]],
) -> None:
    tokenizer, ids, _ = shrunk
    smaller = TextTokenizer.from_json(smaller_tokenizer(tokenizer, ids), 32, "none")

    [before] = TextTokenizer.from_json(tokenizer.to_str(), 32, "none").encode(["Storms and sun at sea"])
    [after] = smaller.encode(["Storms and sun at sea"])
    assert [ids[id_] for id_ in after.ids] == before.ids
    [unknown] = smaller.encode(["sandy wind"])  # words that are not among them
    assert ids.index(tokenizer.token_to_id("[UNK]")) not in unknown.ids


def test_the_small_encoder_begins_as_a_part_of_the_large_one(
    teacher: Path, shrunk: tuple[Tokenizer, list[int], Counter[int]]
) -> None:
    _, ids, counts = shrunk
    large = BertForSequenceClassification.from_pretrained(teacher)
    small = shrink(large, BERT, ids, counts, width=WIDTH // 2).distilbert

    words = large.bert.embeddings.word_embeddings.weight[ids]
    directions = torch.linalg.lstsq(words, small.embeddings.word_embeddings.weight).solution  # (large, small)
    assert torch.allclose(directions.T @ directions, torch.eye(WIDTH // 2), atol=1e-3)
    last = large.bert.encoder.layer[3].attention.self.value
    attention = small.transformer.layer[3].attention
    assert torch.allclose(attention.v_lin.weight, (last.weight @ directions)[: WIDTH // 2], atol=1e-3)
    assert attention.n_heads == 2  # of the same width
