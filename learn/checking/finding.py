"""What a checker asks of a function, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What is wrong with a function, and where to look; never the answer."""

    problem: str
    hint: str
    detail: str = ""


# Whether it was made, the problem and a hint. In place of a bool, a list of what is wrong: in the
# problem, ``{}`` becomes the first item.
Mistake = tuple[object, str, str]


def first_mistake(mistakes: Iterable[Mistake], detail: str = "") -> Finding | None:
    """The first mistake that was made, with this detail; None if it is none of them."""
    # The order of a table matters: a cause comes before what follows from it.
    for made, problem, hint in mistakes:
        if made:
            first = str(made[0]) if isinstance(made, list) else ""
            return Finding(problem.replace("{}", first), hint, detail)
    return None


def names_are_not(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not"


HANG_HINT = (
    "Every rank must make each call, or some wait forever. Which ranks reach that line, and how "
    "often?"
)
ENDLESS_HINT = (
    "No rank waits for another one here: this code itself does not come to an end. When does its "
    "loop stop?"
)


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
