"""The project's pages, and what stands in them: links, headings, names of code, blocks."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

from tests.deployment.documented import REPOSITORY
from training.config import TrainConfig

PAGES = sorted(
    str(path.relative_to(REPOSITORY))
    for pattern in (
        "*.md",
        "docs/*.md",
        "docs/lessons/*.md",
        "benchmarks/*.md",
        "deployment/*.md",
        "common/sample_news/*.md",
    )
    for path in REPOSITORY.glob(pattern)
)
_ROOMS = ("common", "training", "inference", "loop", "learn", "deployment")
_FENCE = re.compile(r"^(`{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<address>[^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
# [step.py](../training/run/step.py): `train_step`, `StepLog.sync`
_NAMES = re.compile(r"\]\((?P<address>[^()\s]+\.py)\): (?P<names>`[\w.]+`(?:, `[\w.]+`)*)")
_FIGURE = re.compile(r"\*\*(-?\d[\d.,]*%?)\*\*")
# <!-- ranks: 2 --> is before a script that torchrun starts, <!-- file: PATH --> before a copy of a file, and
# <!-- script: NAME --> before a script that is to be saved under that name.
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>ranks|file|script): (?P<value>\S+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_DIFF = re.compile(r"^<!-- diff: (\S+) (\S+) -->\n```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Reference:
    """Something in a page that must exist elsewhere."""

    page: str
    target: Path
    detail: str  # an anchor, or the name of a function or a class


def links(page: str) -> list[Reference]:
    """The links of a page to files and headings of the repository."""
    text = _FENCE.sub("", _text(page))
    found = []
    for match in _LINK.finditer(text):
        address, _, anchor = match["address"].partition("#")
        if "://" not in address and not address.startswith("mailto:"):
            found.append(Reference(page, _target(page, address), anchor))
    return found


def code_names(page: str) -> list[Reference]:
    """The functions, classes and constants that a page names behind a link to their file."""
    return [
        Reference(page, _target(page, match["address"]), name)
        for match in _NAMES.finditer(_text(page))
        for name in re.findall(r"[\w.]+", match["names"])
    ]


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings."""
    found: dict[str, int] = {}
    for heading in _HEADING.findall(_FENCE.sub("", path.read_text())):
        anchor = slug(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading))
        found[anchor] = found.get(anchor, -1) + 1
    return frozenset(f"{anchor}-{n}" if n else anchor for anchor, times in found.items() for n in range(times + 1))


def slug(heading: str) -> str:
    """The anchor that GitHub and the site make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def names_in(path: Path) -> frozenset[str]:
    """What a Python file defines: functions, classes, constants, and `Class.method` and `Class.field`."""
    tree = ast.parse(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    members = (f"{owner.name}.{name}" for owner in classes for node in owner.body for name in _defined(node))
    return frozenset([name for node in tree.body for name in _defined(node)]) | frozenset(members)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@dataclass(frozen=True)
class Block:
    """A block of Python of a page.

    Args:
        code: as it stands there.
        printed: the block of text behind it.
        num_ranks: that torchrun starts it on; 0 for one process without torchrun.
        copy_of: the file that it shows.
        script: the name under which it is to be saved.
    """

    code: str
    printed: str
    num_ranks: int = 0
    copy_of: str = ""
    script: str = ""


def blocks_of_python(page: str) -> list[Block]:
    blocks = list(_BLOCK.finditer(_text(page)))
    found = []
    for block, behind in zip_longest(blocks, blocks[1:]):
        if block["kind"] == "python":
            printed = behind["text"] if behind and behind["kind"] == "text" else ""
            num_ranks = int(block["value"]) if block["mark"] == "ranks" else 0
            copy_of, script = (block["value"] if block["mark"] == mark else "" for mark in ("file", "script"))
            found.append(Block(block["text"], printed, num_ranks, copy_of, script))
    return found


def scripts(page: str) -> dict[str, str]:
    """The scripts that a page shows, by the names under which they are to be saved and started."""
    return {block.script: block.code for block in blocks_of_python(page) if block.script}


def diffs(page: str) -> list[tuple[str, str, str]]:
    """The differences between two files that a page shows: both paths, and the block."""
    return _DIFF.findall(_text(page))


def shown_after(page: str, command: str) -> str:
    """The block of text that stands behind a block of commands: what they print.

    Args:
        page: that shows both.
        command: the commands as they stand there.
    """
    rest = _text(page).split(f"```bash\n{command}```\n", 1)[1]
    block = re.match(r"\n```text\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
    assert block is not None, f"{page}: no output behind\n{command}"
    return block[1]


def prose_flags(page: str) -> set[str]:
    """The flags that a page names outside its blocks."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", _FENCE.sub("", _text(page))))


def program_flags() -> set[str]:
    """The flags in the sources of the program's commands, and those of the training configuration."""
    sources = (path for room in _ROOMS for path in (REPOSITORY / room).rglob("*.py"))
    quoted = {flag for path in sources for flag in re.findall(r"[\"'](--[a-z][\w-]*)[\"' =]", path.read_text())}
    return quoted | {f"--{name}" for name in TrainConfig.model_fields}


def inline_commands(page: str) -> list[Path]:
    """The scripts and modules that commands within a page's lines start."""
    commands = [match for match in re.findall(r"`([^`\n]+)`", _FENCE.sub("", _text(page))) if " " in match]
    scripts = [
        REPOSITORY / path for command in commands for path in re.findall(r"(?<!\S)training/\S+\.(?:py|sh)", command)
    ]
    modules = [name for command in commands for name in re.findall(r"python -m (training[\w.]*)", command)]
    places = [REPOSITORY / name.replace(".", "/") for name in modules]
    return scripts + [place / "__main__.py" if place.is_dir() else place.with_suffix(".py") for place in places]


def cited_figures(page: str) -> list[tuple[str, list[Path]]]:
    """Each bold number of a page, and the other pages that its paragraph links to: one of them has it."""
    found = []
    for paragraph in _FENCE.sub("", _text(page)).split("\n\n"):
        targets = {_target(page, match["address"].partition("#")[0]) for match in _LINK.finditer(paragraph)}
        cited = [path for path in targets if path.suffix == ".md" and path != REPOSITORY / page]
        found += [(number, cited) for number in _FIGURE.findall(paragraph)]
    return found


def _text(page: str) -> str:
    return (REPOSITORY / page).read_text()


def _target(page: str, address: str) -> Path:
    return (REPOSITORY / page).parent.joinpath(address).resolve() if address else REPOSITORY / page
