"""What ranks do in the tests of the harness; without torch, whose import would take most of their time."""

from __future__ import annotations

import os


def which_rank(word: str) -> str:
    return f"{word} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("this rank fails")
