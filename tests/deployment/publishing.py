"""Runs the publishing commands in processes of their own, against the stand-in for the hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.deployment.documented import REPOSITORY
from tests.deployment.stand_in_hub import WRITER

# The hub's library tries again for half a minute before it gives up; nothing here comes back in that time.
IMPATIENTLY = """
import os, runpy, sys, time
time.sleep = lambda seconds: None
sys.argv = sys.argv[1:]
run = runpy.run_path if os.path.exists(sys.argv[0]) else runpy.run_module
run(sys.argv[0], run_name="__main__")
"""


def run_against(
    address: str, home: Path, *arguments: str, token: str | None = WRITER, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a process that takes `address` for the hub and `home` for its cache."""
    return _run([sys.executable, *arguments], REPOSITORY, _environment(address, home, token) | settings)


def run_page(
    commands: str, address: str, place: Path, model: Path, token: str | None = WRITER, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a page's commands as they stand there, in a checkout in which `model` is ``checkpoints/sample``."""
    for room in ("deployment", "inference", "training"):
        (place / room).symlink_to(REPOSITORY / room)
    (place / "checkpoints").mkdir()
    (place / "checkpoints" / "sample").symlink_to(model)
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return _run(["bash", "-euc", commands], place, _environment(address, place / "hf", token) | path | settings)


def _environment(address: str, home: Path, token: str | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    hub = {"HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "COLUMNS": "200"}
    return inherited | hub | ({"HF_TOKEN": token} if token else {})


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)


def error_line(run: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The one line that a failed command says."""
    assert run.returncode == code, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    assert WRITER not in run.stdout + run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    return line
