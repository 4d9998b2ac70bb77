"""The option with which the equivalence suite writes its table."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write_proofs", metavar="PAGE", default="", help="write the table of what was proven into PAGE")
