"""The page, whole in one file, for a server or the disk; a report is the page of a run."""

from __future__ import annotations

import base64
import errno
import json
import os
from pathlib import Path
from string import Template
from tempfile import TemporaryFile
from typing import Any

from common.errors import UserError
from common.files import write_whole
from learn.cards.history import History
from learn.cards.picture import card_picture, pipeline_picture
from learn.cards.runner import Runner

_PAGE = Path(__file__).with_name("page")


def render_page(run: dict[str, Any] | None = None) -> str:
    """The page, which shows a ``run`` (:func:`run_picture`) or asks its server for one."""
    # A module within a page can be imported by name once an import map says where it is: here, in
    # its own address.
    modules = {f"cards/{path.stem}": _address(path) for path in sorted(_PAGE.glob("*.js"))}
    return Template((_PAGE / "index.html").read_text(encoding="utf-8")).substitute(
        style=(_PAGE / "style.css").read_text(encoding="utf-8"),
        modules=json.dumps({"imports": modules}),
        # Inside a script element nothing but a < could end it.
        run=json.dumps(run, allow_nan=False).replace("<", "\\u003c"),
    )


def run_picture(runner: Runner, history: History) -> dict[str, Any]:
    nodes = [node for node in runner.pipeline.nodes if history.has_run(node.id)]
    return {
        "pipeline": pipeline_picture(runner.pipeline),
        "state": {"run": 1, "busy": False, "next": None} | history.state(),
        "pictures": {node.id: card_picture(runner, node) for node in nodes},
    }


def check_report(path: Path) -> None:
    """Make sure that a report can be written, before a run that may take long."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _not_writable(path, error) from error


def write_report(path: Path, runner: Runner, history: History) -> None:
    """Write the page of a run as one file, which needs no other and no network."""
    page = render_page(run_picture(runner, history))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page.encode())
    except OSError as error:
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> UserError:
    return UserError(f"--report {path}: cannot be written ({error.strerror})", code="not-writable")


def _address(script: Path) -> str:
    text = f"{script.read_text(encoding='utf-8')}\n//# sourceURL=cards/{script.name}\n"
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"
