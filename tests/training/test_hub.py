"""The download path, against a stand-in for the hub on this machine: own HTTP server, real client libraries."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import DistilBertConfig, DistilBertModel

from tests.http_servers import JsonHandler, served
from tests.processes import free_port
from training.data.dataset import AG_NEWS_LABELS
from training.data.tokenized import load_tokenizer

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
from training.model.classifier import NewsClassifier
from training.data.tokenized import load_tokenizer
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
LOAD_DATA = """
import json
from training.data.dataset import load_data
data = load_data("ag_news")
print(json.dumps({
    "label_names": data.label_names,
    "train": [data.train.texts, data.train.labels.tolist()],
    "test": [data.test.texts, data.test.labels.tolist()],
}))
"""
LOAD_REVIEWS = """
import json
from common.errors import UserError
from training.config import Selection
from training.data.dataset import LoadOptions, load_data
splits = {"train_split": "training", "test_split": "held_out"}
for config in ("", "french", "german"):
    try:
        data = load_data("acme/reviews", LoadOptions(selection=Selection(config, "v1", **splits)))
        print(json.dumps([data.train.texts, data.test.texts]))
    except UserError as error:
        print(error.code, error)
"""
# The hub's library and ask_hub pause between attempts: here nobody waits.
IMPATIENTLY = "import time\ntime.sleep = lambda seconds: None\n"
TRAIN_IMPATIENTLY = f"""{IMPATIENTLY}
import runpy, sys
sys.argv[0] = "train_ddp.py"
runpy.run_module("training.train_ddp", run_name="__main__", alter_sys=True)
"""
FLAGS = ("--max_length", "16", "--epochs", "1", "--precision", "fp32", "--device", "cpu")


def git_id(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class Hub(JsonHandler):
    """Answers what huggingface_hub and datasets ask of repositories that lie as folders under ``root``."""

    root: Path
    asked: list[str]
    outage: list[int]  # the statuses of the next answers, before any that is good
    protocol_version = "HTTP/1.0"  # not every body is read, so no connection is used twice

    def log_message(self, format: str, *values: object) -> None:
        self.asked.append(format % values)

    def do_GET(self) -> None:
        if self.outage:
            self.send(self.outage.pop(), {"error": "come back later"}, {})
            return
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._send_file(self.root / ("datasets" if match[1] else "models") / match[2], match[3])
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/(.+))?", path):
            self._send_facts(match[1], match[2], match[3] or "revision", match[4] or "")
        else:
            self.send(404, {"error": "no such page"}, {})

    do_HEAD = do_POST = do_GET

    def _send_file(self, repository: Path, name: str) -> None:
        file = repository / name
        headers = {"X-Repo-Commit": COMMIT}
        if not file.is_file():
            code = "EntryNotFound" if repository.is_dir() else "RepoNotFound"
            self.send(404, {"error": code}, {**headers, "X-Error-Code": code})
        else:
            self.send(200, file.read_bytes(), {**headers, "ETag": f'"{git_id(file)}"'})

    def _send_facts(self, kind: str, name: str, what: str, rest: str) -> None:
        repository = self.root / kind / name
        if not repository.is_dir():
            self.send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return
        files = sorted(path for path in repository.rglob("*") if path.is_file())
        if what == "revision":
            siblings = [{"rfilename": str(path.relative_to(repository))} for path in files]
            facts: dict[str, Any] = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self.send(200, {**facts, kind.rstrip("s") + "Id": name, "lastModified": "2024-01-01T00:00:00.000Z"}, {})
        elif what == "tree":
            self._send_listing(repository, rest.partition("/")[2])
        else:
            self.send(200, self._entries(repository, self._asked_paths(self.body().decode())), {})

    def _asked_paths(self, body: str) -> list[str]:
        if body.startswith("{"):
            return json.loads(body)["paths"]
        return parse_qs(body)["paths"]

    def _send_listing(self, repository: Path, folder: str) -> None:
        place = repository / folder
        if not place.is_dir():
            self.send(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
            return
        deep = "recursive=true" in self.path.lower()
        found = sorted(place.rglob("*") if deep else place.iterdir())
        self.send(200, self._entries(repository, [str(path.relative_to(repository)) for path in found]), {})

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
    write_configurations(root / "datasets/acme/reviews")
    return root


def write_configurations(folder: Path) -> None:
    """A dataset of several tables, none of them the default, with splits of other names."""
    lines = ["---", "configs:"]
    for config in ("english", "german"):
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in ("training", "held_out"):
            (folder / config).mkdir(parents=True, exist_ok=True)
            rows = "".join(f"{config} {split} {i},{'ab'[i % 2]}\n" for i in range(6))
            (folder / config / f"{split}.csv").write_text("text,label\n" + rows)
            lines += [f"  - split: {split}", f"    path: {config}/{split}.csv"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


@contextmanager
def serving(repositories: Path, outage: Sequence[int] = ()) -> Iterator[tuple[str, list[str]]]:
    """A stand-in that answers with these statuses before it answers well: its address, and what it was asked."""
    handler = type("ThisHub", (Hub,), {"root": repositories, "asked": [], "outage": [*outage]})
    with served(handler) as address:
        yield address, handler.asked


@pytest.fixture
def hub(repositories: Path) -> Iterator[tuple[str, list[str]]]:
    """The stand-in's address, and what it was asked."""
    with serving(repositories) as found:
        yield found


@pytest.fixture
def closed_hub() -> str:
    """An address where nobody answers."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def with_hub(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`with_hub(address, *arguments, **environment)`: Python in a process that takes ``address`` for the hub.

    Its cache is empty at the test's start.
    """

    def run(address: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
        foreign = ("HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(foreign)}
        return subprocess.run(
            [sys.executable, *arguments],
            env={**inherited, **settings, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


def test_an_encoder_gets_a_new_head_and_ag_news_its_label_names(
    hub: tuple[str, list[str]], with_hub: Callable[..., subprocess.CompletedProcess[str]], repositories: Path
) -> None:
    address, asked = hub
    original = DistilBertModel.from_pretrained(repositories / "models/acme/tiny-encoder")

    run = with_hub(address, "-c", LOAD_MODEL + LOAD_DATA)

    assert run.returncode == 0, f"{run.stderr}\n{asked}"
    model, data = map(json.loads, run.stdout.splitlines())
    assert model["logits"] == [1, 3]
    assert model["max_length"] == 16
    assert len(model["ids"]) == 5
    assert model["first_weight"] == pytest.approx(original.embeddings.word_embeddings.weight[5, :3].tolist())
    assert data["label_names"] == AG_NEWS_LABELS
    assert data["train"] == [TEXTS, [i % 4 for i in range(12)]]
    assert data["test"] == [TEXTS[:4], [0, 1, 2, 3]]
    for name in ("config.json", "model.safetensors", "tokenizer.json", "data/train-", "data/test-"):
        assert any("/resolve/" in line and name in line for line in asked), name


def test_a_hub_that_is_overloaded_for_a_while_is_asked_again(
    repositories: Path, with_hub: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # The hub's library tries six times by itself.
    with serving(repositories, outage=[503, 429] * 4) as (address, asked):
        run = with_hub(address, "-c", IMPATIENTLY + LOAD_DATA)

    assert run.returncode == 0, f"{run.stderr}\n{asked}"
    again, found = run.stdout.splitlines()
    assert re.fullmatch(
        r"--dataset fancyzhx/ag_news: the hub did not answer \(.*(429|503).*\); next attempt in 2 s", again
    )
    assert json.loads(found)["label_names"] == AG_NEWS_LABELS


@pytest.mark.slow
def test_one_of_several_configurations_is_read_at_a_revision_by_the_names_of_its_splits(
    hub: tuple[str, list[str]], with_hub: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    address, asked = hub

    run = with_hub(address, "-c", LOAD_REVIEWS)

    assert run.returncode == 0, f"{run.stderr}\n{asked}"
    none, wrong, found = run.stdout.splitlines()
    listed = "choose one with --dataset_config: english, german"
    assert none == f"data-configuration --dataset acme/reviews: has several configurations; {listed}"
    assert wrong == f"data-configuration --dataset acme/reviews: has no configuration french; {listed}"
    assert json.loads(found) == [[f"german {split} {i}" for i in range(6)] for split in ("training", "held_out")]
    assert any("/acme/reviews/" in line and "/v1" in line for line in asked), asked


def error_line(run: subprocess.CompletedProcess[str], code: int) -> str:
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "tiny", "--dataset", "fancyzhx/ag_news"),
        ("--model", "acme/tiny-encoder", "--dataset", "sample"),
    ],
)
def test_a_hub_that_never_answers_ends_the_start_but_not_the_restarts_of_a_launcher(
    closed_hub: str,
    with_hub: Callable[..., subprocess.CompletedProcess[str]],
    flags: tuple[str, ...],
    tmp_path: Path,
) -> None:
    attempt = tmp_path / "launch/attempt_0/0"
    attempt.mkdir(parents=True)
    launcher = {"TORCHELASTIC_ERROR_FILE": str(attempt / "error.json"), "TORCHELASTIC_RESTART_COUNT": "0"}

    run = with_hub(closed_hub, "-c", TRAIN_IMPATIENTLY, *FLAGS, "--cache_dir", "cache", *flags, **launcher)

    assert re.search(
        r"(--model acme|--dataset fancyzhx)/.*: the hub did not answer \(.*\) in 4 attempts", error_line(run, 1)
    )
    assert run.stdout.count("next attempt in") == 3
    assert not list(tmp_path.rglob("exit_code"))


@pytest.mark.slow
def test_a_name_that_the_hub_does_not_have_gives_one_line(
    hub: tuple[str, list[str]], with_hub: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    flags = (*FLAGS, "--cache_dir", "cache", "--model", "tiny", "--dataset", "acme/no-such-data")

    run = with_hub(hub[0], "-m", "training.train_single", *flags)

    assert re.search(r"--dataset acme/no-such-data: the hub has no such dataset", error_line(run, 2))
    assert "next attempt" not in run.stdout


@pytest.mark.parametrize(
    ("address", "environment", "code", "message"),
    [
        (
            "http://hub.invalid",
            {},
            1,
            r"--model tinny: the name of the hub's host, hub.invalid, could not be resolved, and it is not in",
        ),
        pytest.param(
            "http://hub.invalid",
            {"HF_HUB_OFFLINE": "1"},
            2,
            r"--model tinny: not a folder, .*; did you mean tiny\?; without a network use --model starter",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_without_a_network_a_name_missing_from_the_cache_fails_soon(
    with_hub: Callable[..., subprocess.CompletedProcess[str]],
    address: str,
    environment: dict[str, str],
    code: int,
    message: str,
) -> None:
    flags = (*FLAGS, "--cache_dir", "cache", "--model", "tinny", "--dataset", "sample")

    run = with_hub(address, "-c", TRAIN_IMPATIENTLY, *flags, **environment)

    assert re.search(message, error_line(run, code))
    assert run.stdout.count("next attempt in") == (0 if environment else 2)


@pytest.mark.slow
def test_without_a_network_what_is_in_the_cache_is_used(
    hub: tuple[str, list[str]], with_hub: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    load = IMPATIENTLY + LOAD_DATA + LOAD_MODEL
    first = with_hub(hub[0], "-c", load)
    again = with_hub("http://hub.invalid", "-c", load)

    assert first.returncode == again.returncode == 0, again.stderr
    assert [line for line in again.stdout.splitlines() if "next attempt" not in line] == first.stdout.splitlines()


# Two machines with a process each: local rank 0 of both reads.
PREPARE = """
import os
from training.config import TrainConfig
from training.distributed.group import join_ranks, use_loopback
from training.data.prepare import prepare_model, prepare_data
use_loopback()
with join_ranks("cpu") as mine:
    config = TrainConfig(dataset="ag_news", model="acme/tiny-encoder", max_length=16, cache_dir=os.environ["CACHE"])
    news = prepare_data(config, mine, print)
    print(len(news.train_index), prepare_model(config, mine, news, "fp32", print)[0].network.num_parameters())
"""


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_machines_that_share_a_cache_download_once(
    repositories: Path, start: Callable[..., Any], tmp_path: Path, shared: bool
) -> None:
    port = str(free_port())
    with serving(repositories) as (address, asked):
        group = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        group |= {"MASTER_PORT": port, "HF_ENDPOINT": address, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
        machines = [
            start(
                [sys.executable, "-c", PREPARE],
                wait=False,
                env={
                    **group,
                    "RANK": str(rank),
                    "HF_HOME": str(tmp_path / ("hf" if shared else f"hf_{rank}")),
                    "CACHE": str(tmp_path / f"cache_{rank}"),
                },
            )
            for rank in (0, 1)
        ]
        assert [machine.wait() for machine in machines] == [0, 0], [machine.err for machine in machines]

    assert machines[0].out.splitlines()[-1] == machines[1].out.splitlines()[-1]
    for name in ("/config.json", "model.safetensors", "data/train-"):
        downloads = [line for line in asked if line.startswith('"GET') and "/resolve/" in line and name in line]
        assert len(downloads) == (1 if shared else 2), downloads
    assert not list(tmp_path.rglob(".distrinews-*"))
