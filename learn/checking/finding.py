"""What a checker asks of a function, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What is wrong with a function, and where to look; never the answer."""

    problem: str
    hint: str
    detail: str = ""


HANG_HINT = "Every rank must make each call, or some wait forever. Which ranks reach that line, and how often?"


@dataclass(frozen=True)
class Exercise:
    """One function of a lesson.

    Args:
        lesson: the module of learn/lessons that asks for it.
        promise: what a right one guarantees, in a line.
        observe: called on every rank, with the learner's function; what it returns is sent to
            ``judge``.
        judge: what is wrong, by the observations of all ranks; None if nothing is.
        hang_hint: where to look if ranks wait forever.
    """

    lesson: str
    promise: str
    observe: Callable[[Callable[..., Any]], Any]
    judge: Callable[[Sequence[Any]], Finding | None]
    hang_hint: str = HANG_HINT


MAX_RANKS = 9  # to call a function on: each rank has its own last digit, 1 to 9
WAIT = "And: a collective called with async_op=True is done only after wait()."
NOT_WRITTEN = Finding("not written yet", "replace its raise NotImplementedError")
