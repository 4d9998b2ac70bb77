"""What the checker reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What is wrong with a function, and where to look; never the answer.

    Args:
        problem: one line.
        hint: what to think about.
        detail: lines of proof: numbers, or lines of the learner's file.
    """

    problem: str
    hint: str
    detail: str = ""


MOST_RANKS = 9  # that a function is tried on: one for each digit but 0
WAIT = "And: begun with async_op=True, a collective is done only after wait()."
NOT_WRITTEN = Finding("not written yet", "replace its raise NotImplementedError")
