from __future__ import annotations

from pathlib import Path

import pytest

from common.version import version


@pytest.mark.parametrize("project", [None, '[project]\nname = "another"\nversion = "7.0"\n', "[tool.ruff]\n"])
def test_without_its_sources_the_version_is_that_of_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: str | None
) -> None:
    about = tmp_path / "installed" / "distrinews-9.8.7.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: distrinews\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(about.parent)
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    assert version(tmp_path) == "9.8.7"
