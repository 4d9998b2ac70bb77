"""The operator's page and its settings: the commands work on a real server, its sizing tables are measured."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.settings import Settings
from tests.deployment.documented import REPOSITORY, documented
from tests.inference.conftest import StartServer

PAGE = "docs/OPERATIONS.md"
KEY = "open sesame"


@pytest.fixture
def versions(tmp_path: Path, model_folder: Path) -> Path:
    """Two versions of a model, and a link to the first."""
    folder = tmp_path / "checkpoints"
    for name in ("agnews_v1", "agnews_v2"):
        shutil.copytree(model_folder, folder / name, ignore=shutil.ignore_patterns("native", "onnx"))
    weights = load_file(folder / "agnews_v2" / "model.safetensors")
    weights["classifier.bias"] += torch.tensor([5.0, 0.0, 0.0, 0.0])
    save_file(weights, folder / "agnews_v2" / "model.safetensors", {"format": "pt"})
    (folder / "current").symlink_to("agnews_v1")
    return folder


def run(commands: str, folder: Path, port: int) -> str:
    done = subprocess.run(
        ["bash", "-e", "-c", commands.replace("localhost:7860", f"127.0.0.1:{port}")],
        cwd=folder, env=os.environ | {"API_KEY": KEY}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_is_put_out_and_taken_back_with_the_commands_of_the_page(
    versions: Path, start_server: StartServer
) -> None:
    with start_server(versions / "current", API_KEY=KEY) as client:
        port = client.base_url.port
        first = client.get("/model").json()["revision"]
        shown = run(documented(PAGE, "roll-out"), versions.parent, port)
        second = client.get("/model").json()["revision"]
        run(documented(PAGE, "roll-back"), versions.parent, port)
        assert client.get("/model").json()["revision"] == first != second
        assert second in shown


def test_a_model_that_is_not_sound_leaves_the_old_one_answering(versions: Path, start_server: StartServer) -> None:
    with start_server(versions / "current", API_KEY=KEY) as client:
        first = client.get("/model").json()["revision"]
        (versions / "agnews_v2" / "model.safetensors").write_bytes(b"cut off")
        answer = run(documented(PAGE, "roll-out"), versions.parent, client.base_url.port)
        assert "model_refused" in answer
        assert client.get("/model").json()["revision"] == first
        assert client.post("/predict", json={"text": "Shares fall"}).status_code == 200


def test_the_first_look_shows_health_model_and_load_and_the_metrics_name_the_device(
    versions: Path, start_server: StartServer
) -> None:
    with start_server(versions / "current", DEVICE="cpu") as client:
        shown = run(documented(PAGE, "look"), versions.parent, client.base_url.port)
        assert re.search(
            r'^distrinews_model_info\{engine="torch cpu fp32".* 1\.0$', client.get("/metrics").text, re.MULTILINE
        )
    for word in ('"status"', '"revision"', "distrinews_queue_tokens", "distrinews_worker_failures_total"):
        assert word in shown


def test_the_rows_of_the_sizing_tables_are_those_that_were_measured() -> None:
    section = (REPOSITORY / PAGE).read_text().partition("\n## Size it\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    measured = (REPOSITORY / "benchmarks" / "sizing.md").read_text().splitlines()

    assert len(rows) > 4
    assert [row for row in rows if row not in measured] == []


def test_every_line_of_the_production_file_changes_a_setting_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (REPOSITORY / "deployment" / "production.env").read_text().splitlines()
    told = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    for name, value in told.items():
        monkeypatch.setenv(name, value)

    settings = Settings.from_environment()

    assert len(told) > 8
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    assert [name for name in told if getattr(settings, name.lower()) == defaults[name.lower()]] == []
