"""A command of the serving half that a run starts: what it prints is passed on, and it ends with the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.commands import run_module
from common.errors import StopAsked, UserError


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `program`, still empty, where the command finds it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "program.py"


def test_its_lines_are_passed_on_and_its_error_becomes_the_error_of_the_run(program: Path) -> None:
    program.write_text("import sys\nsys.exit('10 rows\\n20 rows\\nerror: too far off [export-refused]\\n  oil')")
    said: list[str] = []

    with pytest.raises(UserError, match=r"^--distill a: python -m program failed: too far off$"):
        run_module("program", [], "--distill a", said.append)
    assert said == ["10 rows", "20 rows", "  oil"]


@pytest.mark.parametrize(
    ("code", "reason"), [("raise OSError('no space')", "OSError: no space"), ("exit(3)", "it ended with exit code 3")]
)
def test_without_an_error_line_its_last_words_or_its_exit_code_are_the_reason(
    code: str, reason: str, program: Path
) -> None:
    program.write_text(code)

    with pytest.raises(UserError, match=f"failed: {reason}$"):
        run_module("program", [], "--export", lambda line: None)


def test_it_is_stopped_when_the_run_is_asked_to_stop(program: Path) -> None:
    program.write_text(
        "import os, signal, sys\nprint(os.getpid(), file=sys.stderr)\nprint('works', file=sys.stderr)\nsignal.pause()"
    )
    pids: list[int] = []

    def stop(line: str) -> None:
        pids.append(int(line))
        raise StopAsked(75, quiet=True)

    with pytest.raises(StopAsked):
        run_module("program", [], "--distill a", stop)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
