"""The page of broken scripts: its commands print what it shows, and the code that it quotes is that of the scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployment.documented import blocks, documented
from tests.docs.pages import REPOSITORY, blocks_of_python, shown_after
from tests.docs.test_commands import is_excerpt

PAGE = "docs/BREAK_IT.md"
COMMANDS = [block.name for block in blocks(PAGE)]
HANGS = ("rank0", "uneven", "skip")  # PyTorch's timeout ends these with an error


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_the_page_shows(name: str) -> None:
    commands = documented(PAGE, name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        text=True,
        timeout=400,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    assert result.returncode == (name in HANGS), result.stdout
    assert is_excerpt(shown_after(PAGE, commands), result.stdout), result.stdout


def test_each_script_is_run_broken_diagnosed_and_fixed() -> None:
    scripts = {path.name for path in (REPOSITORY / "learn" / "broken").glob("*.py")} - {"__init__.py", "diagnose.py"}
    run = [documented(PAGE, name).split() for name in COMMANDS]

    for script in scripts:
        assert sum(command[-1].endswith(script) for command in run) == 2, script
        assert sum(command[-2].endswith(script) and command[-1] == "--fixed" for command in run) == 1, script


def test_the_code_that_the_page_quotes_is_in_a_script() -> None:
    sources = [_lines(path.read_text()) for path in (REPOSITORY / "learn" / "broken").glob("*.py")]
    quoted = [_lines(block.code) for block in blocks_of_python(PAGE)]

    assert len(quoted) == 6
    assert [code for code in quoted if not any(code in source for source in sources)] == []


def _lines(code: str) -> str:
    return "\n".join(line.strip() for line in code.splitlines())
