"""Write the notebooks of learn/notebooks: one of each lesson's page, and one that trains, exports
and serves.

    python docs/site/notebooks.py

A notebook is its page, with each block of code as a cell: a script for several ranks is written to
a file and started with torchrun, and the exercise of a lesson is a cell to fill in.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOKS = REPOSITORY / "learn" / "notebooks"
LESSONS = REPOSITORY / "docs" / "lessons"
MAIN_LINE = REPOSITORY / "docs" / "site" / "train_and_serve.md"
# A comment above a block may say what it is for; that of a script names its file.
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[\w-]+): (?P<value>\S+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```\n", re.M | re.S
)
_LINK = re.compile(r"\[([^]]*)\]\((?!\w+://)[^)]*\)")
# Packages that the checker and the demonstrations import. None of them depends on PyTorch, so the
# one that the service has is kept; most services have all of them.
LESSON_NEEDS = "numpy pillow prometheus-client pydantic pyyaml rich tokenizers"
CLONE = """import os

REPOSITORY = "https://github.com/OWNER/distrinews"  # the address of your copy

os.environ["TERM"] = "dumb"  # no progress bars that move
if not os.path.exists("learn"):
    if "/OWNER/" in REPOSITORY:
        raise ValueError("put the address of your copy into REPOSITORY above, and run this cell again")
    !git clone --quiet --depth 1 $REPOSITORY distrinews
    %cd distrinews"""
# A relative link works on GitHub and in a clone; on Kaggle and Colab its words still name the page.
SWITCHES = """[docs/index.md](../../docs/index.md#notebooks-on-kaggle-and-colab) explains how to open this notebook on
Kaggle or Colab, and what to switch on there."""
LESSON_SETUP = f"{CLONE}\n%pip install --quiet {LESSON_NEEDS}"

Cell = dict[str, Any]


def markdown(text: str) -> Cell:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip()}


def code(text: str) -> Cell:
    return {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": text.strip()}


def notebook(cells: list[Cell]) -> str:
    """A file of Jupyter; the cells are numbered, so that the same page gives the same file."""
    # Jupyter would draw the ids at random.
    numbered = [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": numbered, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def notebook_of(path: Path, setup: str) -> str:
    """The notebook of a page; ``setup`` is the cell behind its first words."""
    page = path.read_text(encoding="utf-8")
    cells, end, was_run = [], 0, False
    for block in _BLOCK.finditer(page):
        between = page[end : block.start()]
        cells.append(markdown(_plain(between)))
        if block["kind"] == "text" and not (was_run and not between.strip()):
            cells.append(markdown(block[0]))  # a drawing; what a command prints, its cell prints here
        cells += _cells_of(block, path.stem)
        end, was_run = block.end(), block["kind"] in ("bash", "python")
    cells.append(markdown(_plain(page[end:])))
    title, *rest = [cell for cell in cells if cell["source"]]
    return notebook([title, markdown(SWITCHES), code(setup), *rest])


def _cells_of(block: re.Match[str], lesson_name: str) -> list[Cell]:
    kind, text = block["kind"], block["text"]
    if kind == "python" and block["mark"] == "script":
        # Ranks are processes of their own, which start from a file and see no cell.
        return [code(f"%%writefile {block['value']}\n{text}")]
    if kind == "python":
        return [code(text)]
    if kind == "bash" and f"cp learn/lessons/{lesson_name}.py" in text:
        exercise = (REPOSITORY / "learn" / "lessons" / f"{lesson_name}.py").read_text(encoding="utf-8")
        # Its first cell writes the exercise, so there is nothing to copy.
        lines = [line for line in text.splitlines() if not line.startswith("cp ")]
        return [code(f"%%writefile my_solution.py\n{exercise}"), code("\n".join(f"!{line}" for line in lines))]
    if kind == "bash":
        return [code(f"%%bash --no-raise-error\n{text}")]
    return []


def _plain(text: str) -> str:
    """Without links to other pages, which a notebook does not have beside it, and without marks for tests."""
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.S)
    return _LINK.sub(r"\1", text)


def all_notebooks() -> dict[str, str]:
    """The text of each notebook by its file's name."""
    lessons = {f"{path.stem}.ipynb": notebook_of(path, LESSON_SETUP) for path in sorted(LESSONS.glob("*.md"))}
    return lessons | {f"{MAIN_LINE.stem}.ipynb": notebook_of(MAIN_LINE, CLONE)}


if __name__ == "__main__":
    NOTEBOOKS.mkdir(exist_ok=True)
    for name, text in all_notebooks().items():
        (NOTEBOOKS / name).write_text(text, encoding="utf-8")
        print(f"learn/notebooks/{name}")
