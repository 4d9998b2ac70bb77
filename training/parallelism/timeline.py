"""A pipeline schedule over time, printed and drawn: python -m training.parallelism.timeline --schedule 1f1b.

Times are simulated: a forward pass of a stage takes 1, the gradients of its inputs 1, those of its weights 1, a hop
nothing. What a rank waits is the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from common.errors import OneLineParser, UserError, positive, run_command
from training.parallelism.schedules import SCHEDULES, Action, order_of_actions

ALL = "all"
COLOURS = {"F": "#6baed6", "B": "#fdae6b", "I": "#fdae6b", "W": "#74c476"}
PASTEL = {"F": "#c6dbef", "B": "#fdd9b5", "I": "#fdd9b5", "W": "#c7e9c0"}
NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
# Tell the kinds apart where there are no colours.
FILL = {"F": " ", "B": "▒", "I": "▒", "W": "░"}
IDLE = "·"


@dataclass(frozen=True)
class Costs:
    """Time of each half of a stage's work on a micro-batch; a whole backward pass takes the sum of its halves."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1

    def of(self, kind: str) -> float:
        """Time of one action."""
        halves = {"F": self.forward, "I": self.backward_input, "W": self.backward_weight}
        return halves.get(kind, self.backward_input + self.backward_weight)


@dataclass(frozen=True)
class Box:
    """An action in its place in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time: for each rank its boxes, in their order."""

    schedule: str
    micro_batches: int
    stages_per_rank: int
    ranks: list[list[Box]]

    @property
    def duration(self) -> float:
        """When the last rank is done."""
        return max(boxes[-1].end for boxes in self.ranks)

    @property
    def bubble_share(self) -> float:
        """The share of the ranks' time in which they wait."""
        busy = sum(box.end - box.start for boxes in self.ranks for box in boxes)
        return 1 - busy / (len(self.ranks) * self.duration)

    def activations_kept(self, rank: int) -> float:
        """The most micro-batches whose activations a rank holds at once, each of all its stages."""
        kept = most = 0
        for box in self.ranks[rank]:
            kept += {"F": 1, "I": 0}.get(box.action.kind, -1)
            most = max(most, kept)
        return most / self.stages_per_rank

    @property
    def title(self) -> str:
        """One line that says what is drawn."""
        ranks, name = len(self.ranks), SCHEDULES[self.schedule].title
        stages = f"{ranks * self.stages_per_rank} stages on " if self.stages_per_rank > 1 else ""
        return f"{name}: {stages}{ranks} ranks, {self.micro_batches} micro-batches, bubble {self.bubble_share:.1%}"

    def turn(self, box: Box) -> int:
        """Which of its rank's stages a box belongs to: 0 for the first in the model."""
        return box.action.stage // len(self.ranks)


def simulate(
    schedule: str,
    num_ranks: int,
    micro_batches: int,
    stages_per_rank: int | None = None,
    costs: Costs | None = None,
) -> Timeline:
    """Put a schedule's actions into time: each begins when its rank is free and what it needs is there.

    Raises:
        UserError: the schedule cannot run this many micro-batches.
    """
    costs = costs or Costs()
    waiting = order_of_actions(schedule, num_ranks, micro_batches, stages_per_rank)
    count = stages_per_rank or SCHEDULES[schedule].stages_per_rank
    last = num_ranks * count - 1
    ranks: list[list[Box]] = [[] for _ in waiting]
    done: dict[tuple[int, str, int], float] = {}
    position = [0] * num_ranks
    while any(place < len(actions) for place, actions in zip(position, waiting, strict=True)):
        before = list(position)
        for rank, actions in enumerate(waiting):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = [done.get(need) for need in _needs(action, last)]
                if None in needed:
                    break
                start = max([ranks[rank][-1].end if ranks[rank] else 0, *needed])
                box = Box(action, start, start + costs.of(action.kind))
                ranks[rank].append(box)
                # The halves and the whole of a backward pass give the stage before the same thing.
                done[action.stage, "B" if action.kind == "I" else action.kind, action.micro_batch] = box.end
                position[rank] += 1
        assert position != before, "the ranks wait for each other"
    return Timeline(schedule, micro_batches, count, ranks)


def _needs(action: Action, last: int) -> list[tuple[int, str, int]]:
    stage, number = action.stage, action.micro_batch
    if action.kind == "F":
        return [(stage - 1, "F", number)] if stage else []
    if action.kind == "W":
        return [(stage, "B", number)]
    return [(stage, "F", number), *([(stage + 1, "B", number)] if stage < last else [])]


def rows_of_text(timeline: Timeline) -> list[Text]:
    """One line a rank, a column or more a unit of time: a micro-batch's number, then shade by kind.

    Where a rank has several stages, a letter behind the number tells which.
    """
    label = len(str(timeline.micro_batches - 1)) + (timeline.stages_per_rank > 1)
    unit = label + 1
    rows = []
    for boxes in timeline.ranks:
        row = Text()
        for box in boxes:
            row.append(IDLE * (round(box.start * unit) - len(row)), style="bright_black")
            turn, kind = timeline.turn(box), box.action.kind
            letter = chr(ord("a") + turn) if timeline.stages_per_rank > 1 else ""
            text = f"{box.action.micro_batch}{letter}".ljust(label) + FILL[kind]
            colours = PASTEL if turn % 2 else COLOURS
            row.append(text.ljust(round((box.end - box.start) * unit), FILL[kind]), style=f"black on {colours[kind]}")
        row.append(IDLE * (round(timeline.duration * unit) - len(row)), style="bright_black")
        rows.append(row)
    return rows


def show(timeline: Timeline, console: Console) -> None:
    """Print a timeline, in as many pieces as the terminal is narrow."""
    margin = len(f"rank {len(timeline.ranks) - 1} ")
    rows = rows_of_text(timeline)
    columns = max(20, console.width - margin) if console.is_terminal else len(rows[0])
    console.print(Text(timeline.title, style="bold"))
    for start in range(0, len(rows[0]), columns):
        for rank, row in enumerate(rows):
            line = Text(f"rank {rank} ".rjust(margin)) + row[start : start + columns]
            console.print(line, soft_wrap=True)
        console.print()
    kept = ", ".join(f"{timeline.activations_kept(rank):g}" for rank in range(len(timeline.ranks)))
    console.print(Text(f"micro-batches whose activations each rank keeps at most: {kept}"), soft_wrap=True)


def _legend(timelines: Sequence[Timeline]) -> Text:
    shown = {box.action.kind for timeline in timelines for boxes in timeline.ranks for box in boxes}
    legend = Text()
    for kind in (kind for kind in NAMES if kind in shown):
        legend.append(f"n{FILL[kind] * 2}", style=f"black on {COLOURS[kind]}")
        legend.append(f" {NAMES[kind]}   ")
    return legend.append(f"{IDLE * 3} waiting", style="bright_black")


def timelines_of(schedule: str, stages: int, micro_batches: int, stages_per_rank: int | None) -> list[Timeline]:
    """The timelines that a command asks for.

    Raises:
        UserError: the stages do not come out even over ranks, or the schedule cannot run so.
    """
    if schedule == ALL:
        return [simulate(name, stages, micro_batches) for name in SCHEDULES]
    needed = SCHEDULES[schedule].stages_per_rank
    count = stages_per_rank or needed
    may_be_more = schedule in ("interleaved", "zero_bubble")
    if count < needed or (count > needed and not may_be_more):
        wanted = f"{needed} or more" if may_be_more else f"exactly {needed}"
        raise UserError(f"--stages_per_rank {count}: the {schedule} schedule has {wanted}")
    if stages % count:
        raise UserError(f"--stages {stages}: {count} stages a rank need a multiple of {count}")
    return [simulate(schedule, stages // count, micro_batches, count)]


def main() -> None:
    """Print a schedule, and draw it where asked."""
    parser = OneLineParser(prog="python -m training.parallelism.timeline", description=__doc__)
    parser.add_argument(
        "--stages",
        type=positive,
        default=4,
        help="stages of the whole pipeline; with --schedule all, its ranks, each holding as many stages as the "
        "schedule needs (default: %(default)s)",
    )
    parser.add_argument("--micro_batches", type=positive, default=8, help="in one step (default: %(default)s)")
    parser.add_argument("--schedule", choices=[*SCHEDULES, ALL], default="1f1b", help="default: %(default)s")
    parser.add_argument("--stages_per_rank", type=positive, help="default: what the schedule needs, 1 or 2")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it, too")
    options = parser.parse_args()
    timelines = timelines_of(options.schedule, options.stages, options.micro_batches, options.stages_per_rank)
    console = Console(highlight=False)
    for timeline in timelines:
        show(timeline, console)
        console.print()
    console.print(_legend(timelines), soft_wrap=True)
    if options.png:
        from training.parallelism.timeline_figure import draw

        draw(timelines, options.png)
        console.print(f"drawn: {options.png}", soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
