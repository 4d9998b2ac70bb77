"""Every command in the deployment's pages is run by a test, or says why it cannot be."""

from __future__ import annotations

import re

import pytest

from tests.deployment.documented import PAGES, REPOSITORY, Block, blocks

BLOCKS = [block for page in PAGES for block in blocks(page)]
CALLS = re.compile(r'documented\(\s*[^,()]+,\s*"(?P<name>[^"]+)"')


def _named_in_tests() -> set[str]:
    sources = (path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    return {match["name"] for source in sources for match in CALLS.finditer(source)}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.name or block.reason}")
def test_a_block_of_commands_is_run_by_a_test_or_says_why_not(block: Block) -> None:
    if block.reason is None:
        assert block.name is not None, f"no mark above:\n{block.commands}"
        assert block.name in _named_in_tests()


def test_no_test_asks_for_commands_that_are_gone_and_no_two_blocks_share_a_name() -> None:
    names = [block.name for block in BLOCKS if block.name]
    assert len(names) == len(set(names))
    assert _named_in_tests() <= set(names)
