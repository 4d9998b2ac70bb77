"""What the pages promise: links that lead somewhere, names that exist, blocks of Python that print what is shown."""

import re
import runpy
from contextlib import redirect_stdout
from io import StringIO
from itertools import chain

import pytest
from torch.distributed.run import get_args_parser

from tests.docs.pages import (
    PAGES,
    REPOSITORY,
    anchors,
    blocks_of_python,
    cited_figures,
    code_names,
    links,
    names_in,
    program_flags,
    prose_flags,
)
from tests.inference.demo_browser import chromium

LEARNING = ("docs/DISTRIBUTED_TRAINING_GUIDE.md", "docs/QUICK_REFERENCE.md", "docs/INTERVIEW_QUESTIONS.md")
FLAGGED = (
    *LEARNING,
    *(f"docs/{name}.md" for name in ("CARDS", "PARALLELISM_STRATEGIES", "PLANNING", "TROUBLESHOOTING")),
    *(f"docs/{name}.md" for name in ("data", "tasks", "methods", "running")),
)
TORCHRUN = {name for action in get_args_parser()._actions for name in action.option_strings}
# Of docker, hf, py-spy, ray, rsync and sbatch: named on a page, and no flags of this program.
FOREIGN = {
    "--checksum",
    "--head",
    "--ipc",
    "--local-dir",
    "--no-requeue",
    "--pid",
    "--pids-limit",
    "--repo-type",
    "--revision",
    "--shm-size",
    "--signal",
}
TERMINALS = {"check.svg", "training.svg"}  # as wide as a terminal, so too small to read on a telephone
# Texts of a drawing that leave the smallest rectangle around their middle, and the pixels of its font when it is shrunk
# to the window.
_TEXTS_OUTSIDE = """() => {
    const drawing = document.querySelector("svg");
    drawing.style.cssText = "max-width: 100%; height: auto";
    const boxes = [...drawing.querySelectorAll("rect")].map((rect) => rect.getBoundingClientRect());
    const outside = [...drawing.querySelectorAll("text")].filter((text) => {
        const own = text.getBoundingClientRect();
        const [x, y] = [(own.left + own.right) / 2, (own.top + own.bottom) / 2];
        const around = boxes.filter((box) => box.left < x && x < box.right && box.top < y && y < box.bottom);
        const [smallest] = around.sort((one, other) => one.width * one.height - other.width * other.height);
        return own.left < smallest.left + 1 || own.right > smallest.right - 1 || own.bottom > smallest.bottom + 1;
    });
    const scale = drawing.getBoundingClientRect().width / drawing.viewBox.baseVal.width;
    return [outside.map((text) => text.textContent), scale * parseFloat(getComputedStyle(drawing).fontSize)];
}"""
BLOCKS = [(page, block) for page in LEARNING for block in blocks_of_python(page)]
PYTHON = [
    (page, block.code, block.printed)
    for page, block in BLOCKS
    if not (block.num_ranks or block.copy_of or block.script)
]


def test_every_relative_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    broken = []
    for link in chain.from_iterable(map(links, PAGES)):
        leads = link.target.exists() and (not link.detail or link.detail in anchors(link.target))
        if not leads:
            broken.append(f"{link.page}: {link.target.relative_to(REPOSITORY)}#{link.detail}")

    assert broken == []


def test_every_function_and_class_that_a_page_names_behind_its_file_is_defined_there() -> None:
    named = list(chain.from_iterable(map(code_names, PAGES)))

    assert len(named) > 60
    gone = [f"{one.page}: {one.target.name}: {one.detail}" for one in named if one.detail not in names_in(one.target)]
    assert gone == []


@pytest.mark.parametrize("page", LEARNING)
def test_a_bold_figure_stands_on_a_page_that_is_cited_with_it(page: str) -> None:
    missing = [
        number
        for number, cited in cited_figures(page)
        if not any(re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", path.read_text()) for path in cited)
    ]

    assert missing == []


@pytest.mark.parametrize("page", ["README.md", *FLAGGED])
def test_a_flag_that_a_page_names_exists(page: str) -> None:
    assert prose_flags(page) - program_flags() - TORCHRUN - FOREIGN == set()


@pytest.mark.parametrize("page", sorted(path.name for path in (REPOSITORY / "docs").glob("*.md")))
def test_the_index_leads_to_every_page(page: str) -> None:
    reached = {link.target for link in links("docs/index.md")}

    assert page == "index.md" or REPOSITORY / "docs" / page in reached


def test_the_diagrams_are_what_their_script_draws() -> None:
    diagrams = runpy.run_path(str(REPOSITORY / "docs" / "site" / "diagrams.py"))["DIAGRAMS"]

    assert len(diagrams) > 2
    for name, draw in diagrams.items():
        assert (REPOSITORY / "docs" / name).read_text() == str(draw()), f"run python docs/site/diagrams.py for {name}"


def test_every_text_of_a_diagram_lies_within_its_box_and_can_be_read_on_a_telephone() -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800})
        for path in sorted(path for path in (REPOSITORY / "docs").glob("*.svg") if path.name not in TERMINALS):
            page.set_content(f"<body style='margin: 16px'>{path.read_text()}</body>")
            problems, font = page.evaluate(_TEXTS_OUTSIDE)
            assert problems == [], path.name
            assert font > 11, path.name


def test_the_pictures_of_the_readme_are_small() -> None:
    sizes = {name: (REPOSITORY / "docs" / name).stat().st_size for name in ("cards.png", "training.svg", "demo.png")}
    assert max(sizes.values()) < 150_000, sizes


@pytest.mark.parametrize(("page", "code", "printed"), PYTHON, ids=lambda text: text.splitlines()[0][:40])
def test_a_block_of_python_prints_what_stands_behind_it(page: str, code: str, printed: str) -> None:
    with redirect_stdout(StringIO()) as out:
        exec(compile(code, page, "exec"), {})

    assert out.getvalue() == printed
