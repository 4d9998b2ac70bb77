"""Every command in the pages is run by a test, or says why it cannot be."""

from __future__ import annotations

import re

import pytest

from tests.deployment.documented import PAGES, REPOSITORY, Block, blocks

BLOCKS = [block for page in PAGES for block in blocks(page)]
CALLS = re.compile(r'documented\(\s*[^,()]+,\s*"(?P<name>[^"]+)"')
SOURCES = [
    source for path in (REPOSITORY / "tests").rglob("test_*.py") if "documented(" in (source := path.read_text())
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.name or block.reason}")
def test_a_block_of_commands_is_run_by_a_test_or_says_why_not(block: Block) -> None:
    if block.reason is None:
        assert block.name is not None, f"no mark above:\n{block.commands}"
        assert any(f'"{block.name}"' in source for source in SOURCES), f"no test names {block.name}"


def test_no_test_asks_for_commands_that_are_gone_and_no_two_blocks_share_a_name() -> None:
    names = [block.name for block in BLOCKS if block.name]
    assert len(names) == len(set(names))
    assert {match["name"] for source in SOURCES for match in CALLS.finditer(source)} <= set(names)
