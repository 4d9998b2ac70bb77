"""Waits until a Space runs or shows what was committed, and asks it whether it answers."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError as AnswerError

from huggingface_hub import HfApi, SpaceRuntime
from huggingface_hub.errors import HTTPError

from common.errors import first_line
from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType
from deployment.client import attempts, fetch, fetch_json
from training.publishing.hub_upload import PublishFailure

BUILD_SECONDS = 30 * 60
START_SECONDS = 120
# For a while after a commit the hub may still report the stage of the previous build.
SETTLE_SECONDS = 120
LONGEST_PAUSE = 10
LOG_LINES = 20
TEXT = "Oil prices climb to a record as refiners report falling stocks"
# A Space sleeps when it has no visitors, and the next request wakes it: here, the one to /health.
_ANSWERS = {"RUNNING", "SLEEPING"}
_BUILDING = {"BUILDING", "RUNNING_BUILDING", "APP_STARTING", "RUNNING_APP_STARTING"}
_WHAT_TO_DO = {
    "BUILD_ERROR": "the build failed",
    "CONFIG_ERROR": "the hub does not accept the card's settings",
    "NO_APP_FILE": "the hub finds no Dockerfile",
    "RUNTIME_ERROR": "the server ended or did not start",
    "PAUSED": "it is paused; restart it in its settings",
    "STOPPED": "it is stopped; restart it in its settings",
    "DELETING": "it is being deleted",
}


@dataclass(frozen=True)
class Expected:
    """A valid answer of the Space: of this kind, with these labels, from the model of this revision."""

    labels: list[str]
    revision: str
    problem_type: ProblemType = SINGLE_LABEL
    reads_pairs: bool = False

    def describe(self, answer: dict[str, Any]) -> str | None:
        """The answer in words; None if no model of this kind gives it."""
        if self.problem_type is REGRESSION:
            value = answer.get("value")
            return (
                f"{value:.6g}" if isinstance(value, int | float) and math.isfinite(value) else None
            )
        if self.problem_type is MULTI_LABEL:
            given = answer.get("labels")
            is_known = isinstance(given, list) and all(label in self.labels for label in given)
            return (", ".join(given) or "no label") if is_known else None
        return (
            f"{answer['label']} {answer['confidence']:.1%}"
            if answer.get("label") in self.labels
            else None
        )


def wait_until_running(api: HfApi, name: str, commit: str) -> None:
    """Wait for the build of a commit, and print each stage.

    Raises:
        PublishFailure: the build fails, with the end of its log, or takes too long.
    """
    began, pause, stage, built = time.monotonic(), 0.5, "", False
    # The pause grows from half a second to ten, so that a short stage is seen and half an hour of
    # building does not ask the hub thousands of times; each new stage starts it over.
    while (waited := time.monotonic() - began) < BUILD_SECONDS:
        runtime = _runtime(api, name)
        if runtime is not None and runtime.stage != stage:
            stage, pause = runtime.stage, 0.5
            print(f"{waited:6.0f} s  {stage}", flush=True)
        built = built or stage in _BUILDING
        if runtime is not None and (_is_of(runtime, commit, built) or waited > SETTLE_SECONDS):
            if stage in _ANSWERS:
                return
            if stage in _WHAT_TO_DO:
                raise PublishFailure(_failure(api, name, runtime), code="space-not-up")
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE)
    raise PublishFailure(
        f"space {name}: still {stage} after {BUILD_SECONDS // 60} minutes; see "
        f"{_log_page(api, name, stage)}",
        code="space-not-up",
    )


def ask(address: str, token: str | None, expected: Expected) -> str:
    """Query a Space's health, model and a prediction; ``token`` is needed for a private Space.
    Returns one line.

    Raises:
        PublishFailure: it does not answer as ``expected``.
    """
    headers = _token_header(f"{address}/health", token)
    _wait_until_healthy(f"{address}/health", headers)
    # The previous build answers until the new one is up, and is just as healthy.
    revision = fetch_json(f"{address}/model", headers=headers).get("revision")
    if revision != expected.revision:
        raise PublishFailure(
            f"{address}: serves the model {revision}, not {expected.revision}; start again",
            code="space-not-up",
        )
    texts = {"text": TEXT, **({"text_pair": TEXT} if expected.reads_pairs else {})}
    try:
        answer = fetch_json(f"{address}/predict", texts, headers)
    except AnswerError as error:
        if error.code == 401:  # a secret of the Space that only its owner knows
            return "healthy; /predict wants the Space's API_KEY and was not tried"
        raise PublishFailure(
            f"{address}/predict: answers {error.code}; see the Space's log", code="space-not-up"
        ) from error
    if (described := expected.describe(answer)) is None:
        raise PublishFailure(
            f"{address}/predict: answers {str(answer)[:200]}, which is not an answer of this model",
            code="space-not-up",
        )
    return f"{described}: {TEXT}"


def wait_until_shown(address: str, token: str | None, name: str, content: bytes) -> None:
    """Wait until a static Space gives out this file as it was sent.

    Raises:
        PublishFailure: it does not within `START_SECONDS`.
    """
    headers, reason = _token_header(f"{address}/{name}", token), "no answer"
    for _ in attempts(START_SECONDS, pause=0.5):
        try:
            if fetch(f"{address}/{name}", headers=headers) == content:
                return
            # For a while the hub still gives out the file of the commit before.
            reason = "another file"
        except OSError as error:
            reason = first_line(error)
    raise PublishFailure(
        f"{address}/{name}: not what was sent after {START_SECONDS} s ({reason}); "
        "look at the Space's page",
        code="space-not-up",
    )


def _runtime(api: HfApi, name: str) -> SpaceRuntime | None:
    """The stage, or None if this poll failed: the caller polls again."""
    with suppress(HTTPError, OSError):
        return api.get_space_runtime(name)
    return None


def _is_of(runtime: SpaceRuntime, commit: str, built: bool) -> bool:
    # Not every answer names a commit. Without one, a build that was seen since the commit is the
    # sign.
    sha = runtime.raw.get("sha")
    return built if sha is None else sha == commit


def _failure(api: HfApi, name: str, runtime: SpaceRuntime) -> str:
    lines: list[str] = []
    with suppress(HTTPError, OSError):
        lines = list(api.fetch_space_logs(name, build=runtime.stage == "BUILD_ERROR"))[-LOG_LINES:]
    message = runtime.raw.get("errorMessage")
    for line in [*lines, *([message] if message else [])]:
        print(f"  | {line.rstrip()}")
    return (
        f"space {name}: {runtime.stage}, {_WHAT_TO_DO[runtime.stage]}; see "
        f"{_log_page(api, name, runtime.stage)}"
    )


def _log_page(api: HfApi, name: str, stage: str) -> str:
    return (
        f"{api.endpoint}/spaces/{name}?logs={'container' if stage == 'RUNTIME_ERROR' else 'build'}"
    )


def _wait_until_healthy(url: str, headers: dict[str, str]) -> None:
    reason = "no answer"
    for _ in attempts(START_SECONDS, pause=0.5):
        try:
            fetch_json(url, headers=headers)
            return
        except (OSError, ValueError) as error:  # ValueError: a page of the hub, while it starts
            reason = first_line(error)
    raise PublishFailure(
        f"{url}: not healthy after {START_SECONDS} s ({reason}); see the Space's log",
        code="space-not-up",
    )


def _token_header(url: str, token: str | None) -> dict[str, str]:
    """What shows a private Space who asks; the token may write to the account, so not in clear."""
    if not token:
        return {}
    if not url.startswith("https://") and "HF_ENDPOINT" not in os.environ:
        raise PublishFailure(
            f"{url}: is not https, so the token is not sent there", code="space-not-up"
        )
    return {"Authorization": f"Bearer {token}"}
