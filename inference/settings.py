"""The server's settings: each field is one environment variable of the same name in capitals."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

# JSON may spell one character as two escapes of six bytes each ("\ud83d\ude00").
_MAX_BYTES_PER_CHAR = 12
_JSON_OVERHEAD_BYTES = 64 * 1024


class Settings(BaseSettings):
    """What the server reads from its environment; an empty variable counts as absent."""

    model_config = SettingsConfigDict(env_ignore_empty=True, frozen=True)

    model_checkpoint: Path = Field(
        default=Path("checkpoints/distilbert_agnews"),
        description="The model to serve: a model folder or a .pt file that training wrote.",
    )
    max_text_chars: int = Field(
        default=20_000,
        ge=1,
        description="Longest text, in characters; a longer one is refused with 422. The model reads only the "
        "beginning of a long text, so a larger value costs tokenising time and gains no accuracy.",
    )
    max_batch_texts: int = Field(
        default=64,
        ge=1,
        description="Most texts in one batch request; more are refused with 422. A larger value keeps the "
        "other requests waiting longer behind one batch.",
    )

    @property
    def max_body_bytes(self) -> int:
        """Bytes that no body within the two limits can exceed; a larger one is refused with 413."""
        return self.max_text_chars * self.max_batch_texts * _MAX_BYTES_PER_CHAR + _JSON_OVERHEAD_BYTES
