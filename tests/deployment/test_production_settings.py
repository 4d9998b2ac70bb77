"""The ready file of production settings: each line is a setting of the server that it takes, and none is a default."""

import pytest

from inference.settings import Settings
from tests.docs.pages import REPOSITORY


def test_every_line_of_the_production_file_changes_a_setting_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (REPOSITORY / "deployment" / "production.env").read_text().splitlines()
    told = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    for name, value in told.items():
        monkeypatch.setenv(name, value)

    settings = Settings.from_environment()

    assert len(told) > 8
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    assert [name for name in told if getattr(settings, name.lower()) == defaults[name.lower()]] == []
