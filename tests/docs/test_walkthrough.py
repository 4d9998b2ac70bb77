"""The walkthrough's commands, run in its order on one folder, each printing what the page shows behind it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference.engines.native import is_supported
from tests.deployment.documented import documented
from tests.docs.pages import REPOSITORY, shown_after
from tests.docs.test_commands import is_excerpt
from tests.inference.servers import free_port

PAGE = "docs/WALKTHROUGH.md"
STOPS = (
    documented(PAGE, "walk-data"),
    documented(PAGE, "walk-train"),
    documented(PAGE, "walk-evaluate"),
    documented(PAGE, "walk-export"),
    documented(PAGE, "walk-serve"),
    documented(PAGE, "walk-page"),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_supported()[0], reason="the kernels are not compiled here"),
]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like a clone after `make install`, but whose checkpoints are the test's own."""
    for name in ("common", "deployment", "inference", "training", "Makefile", ".venv"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "starter").symlink_to(REPOSITORY / "checkpoints" / "starter")
    return tmp_path


def walk(commands: str, clone: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    told = {"PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100", "LOG_LEVEL": "error"}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", commands],
        cwd=clone,
        env={**os.environ, **told},
        text=True,
        timeout=900,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_walk_from_a_file_of_your_own_to_a_page_prints_what_the_page_shows(clone: Path) -> None:
    port = str(free_port())
    for commands in STOPS:
        printed = walk(commands.replace("7860", port), clone).replace(port, "7860")
        assert is_excerpt(shown_after(PAGE, commands), printed), printed

    assert (clone / "build" / "page" / "index.html").exists()


@pytest.mark.skipif(not (REPOSITORY / ".venv").exists(), reason="make demo runs .venv, which is not here")
def test_the_demo_prints_what_the_walkthrough_shows(clone: Path) -> None:
    commands = documented(PAGE, "walk-demo")
    # What is installed stays as it is: --old-file says that it is not out of date.
    printed = walk(commands.replace("make", "make --old-file=.venv/.installed"), clone)

    assert is_excerpt(shown_demo(), printed), printed


def shown_demo() -> str:
    text = (REPOSITORY / PAGE).read_text()
    return text.split("asks it three headlines:\n\n```text\n", 1)[1].split("```\n", 1)[0]
