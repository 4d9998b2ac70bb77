from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from inference.errors import SettingsError
from inference.settings import Settings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_CHECKPOINT", "elsewhere/model.pt")
    monkeypatch.setenv("MAX_BATCH_TEXTS", "3")
    settings = Settings()
    assert settings.model_checkpoint == Path("elsewhere/model.pt")
    assert settings.max_batch_texts == 3


def test_an_empty_variable_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_CHECKPOINT", "")
    assert Settings().model_checkpoint == Path("checkpoints/news")


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MAX_TEXT_CHARS", value)
    with pytest.raises(ValidationError, match="max_text_chars"):
        Settings()


def test_a_key_that_no_header_can_carry_starts_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "open sesame\n")  # a secret that was made from a file
    assert Settings().api_key.get_secret_value() == "open sesame"
    for key in (" \n", "open\nsesame", "open\x00sesame"):
        with pytest.raises(ValidationError, match="a key without line breaks"):
            Settings(api_key=key)


def test_every_setting_says_what_it_does() -> None:
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(("given", "share"), [("5%", 0.05), ("0.2", 0.2), ("100%", 1.0)])
def test_a_share_may_be_in_percent(monkeypatch: pytest.MonkeyPatch, given: str, share: float) -> None:
    monkeypatch.setenv("SHADOW_SHARE", given)
    assert Settings.from_environment().shadow_share == share


@pytest.mark.parametrize("given", ["0", "101%", "some"])
def test_a_share_of_none_or_of_more_than_all_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("SHADOW_SHARE", given)
    with pytest.raises(SettingsError, match="SHADOW_SHARE"):
        Settings.from_environment()
