"""The README's commands for serving, run as they stand there, in order, on a small model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference.servers import REPOSITORY, free_port, running

PORT = "7860"


def _commands() -> list[str]:
    section = (REPOSITORY / "README.md").read_text().split("## Serve\n")[1]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    lines = block[1].replace("\\\n", "").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """A place that looks like the repository, but whose checkpoints are the test's own."""
    for name in ("inference", "training"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    shutil.copytree(model_folder, tmp_path / "checkpoints" / "sample", ignore=shutil.ignore_patterns("native", "onnx"))
    return tmp_path


def _run(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        command, shell=True, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
    return run.stdout


def test_every_command_of_the_readme_for_serving_works_as_it_stands_there(folder: Path) -> None:
    export, serve, predict, predict_batch, from_terminal = _commands()
    # The model of the test answers at random: what int8 changes of that is no loss.
    _run(f"{export.partition('#')[0]} --max_drop 100", folder)
    match = re.fullmatch(rf"MODEL_CHECKPOINT=(\S+) uvicorn inference\.app:app --port {PORT}", serve)
    assert match is not None, serve
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "inference.app:app", "--port", str(port)]
    with running(command, port, folder / "log", MODEL_CHECKPOINT=str(folder / match[1])) as server:
        one = json.loads(_run(predict.replace(PORT, str(port)), folder))
        many = json.loads(_run(predict_batch.replace(PORT, str(port)), folder))
        engine = server.client.get("/model").json()["engine"]["engine"]
    assert engine.endswith("int8")
    assert len(many) == 2
    assert one["label"] in one["probabilities"]
    assert one["label"] in _run(from_terminal, folder)
