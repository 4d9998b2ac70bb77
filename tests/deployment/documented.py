"""The commands that pages show, for the tests that run them as they stand there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (
    "docs/deployment.md",
    "docs/OPERATIONS.md",
    "deployment/README.md",
    "docs/DISTRIBUTED_TRAINING_GUIDE.md",
    "docs/PARALLELISM_STRATEGIES.md",
    "docs/PLANNING.md",
    "docs/FRAMEWORKS.md",
    "docs/QUICK_REFERENCE.md",
    "docs/RELIABILITY.md",
    "docs/WALKTHROUGH.md",
    "docs/data.md",
    "docs/tasks.md",
    "docs/methods.md",
    "docs/running.md",
    "docs/CARDS.md",
)
_WRITTEN = re.compile(r"^<!-- begin: (.+) -->$.*?^<!-- end: \1 -->$", re.MULTILINE | re.DOTALL)  # by a command
_BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]+) -->\n)?^```bash\n(?P<commands>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block of commands: `name` where a test runs it, `reason` where none does, neither without a mark."""

    page: str
    name: str | None
    reason: str | None
    commands: str


def blocks(page: str) -> list[Block]:
    """Read all blocks of commands of a page that a person wrote; a page that is not there has none."""
    path = REPOSITORY / page
    found = _BLOCK.finditer(_WRITTEN.sub("", path.read_text())) if path.exists() else ()
    return [_block(page, match["mark"] or "", match["commands"]) for match in found]


def _block(page: str, mark: str, commands: str) -> Block:
    kind, _, rest = mark.partition(": ")
    return Block(
        page,
        name=rest if kind == "command" else None,
        reason=rest if kind == "not run by a test" else None,
        commands=commands,
    )


def documented(page: str, name: str) -> str:
    """Return the commands under `<!-- command: NAME -->`, as they stand there."""
    (block,) = [block for block in blocks(page) if block.name == name]
    return block.commands
