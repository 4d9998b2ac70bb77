"""What the checker reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What is wrong with a function, and where to look; never the answer."""

    problem: str
    hint: str
    detail: str = ""


MAX_RANKS = 9  # to call a function on: each rank has its own last digit, 1 to 9
WAIT = "And: a collective called with async_op=True is done only after wait()."
NOT_WRITTEN = Finding("not written yet", "replace its raise NotImplementedError")
