from __future__ import annotations

import ast
import json
import os
import re
import resource
import shutil
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DistilBertConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    pipeline,
)

from common.errors import UserError
from common.model_folder import read_saved_model
from common.seen_texts import SeenTexts
from common.text import TextTokenizer
from inference.engines.model_loader import ModelLoader
from inference.http.schemas import ModelResponse
from inference.settings import Settings
from training.checkpointing.export import FinishedModel, check_output, write_model
from training.data.dataset import AG_NEWS_LABELS, load_data
from training.data.tokenized import load_tokenizer
from training.model.classifier import NewsClassifier
from training.publishing.model_card import is_on_the_hub, model_card, recorded_name
from training.tasks import Classification

MAX_LENGTH = 32
FOLDER_FILES = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "metrics.json",
    "seen_texts.bin",
    "README.md",
}


def write_tiny(
    folder: Path, label_names: list[str] = AG_NEWS_LABELS, seed: int = 0, cleaning: str = "news", **size: int
) -> NewsClassifier:
    torch.manual_seed(seed)
    tokenizer = load_tokenizer("tiny", load_data("sample").train.texts[:200], MAX_LENGTH)
    model = NewsClassifier(len(label_names), "tiny", label_names, vocab_size=len(tokenizer))
    if size:
        model._adopt(
            AutoModelForSequenceClassification.from_config(DistilBertConfig(**size)), Classification(label_names)
        )
    for parameter in model.parameters():  # answers that differ from text to text
        parameter.data.mul_(3)
    labels = np.arange(40) % len(label_names)
    figures = Classification(label_names).metrics(np.eye(len(label_names))[labels], labels)
    metrics = {
        "dataset": "sample",
        "base_model": "tiny",
        "max_length": MAX_LENGTH,
        "best_epoch": 2,
        "created": "2025-01-01",
        "version": "v3",
        "train_rows": 200,
        "test": figures,
        "validation": figures,
    }
    settings, seen = {"text_cleaning": cleaning}, SeenTexts.of(["Oil prices rise"])
    finished = FinishedModel(
        model.network.config, model.state_dict(), tokenizer, metrics, settings, Classification, seen
    )
    write_model(finished, folder)
    return model.eval()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NewsClassifier]:
    folder = tmp_path_factory.mktemp("export") / "model"
    return folder, write_tiny(folder)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return load_data("sample").test.texts[:8]


def logits_of(model: NewsClassifier, folder: Path, texts: list[str]) -> torch.Tensor:
    tokenizer = TextTokenizer.from_file(folder / "tokenizer.json", MAX_LENGTH)
    with torch.inference_mode():
        return torch.cat(
            [
                model(torch.tensor([encoded.ids]), torch.ones(1, len(encoded.ids), dtype=torch.int64))
                for encoded in tokenizer.encode(texts)
            ]
        )


def read_checkpoint(folder: Path) -> dict[str, Any]:
    return torch.load(folder.with_suffix(".pt"), map_location="cpu", weights_only=True)


def test_the_folder_holds_what_is_documented_and_nothing_else(written: tuple[Path, NewsClassifier]) -> None:
    folder, _ = written

    assert {path.name for path in folder.iterdir()} == FOLDER_FILES
    assert {path.name for path in folder.parent.iterdir()} == {"model", "model.pt"}
    assert json.loads((folder / "metrics.json").read_text())["best_epoch"] == 2


def test_a_model_carries_the_version_that_its_trainer_gave_it(written: tuple[Path, NewsClassifier]) -> None:
    folder, _ = written

    assert "Version v3. Labels: " in (folder / "README.md").read_text()
    assert ModelResponse.of(ModelLoader(folder), Settings()).version == "v3"


def test_a_transformers_pipeline_gives_the_same_answers_by_label_name(
    written: tuple[Path, NewsClassifier], texts: list[str]
) -> None:
    folder, model = written
    expected = logits_of(model, folder, texts)

    classify = pipeline("text-classification", model=str(folder), top_k=None, function_to_apply="none")
    answers = classify(texts, truncation=True)

    for answer, row in zip(answers, expected, strict=True):
        scores = {entry["label"]: entry["score"] for entry in answer}
        assert [scores[name] for name in AG_NEWS_LABELS] == pytest.approx(row.tolist(), abs=1e-5)


def test_the_pipeline_cuts_at_the_max_length_of_training(written: tuple[Path, NewsClassifier]) -> None:
    folder, _ = written

    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert tokenizer.model_max_length == MAX_LENGTH
    assert len(tokenizer("market " * 100, truncation=True)["input_ids"]) == MAX_LENGTH


def test_the_configuration_is_one_that_any_transformers_reads(written: tuple[Path, NewsClassifier]) -> None:
    folder, model = written
    config = (folder / "config.json").read_text()

    network = AutoModelForSequenceClassification.from_pretrained(folder)

    assert "row_dropout" not in config
    assert [network.config.id2label[i] for i in range(4)] == AG_NEWS_LABELS
    assert network.config.architectures == ["DistilBertForSequenceClassification"]
    weights = model.network.state_dict()
    assert load_file(folder / "model.safetensors").keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in network.state_dict().items())


def test_the_one_file_model_has_the_documented_keys(written: tuple[Path, NewsClassifier]) -> None:
    folder, model = written

    checkpoint = read_checkpoint(folder)

    assert list(checkpoint) == ["epoch", "model_state_dict", "loss", "accuracy", "config"]
    assert (checkpoint["epoch"], checkpoint["accuracy"]) == (2, 1.0)
    assert checkpoint["loss"] > 0
    config = checkpoint["config"]
    assert {key: config[key] for key in ("model_name", "num_labels", "max_length", "labels")} == {
        "model_name": "tiny",
        "num_labels": 4,
        "max_length": MAX_LENGTH,
        "labels": AG_NEWS_LABELS,
    }
    assert checkpoint["model_state_dict"].keys() == model.state_dict().keys()


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_from_saved_gives_the_classifier_back(
    written: tuple[Path, NewsClassifier], texts: list[str], suffix: str
) -> None:
    folder, model = written

    again = NewsClassifier.from_saved(read_saved_model(folder.with_suffix(suffix))).eval()

    assert again.label_names == AG_NEWS_LABELS
    torch.testing.assert_close(logits_of(again, folder, texts), logits_of(model, folder, texts))


def test_serving_answers_the_same_from_folder_and_file(written: tuple[Path, NewsClassifier], texts: list[str]) -> None:
    folder, model = written
    expected = logits_of(model, folder, texts).double().softmax(dim=1)

    from_folder, from_file = ModelLoader(folder), ModelLoader(folder.with_suffix(".pt"))

    assert from_folder.predict_batch(texts) == from_file.predict_batch(texts)
    assert (from_folder.labels, from_folder.max_length, from_folder.metadata) == (
        from_file.labels,
        from_file.max_length,
        from_file.metadata,
    )
    for answer, row in zip(from_folder.predict_batch(texts), expected, strict=True):
        assert list(answer["probabilities"].values()) == pytest.approx(row.tolist(), abs=1e-6)


def test_a_replaced_folder_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny(folder, ["bad", "good"], seed=1)
    (folder / "onnx").mkdir()
    (folder / "onnx/model_int8.onnx").write_bytes(b"of the old model")

    write_tiny(folder, seed=2)

    assert {path.name for path in folder.iterdir()} == FOLDER_FILES
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model.pt"}
    assert ModelLoader(folder).labels == AG_NEWS_LABELS
    assert read_checkpoint(folder)["config"]["labels"] == AG_NEWS_LABELS


def test_leftovers_of_an_export_cut_short_do_no_harm(tmp_path: Path) -> None:
    for name in (".model.abcd1234.tmp", ".model.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half.bin").write_bytes(b"half")

    write_tiny(tmp_path / "model")

    assert {path.name for path in tmp_path.iterdir()} == {"model", "model.pt"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == FOLDER_FILES


def test_the_model_card_shows_labels_and_results(written: tuple[Path, NewsClassifier]) -> None:
    folder, _ = written

    card = ModelCard.load(folder / "README.md")

    assert "Labels: World, Sports, Business, Sci/Tech." in card.text
    assert "| Sports | 1.000 | 1.000 | 1.000 | 10 |" in card.text
    assert card.data.pipeline_tag == "text-classification"
    assert [(result.metric_type, result.metric_value) for result in card.data.eval_results] == [
        ("accuracy", 1.0),
        ("f1", 1.0),
    ]


def test_the_model_card_names_what_the_hub_has_and_no_path_of_this_machine(
    written: tuple[Path, NewsClassifier], tmp_path: Path
) -> None:
    metrics = json.loads((written[0] / "metrics.json").read_text())
    on_the_hub = {"base_model": "distilbert-base-uncased", "dataset": "fancyzhx/ag_news"}
    here = {"base_model": str(tmp_path / "encoder"), "dataset": "../news/ag_news"}

    public = ModelCard(model_card(metrics | on_the_hub, "news", "news"))
    local = ModelCard(model_card(metrics | here, "news", "none"))

    assert (public.data.base_model, public.data.datasets) == ("distilbert-base-uncased", ["fancyzhx/ag_news"])
    assert (local.data.get("base_model"), local.data.get("datasets")) == (None, None)
    assert "`encoder` fine-tuned on `ag_news`" in local.text
    assert str(tmp_path) not in str(local)
    assert "../news" not in str(local)


@pytest.mark.parametrize("task", ["classification", "multi_label", "pair", "regression"])
@pytest.mark.parametrize("cleaning", ["news", "none"])
def test_only_the_card_of_a_model_of_news_speaks_of_news(
    written: tuple[Path, NewsClassifier], task: str, cleaning: str
) -> None:
    metrics = json.loads((written[0] / "metrics.json").read_text()) | {"task": task, "dataset": "../tickets.csv"}
    labels = [f"intent {number}" for number in range(150)]
    metrics["test"] = {"rows": 9, "loss": 0.5, "accuracy": 0.5, "macro_f1": 0.5, "labels": labels}

    card = ModelCard(model_card(metrics, "tickets", cleaning))

    assert "news" not in str(card).lower().replace("--clean news", "").replace("distrinews", "")
    assert "Oil" not in str(card)
    assert re.search(r"Labels: intent 0, intent 1, .* and 1\d\d more\. Texts", card.text)
    assert '{"text": ' in card.text if task == "pair" else '{"text": ' not in card.text


def test_the_card_of_a_model_of_news_says_so_whatever_its_data_are_called(
    written: tuple[Path, NewsClassifier],
) -> None:
    metrics = json.loads((written[0] / "metrics.json").read_text()) | {"dataset": "../copy"}

    card = ModelCard(model_card(metrics, "mine", "news"))

    assert "A news classifier" in card.text
    assert "news" in card.data.tags
    assert card.data.language == "en"


def test_the_model_card_shows_names_as_they_are_and_obeys_none(written: tuple[Path, NewsClassifier]) -> None:
    name, shown = '<img src=x>|![a](b)"\n\n# b` *c*', r'<img src=x>|![a](b)"\n\n# b` *c*'
    metrics = json.loads((written[0] / "metrics.json").read_text())
    test = metrics["test"]
    test["labels"] = [name, *test["labels"][1:]]
    test["per_class"] = dict(zip(test["labels"], test["per_class"].values(), strict=True))
    metrics |= {"base_model": name, "dataset": name, "version": name, "distilled_from": name, "unlabelled_rows": 0}

    text = ModelCard(model_card(metrics, name, "none")).text
    blocks = MarkdownIt("commonmark").enable("table").parse(text)
    (program,) = (block.content for block in blocks if block.type == "fence")
    pieces = [piece for block in blocks for piece in block.children or ()]
    cells = [cell.content for before, cell in pairwise(blocks) if before.type == "td_open"]

    assert {piece.type for piece in pieces} <= {"text", "text_special", "code_inline", "softbreak"}
    assert [block.tag for block in blocks if block.type == "heading_open"] == ["h1", "h2", "h2"]
    assert len(cells) == 5 * len(test["labels"])
    assert "".join(piece.content for piece in pieces if piece.type == "code_inline").count(shown) == 3
    assert "".join(piece.content for piece in pieces if piece.type != "code_inline").count(shown) == 4
    assert ast.parse(program).body[1].value.keywords[0].value.value == name


def test_a_model_is_written_without_a_copy_of_it_in_memory(tmp_path: Path) -> None:
    write_tiny(tmp_path / "warm")
    tracemalloc.start()

    model = write_tiny(tmp_path / "model", vocab_size=4096, dim=512, hidden_dim=2048, n_layers=4, n_heads=8)

    most = tracemalloc.get_traced_memory()[1]  # of Python's objects; torch's tensors are not among them
    tracemalloc.stop()
    assert most < 0.5 * sum(weight.nbytes for weight in model.state_dict().values())


@pytest.mark.parametrize(
    ("kind", "name"),
    [(PreTrainedModel, "save_pretrained"), (PreTrainedTokenizerBase, "save_pretrained"), (torch, "save")],
)
def test_a_disk_that_fills_up_is_an_error_of_the_system_and_the_older_model_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, name: str
) -> None:
    write_tiny(tmp_path / "model", seed=1)
    before = (tmp_path / "model/model.safetensors").read_bytes()
    save, (soft, hard) = getattr(kind, name), resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_with_little_room(*arguments: Any, **options: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            return save(*arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(kind, name, save_with_little_room)
    with pytest.raises(OSError, match="File too large"):
        write_tiny(tmp_path / "model", seed=2)

    assert (tmp_path / "model/model.safetensors").read_bytes() == before


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root writes into every folder, whatever its mode; anybody else is as good as nobody."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_check_output_refuses_what_cannot_be_replaced() -> None:
    with TemporaryDirectory() as folder:  # nobody may look into pytest's
        model = Path(folder, "model")
        model.mkdir()
        model.chmod(0o777)
        Path(folder).chmod(0o555)
        with as_nobody(), pytest.raises(UserError, match=rf"--output_dir {model}: {folder} cannot be written"):
            check_output(model)
        Path(folder).chmod(0o755)


def test_check_output_accepts_new_empty_and_model_folders(tmp_path: Path, written: tuple[Path, NewsClassifier]) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree(written[0], tmp_path / "model")

    (tmp_path / "model" / "native").mkdir()  # an export

    for name in ("new/deeper", "empty", "model"):
        check_output(tmp_path / name)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "model"]


def test_check_output_of_runs_that_start_together_in_one_folder_do_not_refuse_each_other(
    tmp_path: Path,
) -> None:
    """Another run's whole check passes each time that this one has created or is about to remove a file."""
    busy: list[str] = []

    def after(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.remove") and str(arguments[0]).startswith(str(tmp_path)) and busy == ["one"]:
            busy.append("other")
            check_output(tmp_path / "other")
            busy.remove("other")

    sys.addaudithook(after)
    busy.append("one")
    try:
        check_output(tmp_path / "model")
    finally:
        busy.clear()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", ["notes.md", "my_rows.csv", ".git/", "plots/"])
def test_check_output_refuses_a_model_folder_with_anything_that_would_be_removed(
    tmp_path: Path, written: tuple[Path, NewsClassifier], other: str
) -> None:
    model = Path(shutil.copytree(written[0], tmp_path / "model"))
    (model / other).mkdir() if other.endswith("/") else (model / other).write_text("years of work")

    with pytest.raises(UserError, match=rf"holds {other.rstrip('/')}, which the finished model would remove"):
        check_output(model)


def test_check_output_refuses_what_stands_where_the_run_will_write(tmp_path: Path) -> None:
    (tmp_path / "a.run").touch()
    (tmp_path / "b.pt").mkdir()
    with pytest.raises(UserError, match=r"a\.run, which the run would write, is no folder"):
        check_output(tmp_path / "a")
    with pytest.raises(UserError, match=r"b\.pt, which the run would write, is no file"):
        check_output(tmp_path / "b")


def test_a_folder_that_is_gone_later_is_not_taken_for_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme" / "news").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    recorded = recorded_name("acme/news")
    monkeypatch.chdir("/")
    assert not is_on_the_hub(recorded)
    assert is_on_the_hub(recorded_name("acme/news"))


MARKUP = [
    "return <b>\\\\frac{a}{b}</b>; // C:\\\\Users\\\\news",
    "Stocks  #39;s fall &amp; rise <p>on Wall Street</p>",
    "plain news of a cup final",
]


@pytest.mark.parametrize("cleaning", ["news", "none"])
def test_the_pipeline_called_as_the_card_says_and_the_server_give_one_text_one_answer(
    tmp_path: Path, cleaning: str
) -> None:
    folder = tmp_path / "model"
    write_tiny(folder, cleaning=cleaning)
    card = (folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert ("clean_text" in code) == (cleaning == "news")
    code = code.replace('model="model"', f"model={str(folder)!r}, top_k=None")
    for text in MARKUP:
        *load, ask = code.replace('"Oil prices climb to a record as refineries close"', repr(text)).strip().splitlines()
        names: dict[str, Any] = {}
        exec("\n".join([*load, f"answer = {ask}"]), names)
        (scores,) = names["answer"]
        expected = {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in scores}
        for place in (folder, folder.with_suffix(".pt")):
            assert ModelLoader(place).predict(text)["probabilities"] == expected
