from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

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
