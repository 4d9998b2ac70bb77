"""The server's settings: each field is one environment variable of the same name in capitals."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from common.errors import invalid_value, share_or_name
from common.hardware import Hardware
from inference.errors import SettingsError
from inference.observing.store import is_postgres

# JSON may spell one character as two escapes of six bytes each ("\ud83d\ude00").
_MAX_BYTES_PER_CHAR = 12
_JSON_OVERHEAD_BYTES = 64 * 1024
_LINE_OVERHEAD_BYTES = 1024
_JSON_OVERHEAD_VALUES = 1024
MOST_WORKERS = 256
_OBSERVED = "observed.sqlite"
_DURATION = re.compile(r"(\d{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


class Settings(BaseModel):
    """What the server reads from its environment; an empty variable counts as unset."""

    # Errors do not quote what they reject: it may be a key.
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True
    )

    model_checkpoint: Path = Field(
        default=Path("checkpoints/news"),
        description="What to serve: a model folder, a .pt file of this trainer, an exported "
        "artefact, or [several models](#several-models), as paths with commas between them or a "
        "folder of model folders.",
    )
    model_weights: str = Field(
        default="",
        description="How several models share the processors while all have texts, such as "
        "news=2,spam=1. The others have weight 1.",
    )
    models_folder: Path | None = Field(
        default=None,
        description="The folder of models that `PUT /models/NAME` may serve. With it, even a "
        "single model has the name of its folder. Empty: MODEL_CHECKPOINT, if that is a folder of "
        "models; otherwise PUT is rejected.",
    )
    shadow: Path | None = Field(
        default=None,
        description="A candidate that also classifies a share of the default model's texts, only "
        "while the server has time, [to compare the two](loop.md#shadow).",
    )
    shadow_share: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="The share of texts for SHADOW, such as 5% or 0.05.",
    )
    engine: Literal["auto", "native", "openvino", "onnx", "torch", "torch_compiled"] = Field(
        default="auto",
        description="What runs the model. auto takes the fastest artefact beside it, else torch; "
        "any other name insists on that engine.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="Processors that the model uses; 0, also the most, is all that affinity and "
        "quota allow. Set it if the machine serves something else too.",
    )
    workers: int | Literal["auto"] = Field(
        default="auto",
        description="Processes on the same port (`python -m inference.serve` only), which divide "
        "the processors, MAX_CONNECTIONS, MAX_PENDING_MB and CACHE_ENTRIES among them. auto is one "
        "per 8 processors or so with the native engine, and otherwise 1.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Where PyTorch runs. auto takes a GPU if it can, and logs why it cannot; cuda "
        "insists on one.",
    )
    instruction_set: str = Field(
        default="auto",
        description="What the native engine uses: avx512_vnni, avx512, avx_vnni, avx2, neon_i8mm, "
        "neon_dotprod, neon or plain. auto takes the fastest; answers are the same to the last "
        "bit.",
    )
    model_name: str = Field(
        default="",
        description="Name of the model in `/models/NAME`, `/v2/models/NAME` and the metrics. "
        "Empty: as in its manifest. Several models have the names of their folders.",
    )
    listen_host: str = Field(
        default="127.0.0.1",
        description="Address to listen on (`python -m inference.serve` only). 127.0.0.1 keeps "
        "other machines out, 0.0.0.0 lets all in (as in the images), :: those with IPv6 addresses.",
    )
    port: int = Field(
        default=7860,
        ge=0,
        le=65535,
        description="Port to listen on (`python -m inference.serve` only); 0 takes a free one and "
        "logs it.",
    )
    forwarded_allow_ips: str = Field(
        default="127.0.0.1",
        description="Proxies, comma-separated, whose X-Forwarded-For is believed (* for all). Too "
        "many let clients forge the address that the rate limit counts by.",
    )
    max_text_chars: int = Field(
        default=20_000,
        ge=1,
        description="Longest text, in characters. A larger value costs time and gains no accuracy "
        "if the model reads only the beginning.",
    )
    max_batch_texts: int = Field(
        default=256,
        ge=1,
        description="Most texts in one request. A larger value lets one client fill more of the "
        "queue.",
    )
    max_body_mb: float = Field(
        default=8,
        gt=0,
        description="Largest body, in MiB; the two limits above can mean less.",
    )
    max_pending_mb: float = Field(
        default=64,
        gt=0,
        description="Memory for the bodies and texts of all requests in progress, in MiB; beyond "
        "it they get 503. Streams take at most half of it.",
    )
    max_batch_tokens: int = Field(
        default=0,
        ge=0,
        description="Most tokens in one forward pass. Fewer answer single texts sooner under load, "
        "more read the weights less often per text. 0: 512 on a processor, 8192 on a GPU, or the "
        "longest text that the model reads if that is more.",
    )
    max_wait_seconds: float = Field(
        default=5,
        gt=0,
        description="A text that would take longer than this, by the measured speed, gets 503 at "
        "once, unless the server is idle. A call of several texts may fill three quarters of it.",
    )
    request_timeout_s: float = Field(
        default=30,
        gt=0,
        description="Seconds until an unanswered text gets 504 and an incomplete body 408, and "
        "until a connection is closed that sends no headers or does not read its answer.",
    )
    restart_after_s: float = Field(
        default=60,
        gt=0,
        description="Seconds without an answer, because a pass hangs or even a known good text "
        "fails, until `/livez` fails and the process ends with exit code 70. Must be longer than "
        "the slowest batch.",
    )
    max_connections: int = Field(
        default=1000,
        ge=1,
        description="Most connections; fewer if `ulimit -n` is lower. While half of them wait for "
        "answers, further texts get 503. One too many closes the one that has been idle longest, "
        "or gets 503 if none has been idle for a second.",
    )
    max_connection_age_s: float = Field(
        default=300,
        ge=0,
        description="Seconds, give or take a tenth, after which a connection is closed with its "
        "next answer, so that clients reach servers that have joined. 0 keeps connections.",
    )
    cache_entries: int = Field(
        default=0,
        ge=0,
        description="Answers kept for texts that are sent again, about 1 kB each; the least "
        "recently used goes first. 0 is off.",
    )
    explain_max_passes: int = Field(
        default=64,
        ge=1,
        description="Most texts that one /explain request classifies; longer texts are explained "
        "in groups of words.",
    )
    coverage: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Adds to every answer the set of labels (or the interval) that holds the right "
        "one this often, such as 0.95, unless the request names another. Needs a calibrated model.",
    )
    max_error: str = Field(
        default="",
        description="Abstains so that at most this share of the answers is wrong (2%, 0.02, or the "
        "name of an operating point), unless the request names another. Formats that only list "
        "scores (/hub and most gateways') stay complete. Needs a calibrated model.",
    )
    rate_limit_per_s: float = Field(
        default=0,
        ge=0,
        description="Texts per second per API key, or per client address if no key is asked for, "
        "with bursts of up to twice that; more get 429. Other requests (pages, `/metrics`) have "
        "the same limit per address, but at least 10 per second; probes have none. 0 is off.",
    )
    api_key: SecretStr | None = Field(
        default=None,
        description="When set, every POST needs `Authorization: Bearer KEY` or `X-API-Key: KEY`, "
        "else 401. Probes, metrics and pages stay open.",
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="A file of more keys, one per line, as `KEY` or `KEY TEXTS_PER_SECOND`. It is "
        "read again when it changes. If it becomes missing, damaged or empty, none of its keys is "
        "valid.",
    )
    require_api_key: bool = Field(
        default=False,
        description="1: do not start without API_KEY or API_KEYS_FILE, so that a missing secret "
        "never opens the server to everybody.",
    )
    cors_origins: str = Field(
        default="",
        description="Origins, comma-separated (https://example.org), whose pages may call this "
        "server from a browser; * for all.",
    )
    drain_seconds: float = Field(
        default=1,
        ge=0,
        description="Seconds between SIGTERM and closing the port, in which the server is not "
        "ready but still answers, so that clients move elsewhere.",
    )
    grace_seconds: float = Field(
        default=25,
        gt=0,
        description="Seconds after that until requests in progress are cut off. Both together must "
        "be less than the platform's time to kill.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="What is logged on standard output, as JSON lines or, in a terminal, lines for "
        "people. info has one line per request; warning has only what needs attention.",
    )
    observe: str = Field(
        default="",
        repr=False,  # it may hold a password
        description="Where the server [counts what it sees](#what-the-server-sees) and keeps "
        "corrections: 1 for observed.sqlite in the working directory, the path of an .sqlite file, "
        "or, for several servers, postgresql://USER:PASSWORD@HOST/DATABASE (needs the `postgres` "
        "extra).",
    )
    keep_texts: str = Field(
        default="",
        description="How long texts may be kept for review, such as 12h or 7d, up to 2,000 per "
        "hour and model. Needs OBSERVE. Empty: not at all.",
    )
    observe_mb: float = Field(
        default=256,
        ge=1,
        description="Most disk space for counts, kept texts and corrections, in MiB. The oldest "
        "texts go first, then the oldest counts; corrections are never deleted.",
    )
    otel_endpoint: str = Field(
        default="",
        description="Where OpenTelemetry traces go, as OTLP over HTTP "
        "(http://collector:4318/v1/traces). Needs the `otel` extra.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_environment(cls, given: dict[str, Any]) -> dict[str, Any]:
        # The package pydantic-settings does this too, and takes a tenth of a second to import.
        return {
            name: value for name in cls.model_fields if (value := os.environ.get(name.upper()))
        } | given

    @field_validator("engine", "device", "log_level", mode="before")
    @classmethod
    def _in_small_letters(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("shadow_share", mode="before")
    @classmethod
    def _a_share(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            share = share_or_name(value)
        except ValueError as error:
            raise PydanticCustomError("shadow_share", "{why}", {"why": str(error)}) from None
        if isinstance(share, str):
            raise PydanticCustomError("shadow_share", "must be a share, such as 5% or 0.05")
        return share

    @field_validator("api_key")
    @classmethod
    def _one_that_a_header_can_carry(cls, value: SecretStr | None) -> SecretStr | None:
        # A secret that was made from a file often ends with its newline, which no header has.
        key = value.get_secret_value().strip() if value else None
        if key is not None and not (key and key.isprintable()):
            raise PydanticCustomError(
                "api_key", "must be a key without line breaks or other control characters"
            )
        return SecretStr(key) if key else None

    @field_validator("max_error")
    @classmethod
    def _a_share_or_a_name(cls, value: str) -> str:
        if value.strip():
            try:
                share_or_name(value)
            except ValueError as error:
                raise PydanticCustomError("max_error", "{why}", {"why": str(error)}) from None
        return value.strip()

    @field_validator("observe")
    @classmethod
    def _a_place_for_counts(cls, value: str) -> str:
        value = value.strip()
        if value in ("", "1") or value.endswith(".sqlite") or is_postgres(value):
            return value
        line = "must be 1, the path of an .sqlite file, or postgresql://USER@HOST/DATABASE"
        raise PydanticCustomError("observe", line)

    @field_validator("keep_texts")
    @classmethod
    def _a_duration(cls, value: str, info: ValidationInfo) -> str:
        value = value.strip()
        if value and not _DURATION.fullmatch(value):
            raise PydanticCustomError(
                "keep_texts", "must be a duration such as 90s, 30m, 12h or 7d"
            )
        if value and not info.data.get("observe"):
            raise PydanticCustomError("keep_texts", "needs OBSERVE, which says where; set that too")
        return value

    @field_validator("model_name")
    @classmethod
    def _a_part_of_an_address(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9._-]*", value):
            raise PydanticCustomError("model_name", "must be letters, digits, . _ and -")
        return value

    @field_validator("workers", mode="before")
    @classmethod
    def _auto_or_number(cls, value: object) -> object:
        text = str(value).lower()
        if text == "auto":
            return text
        if not (text.isdecimal() and 1 <= int(text) <= MOST_WORKERS):
            raise PydanticCustomError(
                "workers", f"must be auto, or a number from 1 to {MOST_WORKERS}"
            )
        return int(text)

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the environment.

        Raises:
            SettingsError: a variable has an invalid value; the message names the variable, but does
                not quote the value.
        """
        try:
            return cls()
        except ValidationError as error:
            problems = (
                f"{str(problem['loc'][0]).upper()}: {invalid_value(problem)}"
                for problem in error.errors()
            )
            # Without the error that it comes from, whose traceback would show the values.
            raise SettingsError("; ".join(problems)) from None

    @property
    def observed_at(self) -> str | None:
        """The address of the store, if the server observes."""
        return _OBSERVED if self.observe == "1" else self.observe or None

    @property
    def keep_texts_s(self) -> float:
        """0 if no text may be kept."""
        found = _DURATION.fullmatch(self.keep_texts)
        return float(found[1]) * _SECONDS[found[2]] if found else 0.0

    @property
    def hardware(self) -> Hardware:
        return Hardware(self.threads, self.device, self.instruction_set)

    @property
    def max_body_bytes(self) -> int:
        """The largest body: MAX_BODY_MB, or the most that the limits on texts allow."""
        texts = self.max_pair_bytes * self.max_batch_texts + _JSON_OVERHEAD_BYTES
        return min(texts, int(self.max_body_mb * 2**20))

    @property
    def max_line_bytes(self) -> int:
        """The longest line of a stream that can hold a pair of texts within the limit."""
        return min(self.max_body_bytes, self.max_pair_bytes + _LINE_OVERHEAD_BYTES)

    @property
    def max_pair_bytes(self) -> int:
        return 2 * self.max_text_chars * _MAX_BYTES_PER_CHAR

    @property
    def max_body_values(self) -> int:
        """The most JSON values in a body: two texts and an object around them for each text, and
        room for other fields.
        """
        return 3 * self.max_batch_texts + _JSON_OVERHEAD_VALUES

    @property
    def allowed_origins(self) -> list[str]:
        return [
            origin.strip().rstrip("/") for origin in self.cors_origins.split(",") if origin.strip()
        ]


def keep_tokenizer_on_one_thread() -> None:
    """Tokenize in the calling thread: the library's pool would take cores from passes."""
    # Whoever has set the variable knows better.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
