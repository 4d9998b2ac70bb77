"""A server is started, measured and ended whole, and the page is made of what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.serving import measure as measuring
from benchmarks.serving import servers
from benchmarks.serving.page import render
from benchmarks.serving.running import ServerFailure
from benchmarks.serving.servers import Server
from benchmarks.serving.widen import widen_folder

TEXTS = [f"text {i}" for i in range(128)]


def stand_in(command: tuple[str, ...], name: str) -> Server:
    return Server(name, command, "", "its only settings")


def measure(server: Server, folder: Path) -> dict:
    plan = measuring.Plan(folder, TEXTS, {"peer": sys.executable}, seconds=0.5, poisson=False)
    return measuring.measure(server, plan, folder, 0, lambda line: None)


def test_a_measured_server_comes_onto_the_page_and_a_failed_one_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(Path(__file__).with_name("stand_in_server.py"))
    monkeypatch.setattr(measuring, "STEADY_SHARE", 0.05)
    monkeypatch.setattr(measuring, "OVERLOAD_SHARE", 0.05)
    monkeypatch.setitem(servers.SERVERS, "naive", stand_in((script,), "stand-in"))
    measured = measure(servers.SERVERS["naive"], tmp_path)
    assert measured["labels"] == ["World"] * 64
    page = render(
        {
            "facts": {"Measured": "today"},
            "model": "a_model",
            "accuracy_model": "a_model",
            "accuracy": {},
            "workload": {
                "dataset": "some", "texts": 128, "tokens_mean": 4.0, "limit": 16,
                "size": {"dim": 8, "hidden_dim": 16, "n_layers": 2, "n_heads": 2},
                "work": {"padded to 16": 3e9, "unpadded": 2e9, "unpadded, with the saving": 1e9},
            },
            "servers": ["naive", "mosec"],
            "left_out": {"ray": "no --peer_python was given"},
            "versions": {"naive": {"torch": "2.0"}, "mosec": {}},
            "dollars_per_hour": 0.1,
            "seconds": 0.5,
            "poisson": False,
            "wanted_rounds": 3,
            "limits": [{"library": {"8 rows, 1 × 2": 5e9}}],
            "rounds": [{"naive": measured, "mosec": {"failed": "ended with code 1: no such module"}}],
        }
    )  # fmt: skip
    assert "| stand-in |" in page
    assert "torch 2.0" in page
    assert "1 of 3" in page
    assert "mosec (`mosec`): not measured: ended with code 1: no such module" in page
    assert "Ray Serve (`ray`): not measured: no --peer_python was given" in page


def test_a_server_that_ends_at_once_fails_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(ServerFailure, match="ended with code 3: out of order"):
        measure(stand_in(("-c", "print('out of order', flush=True); raise SystemExit(3)"), "broken"), tmp_path)


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
