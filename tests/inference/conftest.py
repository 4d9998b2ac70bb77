"""A tiny real model, as training writes it, and a real server process for it."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

from inference import export
from inference.engines.model_loader import ModelLoader
from tests.inference.servers import Server, free_port, running

LABELS = ["World", "Sports", "Business", "Sci/Tech"]
MAX_LENGTH = 24
TEXTS = [
    "Oil prices rise again as stocks fall on Wall Street.",
    "The home side won the cup final after extra time and penalties.",
    "New chip doubles the speed of phones, its makers say.",
    "Ministers meet in Geneva for talks on a cease-fire.",
    "Goal!",
    "A very long report " + "about markets, games, chips and peace talks " * 20,
    "Shares in the software maker rose three percent.",
]

TINY = {"n_layers": 2, "dim": 32, "hidden_dim": 64, "n_heads": 2, "max_position_embeddings": 64}
THRESHOLDS = [0.5, 0.3, 0.6, 0.45]

MakeFolder = Callable[..., Path]
StartServer = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture(scope="session")
def labels() -> list[str]:
    return LABELS


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    tokenizer = _make_tokenizer()
    config = DistilBertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        n_layers=2,
        dim=32,
        hidden_dim=64,
        n_heads=2,
        max_position_embeddings=64,
        initializer_range=0.25,  # so that answers differ from text to text
        id2label=dict(enumerate(LABELS)),
        label2id={label: i for i, label in enumerate(LABELS)},
    )
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)
    (folder / "metrics.json").write_text(json.dumps({"dataset": "tiny", "max_length": MAX_LENGTH}))
    return folder


@pytest.fixture
def make_folder(model_folder: Path, tmp_path: Path) -> MakeFolder:
    """Write a model of any family with random weights and the tiny tokenizer."""
    return folder_maker(model_folder, tmp_path / "model")


def folder_maker(model_folder: Path, folder: Path) -> MakeFolder:
    def make(family: str, max_length: int = 24, labels: Sequence[str] = LABELS, **config: Any) -> Path:
        torch.manual_seed(0)
        config = {"initializer_range": 0.25} | config
        vocab_size = len(json.loads((model_folder / "tokenizer.json").read_text())["model"]["vocab"])
        names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
        config_class = getattr(transformers, f"{family}Config")
        settings = config_class(vocab_size=vocab_size, **config, **names)
        getattr(transformers, f"{family}ForSequenceClassification")(settings).save_pretrained(folder)
        shutil.copy(model_folder / "tokenizer.json", folder)
        tokenizer_config = json.loads((model_folder / "tokenizer_config.json").read_text())
        tokenizer_config["model_max_length"] = max_length
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        return folder

    return make


@pytest.fixture(scope="session")
def multi_label_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives a text any number of labels, each from a threshold of its own on."""
    make = folder_maker(model_folder, tmp_path_factory.mktemp("kinds") / "topics")
    return make("DistilBert", problem_type="multi_label_classification", label_thresholds=THRESHOLDS, **TINY)


@pytest.fixture(scope="session")
def regression_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers with a number around 1200."""
    folder = tmp_path_factory.mktemp("kinds") / "prices"
    settings = {"problem_type": "regression", "initializer_range": 0.1}
    folder_maker(model_folder, folder)("DistilBert", labels=["price"], **settings, **TINY)
    rescale(folder, 100.0, 1200.0)
    return folder


def rescale(folder: Path, factor: float, offset: float) -> None:
    """Give a regression model's answers another unit."""
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"] *= factor
    weights["classifier.bias"] = weights["classifier.bias"] * factor + offset
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _make_tokenizer() -> Tokenizer:
    """The words of the texts, and all characters for other words.

    Not trained: a trainer breaks ties by chance, and with the ids the answers of a model with random weights change.
    """
    normalizer, pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = {word for text in TEXTS for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))}
    characters = {character for word in words for character in word}
    pieces = words | characters | {f"##{character}" for character in characters}
    vocab = {piece: i for i, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(pieces)])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def checkpoint(model_folder: Path) -> Path:
    """The same model as one .pt file."""
    network = DistilBertForSequenceClassification.from_pretrained(model_folder)
    path = model_folder.with_suffix(".pt")
    torch.save(
        {
            "epoch": 1,
            "model_state_dict": {f"network.{name}": value for name, value in network.state_dict().items()},
            "loss": 0.5,
            "accuracy": 0.9,
            "config": {
                "model_name": "tiny",
                "num_labels": len(LABELS),
                "max_length": MAX_LENGTH,
                "labels": LABELS,
                "encoder_config": json.loads((model_folder / "config.json").read_text()),
                "tokenizer_json": (model_folder / "tokenizer.json").read_text(),
                "metrics": json.loads((model_folder / "metrics.json").read_text()),
            },
        },
        path,
    )
    return path


@pytest.fixture
def folder_copy(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the model folder that a test may damage."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Start uvicorn in a process of its own and wait until /health has made up its mind."""

    @contextmanager
    def start(model: Path, **settings: str) -> Iterator[httpx.Client]:
        port = free_port()
        command = [sys.executable, "-m", "uvicorn", "inference.app:app", "--port", str(port), "--log-level", "warning"]
        log = tmp_path_factory.mktemp("server") / "log"
        settings = {"MODEL_CHECKPOINT": str(model), **settings}
        with running(command, port, log, Server.has_decided, warm=True, **settings) as server:
            yield server.client

    return start


@pytest.fixture(scope="session")
def server(start_server: StartServer, model_folder: Path) -> Iterator[httpx.Client]:
    with start_server(model_folder, MAX_TEXT_CHARS="2000", MAX_BATCH_TEXTS="8") as client:
        yield client


@pytest.fixture(scope="session")
def rows_file(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that the tiny model classifies without a fault, so that every label an artefact changes is a fault."""
    generator = random.Random(0)
    words = " ".join(TEXTS).split()
    texts = [" ".join(generator.choices(words, k=generator.randint(2, 30))) for _ in range(400)]
    answers = ModelLoader(model_folder, "torch").predict_batch(texts)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"text": text, "label": answer["label"]} for text, answer in zip(texts, answers, strict=True)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture(scope="session")
def exported_folder(model_folder: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with an int8 artefact for ONNX Runtime beside it."""
    pytest.importorskip("onnxruntime")

    folder = Path(shutil.copytree(model_folder, tmp_path_factory.mktemp("exported") / "tiny"))
    # Too few rows to calibrate on, so that its answers can be compared with those of the weights.
    few = ["--rows", str(rows_file), "--limit", "99", "--max_drop", "100"]
    export.main([str(folder), "--engine", "onnx", *few])
    return folder


@pytest.fixture
def exported_copy(exported_folder: Path, tmp_path: Path) -> Path:
    """A copy of the exported model that a test may damage."""
    return Path(shutil.copytree(exported_folder, tmp_path / "exported"))
