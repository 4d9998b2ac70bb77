"""The order in which a pipeline really worked, and what that order makes of slots if every action takes one."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

IDLE = ".."


@dataclass(frozen=True)
class Event:
    """One action that a stage has done.

    Args:
        stage: the rank that did it.
        kind: ``F`` or ``B``.
        micro_batch: its number.
        ended: seconds on the machine's one monotonic clock.
        num_kept: micro-batches whose activations the stage kept then.
    """

    stage: int
    kind: str
    micro_batch: int
    ended: float
    num_kept: int


def slots(stages: Sequence[Sequence[Event]]) -> list[list[str]]:
    """Each stage's slots, ``F0``, ``B0`` or idle, if every action took one.

    Actions are laid down in the order in which they ended. Each takes the first slot in which its stage is free and
    what it needs is there: a forward needs the stage before, a backward the stage behind.

    Args:
        stages: what each stage did.

    Raises:
        KeyError: an action ended before what it needs.
    """
    rows: list[list[str]] = [[] for _ in stages]
    done: dict[tuple[str, int, int], int] = {}
    for event in in_order(stages):
        neighbour = event.stage + (-1 if event.kind == "F" else 1)
        has_neighbour = 0 <= neighbour < len(stages)
        ready = done[event.kind, neighbour, event.micro_batch] if has_neighbour else 0
        row = rows[event.stage]
        row += [IDLE] * (ready - len(row)) + [f"{event.kind}{event.micro_batch}"]
        done[event.kind, event.stage, event.micro_batch] = len(row)
    length = max(map(len, rows))
    return [row + [IDLE] * (length - len(row)) for row in rows]


def in_order(stages: Sequence[Sequence[Event]]) -> list[Event]:
    """The actions of all stages in the order in which they ended."""
    return sorted(chain.from_iterable(stages), key=lambda event: event.ended)


def describe(stages: Sequence[Sequence[Event]]) -> str:
    """The order of events, the slots that it makes, the bubble in them and by formula, and the activations kept."""
    order = " ".join(f"{event.kind}{event.micro_batch}@{event.stage}" for event in in_order(stages))
    rows = slots(stages)
    drawn = [f"  stage {stage} | {' '.join(f'{slot:3}' for slot in row)}" for stage, row in enumerate(rows)]
    idle, total = sum(row.count(IDLE) for row in rows), sum(map(len, rows))
    num_micro_batches = len({event.micro_batch for event in stages[0]})
    bubble = (len(rows) - 1) / (num_micro_batches + len(rows) - 1)
    kept = [max(event.num_kept for event in events) for events in stages]
    return "\n".join(
        [
            textwrap.fill(order, 120, initial_indent="as they ended, action@stage: ", subsequent_indent="  "),
            "in that order, if every action took one slot:",
            *drawn,
            f"bubble, if so: {idle} of {total} slots idle = {idle / total:.1%}; by formula {bubble:.1%}",
            f"micro-batches whose activations are kept at once, by stage: {kept}",
        ]
    )
