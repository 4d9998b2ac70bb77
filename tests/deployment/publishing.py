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
import runpy, sys, time
time.sleep = lambda seconds: None
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_against(
    address: str, home: Path, *command: str, token: str | None = WRITER, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a process that takes `address` for the hub and `home` for its cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    hub = {"HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *command],
        env=inherited | hub | ({"HF_TOKEN": token} if token else {}) | settings,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )


def error_line(run: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The one line that a failed command says."""
    assert run.returncode == code, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    assert WRITER not in run.stdout + run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    return line
