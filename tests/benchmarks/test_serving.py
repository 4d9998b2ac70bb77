"""The load client accounts for every request, and a server is started, measured and stopped with all its processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.harness import ROOT
from benchmarks.serving import measure as measuring
from benchmarks.serving.client import BROKEN, NO_ANSWER, Client, Load
from benchmarks.serving.page import render
from benchmarks.serving.running import ServerFailure, started
from benchmarks.serving.servers import Server
from benchmarks.serving.widen import widen_folder
from tests.benchmarks.stand_in_server import StandInServer

TEXTS = [f"text {i}" for i in range(128)]
SCRIPT = str(Path(__file__).with_name("stand_in_server.py"))


@pytest.fixture
def server() -> Iterator[StandInServer]:
    with StandInServer() as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield running
        running.shutdown()


def send(server: StandInServer, folder: Path, texts: list[str], **how: Any) -> dict[str, Any]:
    bodies = folder / "bodies.jsonl"
    bodies.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    load = Load(str(bodies), server.server_port, "/predict", 1, **how)
    client = Client(load)
    began = client.closed_loop() if load.clients else client.open_loop()
    return client.tally.summary(load, began)


def test_a_closed_loop_counts_what_the_server_answered(server: StandInServer, tmp_path: Path) -> None:
    summary = send(server, tmp_path, ["a", "b"], clients=3, seconds=0.3)
    assert summary["outcomes"] == {"200": server.num_answered}
    assert summary["texts_answered"] == server.num_answered >= 3
    assert summary["texts_per_second"] > 0


def test_an_open_loop_sends_at_its_rate_whatever_the_server_answers(server: StandInServer, tmp_path: Path) -> None:
    texts = ["a", "refuse", "b", "hang up"]
    summary = send(server, tmp_path, texts, rate=100, seconds=0.4, patience=5)
    assert summary["outcomes"] == {"200": 20, "503": 10, BROKEN: 10}
    assert set(summary["latency"]["503"]) == {"p50", "p95", "p99", "max"}


def test_random_gaps_send_as_many_requests(server: StandInServer, tmp_path: Path) -> None:
    assert send(server, tmp_path, ["a"], rate=200, seconds=0.5, poisson=True)["outcomes"] == {"200": 100}


def test_requests_without_an_answer_are_counted(server: StandInServer, tmp_path: Path) -> None:
    summary = send(server, tmp_path, ["keep silent", "a"], rate=50, seconds=0.2, patience=0.3)
    assert summary["outcomes"] == {"200": 5, NO_ANSWER: 5}


def test_a_disconnected_client_does_not_reconnect(server: StandInServer, tmp_path: Path) -> None:
    summary = send(server, tmp_path, ["hang up"], clients=4, seconds=0.2)
    assert summary["outcomes"] == {BROKEN: 4}
    assert summary["texts_per_second"] == 0


def stand_in(*command: str) -> Server:
    return Server("stand-in", command, "", "its only settings")


def measure(server: Server, folder: Path) -> dict[str, Any]:
    plan = measuring.Plan(folder, TEXTS, {"peer": sys.executable}, seconds=0.5, poisson=False, shares=(0.05, 0.05))
    return measuring.measure(server, plan, folder, 0)


def test_a_measured_server_is_on_the_page_and_a_failed_one_with_its_reason(tmp_path: Path) -> None:
    measured = measure(stand_in(SCRIPT), tmp_path)
    assert measured["labels"] == ["World"] * 64
    size = {"dim": 8, "hidden_dim": 16, "n_layers": 2, "n_heads": 2}
    run = {
        "facts": {"Measured": "today"},
        "model": "a_model",
        "accuracy_model": "a_model",
        "accuracy": {},
        "workload": {"dataset": "some", "texts": 128, "tokens_mean": 4.0, "limit": 16, "size": size},
        "servers": ["naive", "mosec"],
        "left_out": {"ray": "no --peer_python was given"},
        "versions": {"naive": {"torch": "2.0"}, "mosec": {}},
        "dollars_per_hour": 0.1,
        "seconds": 0.5,
        "poisson": False,
        "wanted_rounds": 3,
        "rounds": [{"naive": measured, "mosec": {"failed": "ended with code 1: no such module"}}],
    }

    page = render({"avx2": run | {"instruction_set": "avx2"}})

    assert f"| {measured['64 clients']['texts_per_second']:,.1f} |" in page
    assert "mosec (`mosec`): not measured: ended with code 1: no such module" in page
    assert "Ray Serve (`ray`): not measured: no --peer_python was given" in page


def test_a_server_is_stopped_with_the_processes_that_it_started(tmp_path: Path) -> None:
    worker = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    code = f"{worker}; exec(open('{SCRIPT}').read())"
    with started(stand_in("-c", code), tmp_path, sys.executable) as running:
        assert len(running.tree.pids()) == 2
        assert running.tree.pss_bytes() > 1e6
        assert running.tree.cpu_seconds() > 0
    assert running.tree.pids() == []


def test_a_server_that_ends_at_once_fails_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(ServerFailure, match="ended with code 3: out of order"):
        measure(stand_in("-c", "print('out of order', flush=True); raise SystemExit(3)"), tmp_path)


def test_a_widened_model_gives_the_same_logits(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, num_labels=4
    )
    narrow = BertForSequenceClassification(config).eval()
    for parameter in narrow.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # biases and norms too, which start at 0 and 1
    narrow.save_pretrained(tmp_path / "narrow")
    widen_folder(tmp_path / "narrow", tmp_path / "wide")
    wide = BertForSequenceClassification.from_pretrained(tmp_path / "wide").eval()
    ids = torch.randint(0, 50, (3, 17))
    with torch.inference_mode():
        assert wide.config.hidden_size == 48
        torch.testing.assert_close(wide(ids).logits, narrow(ids).logits, atol=1e-4, rtol=1e-4)


def test_repeated_blocks_are_those_of_the_source(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=4
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path / "narrow")
    widen_folder(tmp_path / "narrow", tmp_path / "deep", blocks=5)

    deep, loaded = BertForSequenceClassification.from_pretrained(tmp_path / "deep", output_loading_info=True)

    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    assert deep.config.num_hidden_layers == 5
    blocks = deep.bert.encoder.layer
    assert torch.equal(blocks[4].output.dense.weight, blocks[0].output.dense.weight)
    assert not torch.equal(blocks[3].output.dense.weight, blocks[0].output.dense.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("serving_load --servers ours,ours_onnx --model {}", "onnx"),
        ("sizing {} --cores 1", "onnx"),
        pytest.param(
            "request_cost --model {}",
            "2 workers",
            marks=pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed"),
        ),
    ],
)
def test_a_serving_benchmark_measures_an_exported_model(
    command: str, shown: str, exported_folder: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    words = [sys.executable, "-m", *f"benchmarks.{command}".format(exported_folder).split(), "--output", str(page)]
    words += ["--texts", "common/sample_news", "--rounds", "1", "--seconds", "0.5"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert shown in page.read_text()
    assert "not measured" not in page.read_text()
