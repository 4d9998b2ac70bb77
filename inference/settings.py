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
        description="The model to serve: a model folder, a .pt file that training wrote, or an "
        "exported artefact. The default comes with the repository and classifies news. Several "
        "paths with commas between them, or a folder of model folders, serve "
        "[several models](#several-models).",
    )
    model_weights: str = Field(
        default="",
        description="Of several models, how they share the processors while all have texts: with "
        "news=2,spam=1 news gets twice the time of spam. A model that is not named has weight 1.",
    )
    models_folder: Path | None = Field(
        default=None,
        description="The folder of models that `PUT /models/NAME` may serve while the server runs. "
        "With it, models have the names of their folders, also if there is only one at the start. "
        "Empty: MODEL_CHECKPOINT, if that is a folder of models; otherwise PUT is refused.",
    )
    shadow: Path | None = Field(
        default=None,
        description="A candidate that answers a share of the default model's texts too, after the "
        "answer and only while the server has time, [to compare the two](loop.md#shadow). Empty: "
        "none.",
    )
    shadow_share: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="The share of texts that SHADOW answers too, such as 5% or 0.05.",
    )
    engine: Literal["auto", "native", "openvino", "onnx", "torch", "torch_compiled"] = Field(
        default="auto",
        description="What runs the model. auto takes the fastest artefact beside the model, else "
        "torch; any other name insists on that engine.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="Processors that the model uses; 0 is all that this process may use (its "
        "affinity and the container's CPU quota), which is also the most. Set it if other "
        "processes serve on the same machine.",
    )
    workers: int | Literal["auto"] = Field(
        default="auto",
        description="Processes that serve on the same port (`python -m inference.serve` only), "
        "each with its share of the processors, of MAX_CONNECTIONS, MAX_PENDING_MB and "
        "CACHE_ENTRIES. auto is one per 8 processors or so with the native engine, whose weights "
        "they share, and otherwise 1.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Where PyTorch runs the model. auto takes a GPU if it can use one, and says "
        "in the log if it cannot; cuda refuses to serve without one.",
    )
    instruction_set: str = Field(
        default="auto",
        description="What the native engine uses of the processor: avx512_vnni, avx512, avx_vnni, "
        "avx2, neon_i8mm, neon_dotprod, neon or plain. auto takes the fastest that is there. "
        "Answers are the same to the last bit.",
    )
    model_name: str = Field(
        default="",
        description="Name of the model in `/models/NAME`, in the Open Inference Protocol "
        "(`/v2/models/NAME`) and in the metrics. Empty: its own, as in its manifest. Several "
        "models have the names of their folders.",
    )
    listen_host: str = Field(
        default="127.0.0.1",
        description="Address to listen on (`python -m inference.serve` only). 127.0.0.1 keeps "
        "other machines out, 0.0.0.0 lets all in (as in the images), :: those with IPv6 "
        "addresses.",
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
        description="Addresses of proxies, comma-separated, whose X-Forwarded-For is believed (* "
        "for all). Trusting too many lets clients forge the address that the rate limit counts "
        "by.",
    )
    max_text_chars: int = Field(
        default=20_000,
        ge=1,
        description="Longest text, in characters; a longer one is refused with 422. The model "
        "reads only the beginning of a long text, so a larger value costs tokenizing time and "
        "gains no accuracy.",
    )
    max_batch_texts: int = Field(
        default=256,
        ge=1,
        description="Most texts in one batch request; more are refused with 422. A larger value "
        "lets one client fill more of the queue.",
    )
    max_body_mb: float = Field(
        default=8,
        gt=0,
        description="Largest request body, in MiB; a larger one is refused with 413 (or one that "
        "is too large for the two limits above). A larger value costs memory and event-loop time "
        "per request.",
    )
    max_pending_mb: float = Field(
        default=64,
        gt=0,
        description="Bodies held by all requests in progress and the texts read from them, in "
        "MiB; beyond it requests are refused with 503. It bounds the memory that clients can "
        "take; streams take at most half of it.",
    )
    max_batch_tokens: int = Field(
        default=0,
        ge=0,
        description="Most tokens in one forward pass. A smaller value answers single texts sooner "
        "under load, a larger one reads the weights less often per text. 0 takes a value at which "
        "the measured curve is flat: 512 on a processor, 8192 on a GPU, or the longest text that "
        "the model reads if that is more.",
    )
    max_wait_seconds: float = Field(
        default=5,
        gt=0,
        description="A text whose answer would take longer than this, by the measured speed, is "
        "refused at once with 503 and Retry-After. A call of several texts may fill three "
        "quarters of it: the rest is for single texts, which are answered before the last texts "
        "of large calls. A text that finds the server idle is never refused.",
    )
    request_timeout_s: float = Field(
        default=30,
        gt=0,
        description="Seconds until a text that is not answered ends in 504, until a body that "
        "does not arrive ends in 408, and until a connection is closed whose headers do not "
        "arrive or whose answer is not read. A shorter time gives up sooner under overload.",
    )
    restart_after_s: float = Field(
        default=60,
        gt=0,
        description="Seconds without an answer, from a forward pass that hangs or a model that "
        "fails even on a known good text, until the process is considered dead: `/livez` fails, "
        "and the process ends with exit code 70 so that whatever started it can start a new one. "
        "It must be longer than the slowest batch takes.",
    )
    max_connections: int = Field(
        default=1000,
        ge=1,
        description="Most connections at a time; fewer if the process may not open so many files "
        "(`ulimit -n`). While half of them wait for answers, further texts are refused with 503 "
        "server_busy. When all are in use, a new one closes the one that has been idle "
        "longest; if none has been idle for a second, it is refused with 503.",
    )
    max_connection_age_s: float = Field(
        default=300,
        ge=0,
        description="Seconds, give or take a tenth, after which a connection is closed with its "
        "next answer, so that clients that keep connections spread over servers that have joined. "
        "0 keeps them.",
    )
    cache_entries: int = Field(
        default=0,
        ge=0,
        description="Answers remembered for texts that are sent again; the least recently used "
        "goes first. 0 is off. About 1 kB each; it pays off only if texts repeat.",
    )
    explain_max_passes: int = Field(
        default=64,
        ge=1,
        description="Most texts that one /explain request classifies; a longer text is explained "
        "in groups of words. A larger value explains in finer detail but is slower, because each "
        "one costs a pass.",
    )
    coverage: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Adds to every answer the set of labels (or the interval) that holds the right "
        "one this often, such as 0.95, unless the request names another coverage. Needs a "
        "calibrated model. Empty: only if a request asks for it.",
    )
    max_error: str = Field(
        default="",
        description="Holds answers back so that at most this share of those given is wrong, such "
        "as 2% or 0.02, or as the operating point of this name says, unless the request names "
        "another; a text without an answer gets no label, and the reason. Formats that only list "
        "scores (/hub and most gateways') stay complete. Needs a calibrated model. Empty: only if "
        "a request asks for it.",
    )
    rate_limit_per_s: float = Field(
        default=0,
        ge=0,
        description="Texts per second that may be sent with one API key, or from one client "
        "address if no key is asked for, with bursts of up to twice that; more are refused with "
        "429 and Retry-After. Other requests (pages, `/metrics`) are limited to the same number "
        "per address, but never to fewer than 10 per second; probes are not. 0 is off.",
    )
    api_key: SecretStr | None = Field(
        default=None,
        description="When set, every POST needs `Authorization: Bearer KEY` or `X-API-Key: KEY`, "
        "else 401. Probes, metrics and pages stay open.",
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="A file of more keys, one per line, each with a rate limit of its own if `KEY "
        "TEXTS_PER_SECOND` is written. It is read again when it changes, so keys are replaced "
        "without a restart. If it becomes missing, damaged or empty, none of its keys is valid.",
    )
    require_api_key: bool = Field(
        default=False,
        description="1: do not start unless API_KEY or API_KEYS_FILE is set, so that a missing "
        "secret never opens the server to everybody.",
    )
    cors_origins: str = Field(
        default="",
        description="Origins, comma-separated (https://example.org), whose pages may call this "
        "server from a browser; * for all. Empty: none but its own.",
    )
    drain_seconds: float = Field(
        default=1,
        ge=0,
        description="Seconds between SIGTERM and closing the port: not ready, but still "
        "answering, so that load balancers and kept-alive connections move elsewhere first. 0 "
        "closes at once.",
    )
    grace_seconds: float = Field(
        default=25,
        gt=0,
        description="Seconds after that for requests in progress to finish; then they are cut "
        "off. Drain and grace together should be less than the time that the platform waits "
        "before it kills the process.",
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
        "corrections: 1 for the file observed.sqlite in the working directory, the path of an "
        ".sqlite file, or postgresql://USER:PASSWORD@HOST/DATABASE for several servers together "
        "(needs the `postgres` extra). Empty: nothing is counted.",
    )
    keep_texts: str = Field(
        default="",
        description="How long texts may be kept for review, such as 12h or 7d, up to 2,000 per "
        "hour and model; then they are deleted. Needs OBSERVE. Empty: no text is ever kept.",
    )
    observe_mb: float = Field(
        default=256,
        ge=1,
        description="Most that counts, kept texts and corrections may take on the disk, in MiB. "
        "The oldest texts go first, then the oldest counts; corrections are never deleted.",
    )
    otel_endpoint: str = Field(
        default="",
        description="Where OpenTelemetry traces go, as OTLP over HTTP "
        "(http://collector:4318/v1/traces). Needs the `otel` extra. Empty: off.",
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
