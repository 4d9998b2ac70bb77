"""A place for observations: SQLite's, and PostgreSQL's if it is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg")
    if shutil.which("initdb") is None:
        pytest.skip("needs PostgreSQL's server programs (initdb)")
    with PostgresServer(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "observed.sqlite")
    return request.getfixturevalue("postgres").new_database()
