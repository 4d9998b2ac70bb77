"""The version of this software, which only pyproject.toml states."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

_NAME = "distrinews"
_SOURCES = Path(__file__).resolve().parents[1]


def version(root: Path = _SOURCES) -> str:
    """The version of the sources in ``root``, else of the installed package, else "unknown"."""
    # The file comes first: the metadata of an editable installation keeps the version that was
    # there when it was installed, and an image has the sources without an installation.
    file = root / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == _NAME:
            return project["version"]
    try:
        return installed_version(_NAME)
    except PackageNotFoundError:
        return "unknown"
