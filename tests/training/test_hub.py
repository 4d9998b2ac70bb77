"""The download path, against a stand-in for the hub on this machine: own HTTP server, real client libraries."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import DistilBertConfig, DistilBertModel

from training.dataset import AG_NEWS_LABELS
from training.tokenized import load_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXTS = [f"Ministers, markets, matches and machines in report {i}" for i in range(12)]
DATASET_CARD = """---
dataset_info:
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': World
          '1': Sports
          '2': Business
          '3': Sci/Tech
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
---
"""
LOAD_MODEL = """
import json, torch
from training.model import NewsClassifier
from training.tokenized import load_tokenizer
torch.manual_seed(0)
tokenizer = load_tokenizer("acme/tiny-encoder", [], 16)
model = NewsClassifier(3, "acme/tiny-encoder", ["a", "b", "c"])
ids = torch.tensor([tokenizer("ministers and markets").input_ids])
print(json.dumps({
    "ids": ids[0].tolist(),
    "max_length": tokenizer.model_max_length,
    "logits": list(model(ids, torch.ones_like(ids)).shape),
    "first_weight": model.network.distilbert.embeddings.word_embeddings.weight[5, :3].tolist(),
}))
"""
LOAD_NEWS = """
import json
from training.dataset import load_news
data = load_news("ag_news")
print(json.dumps({
    "label_names": data.label_names,
    "train": [data.train.texts, data.train.labels.tolist()],
    "test": [data.test.texts, data.test.labels.tolist()],
}))
"""
# The hub's library tries again for 23 seconds before it gives up; nothing here comes back in that time.
TRAIN_IMPATIENTLY = """
import runpy, sys, time
time.sleep = lambda seconds: None
sys.argv[0] = "train_single.py"
runpy.run_module("training.train_single", run_name="__main__", alter_sys=True)
"""
FLAGS = ("--max_length", "16", "--epochs", "1", "--precision", "fp32", "--device", "cpu")


def git_id(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """Answers what huggingface_hub and datasets ask of repositories that lie as folders under ``root``."""

    root: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *values: object) -> None:
        self.asked.append(format % values)

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._send_file(self.root / ("datasets" if match[1] else "models") / match[2], match[3])
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/(.+))?", path):
            self._send_facts(match[1], match[2], match[3] or "revision", match[4] or "")
        else:
            self._send(404, {"error": "no such page"}, {})

    def _send_file(self, repository: Path, name: str) -> None:
        file = repository / name
        headers = {"X-Repo-Commit": COMMIT}
        if not file.is_file():
            code = "EntryNotFound" if repository.is_dir() else "RepoNotFound"
            self._send(404, {"error": code}, {**headers, "X-Error-Code": code})
        else:
            self._send(200, file.read_bytes(), {**headers, "ETag": f'"{git_id(file)}"'})

    def _send_facts(self, kind: str, name: str, what: str, rest: str) -> None:
        repository = self.root / kind / name
        if not repository.is_dir():
            self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return
        files = sorted(path for path in repository.rglob("*") if path.is_file())
        if what == "revision":
            siblings = [{"rfilename": str(path.relative_to(repository))} for path in files]
            facts: dict[str, Any] = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self._send(200, {**facts, kind.rstrip("s") + "Id": name, "lastModified": "2024-01-01T00:00:00.000Z"}, {})
        elif what == "tree":
            self._send_listing(repository, rest.partition("/")[2])
        else:
            length = int(self.headers.get("Content-Length", 0))
            self._send(200, self._entries(repository, self._asked_paths(self.rfile.read(length).decode())), {})

    def _asked_paths(self, body: str) -> list[str]:
        if body.startswith("{"):
            return json.loads(body)["paths"]
        return parse_qs(body)["paths"]

    def _send_listing(self, repository: Path, folder: str) -> None:
        place = repository / folder
        if not place.is_dir():
            self._send(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
            return
        deep = "recursive=true" in self.path.lower()
        found = sorted(place.rglob("*") if deep else place.iterdir())
        self._send(200, self._entries(repository, [str(path.relative_to(repository)) for path in found]), {})

    def _entries(self, repository: Path, names: list[str]) -> list[dict[str, Any]]:
        entries = []
        for name in names:
            path = repository / name
            if path.is_dir():
                entries.append({"type": "directory", "path": name, "oid": "0" * 40, "size": 0})
            elif path.is_file():
                size = path.stat().st_size
                entries.append({"type": "file", "path": name, "oid": git_id(path), "size": size})
        return entries

    def _send(self, status: int, content: Any, headers: dict[str, str]) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def write_encoder(folder: Path) -> None:
    tokenizer = load_tokenizer("tiny", TEXTS, 64)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    size = {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32}
    DistilBertModel(DistilBertConfig(vocab_size=len(tokenizer), **size)).save_pretrained(folder)


def write_dataset(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(DATASET_CARD)
    for split, texts in (("train", TEXTS), ("test", TEXTS[:4])):
        table = pyarrow.table({"text": texts, "label": [i % 4 for i in range(len(texts))]})
        pyarrow.parquet.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    write_encoder(root / "models/acme/tiny-encoder")
    write_dataset(root / "datasets/fancyzhx/ag_news")
    return root


@pytest.fixture
def hub(repositories: Path) -> Iterator[tuple[str, list[str]]]:
    """The stand-in's address, and what it was asked."""
    handler = type("ThisHub", (Hub,), {"root": repositories, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
        server.shutdown()
        thread.join()


@pytest.fixture
def closed_hub() -> str:
    """An address where nobody answers."""
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def with_hub(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`with_hub(address, *arguments)`: Python in a process that takes ``address`` for the hub and has no cache."""

    def run(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return subprocess.run(
            [sys.executable, *arguments],
            env={**inherited, **settings},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


def test_an_encoder_of_the_hub_is_downloaded_and_gets_a_new_head(
    hub: tuple[str, list[str]], with_hub: Callable[..., subprocess.CompletedProcess[str]], repositories: Path
) -> None:
    address, asked = hub
    original = DistilBertModel.from_pretrained(repositories / "models/acme/tiny-encoder")

    run = with_hub(address, "-c", LOAD_MODEL)

    assert run.returncode == 0, f"{run.stderr}\n{asked}"
    found = json.loads(run.stdout)
    assert found["logits"] == [1, 3]
    assert found["max_length"] == 16
    assert len(found["ids"]) == 5
    assert found["first_weight"] == pytest.approx(original.embeddings.word_embeddings.weight[5, :3].tolist())
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert any("/resolve/" in line and name in line for line in asked), name


def test_ag_news_is_downloaded_with_its_label_names(
    hub: tuple[str, list[str]], with_hub: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    address, asked = hub

    run = with_hub(address, "-c", LOAD_NEWS)

    assert run.returncode == 0, f"{run.stderr}\n{asked}"
    found = json.loads(run.stdout)
    assert found["label_names"] == AG_NEWS_LABELS
    assert found["train"] == [TEXTS, [i % 4 for i in range(12)]]
    assert found["test"] == [TEXTS[:4], [0, 1, 2, 3]]
    for split in ("train", "test"):
        assert any("/resolve/" in line and f"data/{split}-" in line for line in asked), split


def error_line(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--model", "acme/tiny-encoder", "--dataset", "sample"),
            r"--model acme/tiny-encoder: .*without a network use --model tiny, or --model FOLDER",
        ),
        (
            ("--model", "tiny", "--dataset", "ag_news"),
            r"--dataset fancyzhx/ag_news: .*without a network use --dataset sample, or --dataset FOLDER",
        ),
    ],
)
def test_a_hub_out_of_reach_gives_one_line_that_says_how_to_go_on(
    closed_hub: str, with_hub: Callable[..., subprocess.CompletedProcess[str]], flags: tuple[str, ...], message: str
) -> None:
    run = with_hub(closed_hub, "-c", TRAIN_IMPATIENTLY, *FLAGS, "--cache_dir", "cache", *flags)

    assert re.search(message, error_line(run))


def test_a_name_that_the_hub_does_not_have_gives_one_line(
    hub: tuple[str, list[str]], with_hub: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    flags = (*FLAGS, "--cache_dir", "cache", "--model", "tiny", "--dataset", "acme/no-such-data")

    run = with_hub(hub[0], "-m", "training.train_single", *flags)

    assert re.search(r"--dataset acme/no-such-data: the hub has no such dataset", error_line(run))
