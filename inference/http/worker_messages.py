"""What the supervisor and its workers tell each other: a line of JSON per message, with the name of
its class and its fields. Both ends are of the same process image, so no version is needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal

from inference.metrics import Snapshot

# ---------------------------------------------------------------- from a worker


@dataclass(frozen=True, slots=True)
class IsReady:
    """The worker serves already, and has now loaded the model for itself."""


@dataclass(frozen=True, slots=True)
class CanServe:
    """The worker has loaded the model of this description, and waits for `Serve`."""

    model: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CannotServe:
    """The worker could not load the model, and ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class Counts:
    """The worker's metrics: the answer to `TellCounts`, and its last word."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Ask:
    """A question of the worker; the `Answer` has the same number."""

    number: int
    what: Literal["metrics", "reload"]


@dataclass(frozen=True, slots=True)
class Taken:
    """What clients have taken of their rate limits: limiter, client, its own rate, texts.

    The supervisor passes it on to the other workers as it is.
    """

    amounts: list[tuple[str, str, float | None, float]]


# ---------------------------------------------------------------- from the supervisor


@dataclass(frozen=True, slots=True)
class Serve:
    """Accept connections from now on, with the model that is loaded."""


@dataclass(frozen=True, slots=True)
class AllAreReady:
    """Every worker has loaded the model, so each may say that it is ready."""


@dataclass(frozen=True, slots=True)
class TellCounts:
    pass


@dataclass(frozen=True, slots=True)
class Leave:
    """Accept nothing more, finish what is in progress, and end: new workers have taken over."""


@dataclass(frozen=True, slots=True)
class AllCounts:
    snapshots: list[Snapshot]


@dataclass(frozen=True, slots=True)
class Reloaded:
    model: dict[str, Any]  # its description


@dataclass(frozen=True, slots=True)
class ReloadRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class ReloadRunning:
    """Another reload is in progress, so this one was not begun."""


ReloadOutcome = Reloaded | ReloadRefused | ReloadRunning


@dataclass(frozen=True, slots=True)
class Answer:
    number: int  # of the `Ask`
    content: AllCounts | ReloadOutcome


FromWorker = IsReady | CanServe | CannotServe | Counts | Ask | Taken
FromSupervisor = Serve | AllAreReady | TellCounts | Leave | Taken | Answer
_OUTCOMES = AllCounts | ReloadOutcome
_CLASSES = {
    one.__name__: one
    for one in (*FromWorker.__args__, *FromSupervisor.__args__, *_OUTCOMES.__args__)
}


def encode(message: FromWorker | FromSupervisor) -> bytes:
    # JSON, not pickle: a line that is cut or wrong becomes an error, never a call of anything.
    # Not `dataclasses.asdict`: it would copy every number of a snapshot.
    return json.dumps(message, default=_as_list).encode() + b"\n"


def decode(line: bytes | bytearray) -> FromWorker | FromSupervisor:
    message = _from_list(json.loads(line))
    if isinstance(message, Answer):
        return Answer(message.number, _from_list(message.content))
    return message


def _as_list(message: Any) -> list[Any]:
    return [type(message).__name__, *(getattr(message, one.name) for one in fields(message))]


def _from_list(found: list[Any]) -> Any:
    name, *values = found
    return _CLASSES[name](*values)
