"""A pipeline schedule over time, printed and drawn: python -m training.parallelism.timeline
--schedule 1f1b.

Times are simulated: a stage's forward pass takes 1, the gradients of its inputs 1, those of its
weights 1, sending takes nothing. The time in which a rank waits is the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from common.errors import OneLineParser, UserError, positive, run_command
from training.parallelism.schedules import SCHEDULES, Action, order_of_actions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALL = "all"
# Okabe and Ito's, which people with any colour vision tell apart.
COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#e69f00", "W": "#0a9a70"}
PASTEL = {"F": "#cde9fb", "B": "#ffe2a3", "I": "#ffe2a3", "W": "#84ccb2"}
NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
# Distinguishes the kinds on terminals without colors.
FILL = {"F": " ", "B": "▒", "I": "▒", "W": "░"}
IDLE = "·"
# Colors in the figure.
INCHES_WIDE = 9.0
INCHES_PER_RANK = 0.3
INCHES_PER_TITLE = 0.45
DOTS_PER_INCH = 120
INK = "#1c2128"
MUTED = "#5b6470"
BUBBLE = "#f1f3f5"
# Inches that a number needs per digit.
INCHES_PER_DIGIT = 0.075


@dataclass(frozen=True)
class Costs:
    """Time of each half of a stage's backward pass and of its forward pass; a whole backward pass takes both halves."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1

    def of(self, kind: str) -> float:
        halves = {"F": self.forward, "I": self.backward_input, "W": self.backward_weight}
        return halves.get(kind, self.backward_input + self.backward_weight)


@dataclass(frozen=True)
class Box:
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The boxes of each rank, in order."""

    schedule: str
    micro_batches: int
    stages_per_rank: int
    ranks: list[list[Box]]

    @property
    def duration(self) -> float:
        return max(boxes[-1].end for boxes in self.ranks)

    @property
    def bubble_share(self) -> float:
        """The share of the ranks' time that they spend waiting."""
        busy = sum(box.end - box.start for boxes in self.ranks for box in boxes)
        return 1 - busy / (len(self.ranks) * self.duration)

    def activations_kept(self, rank: int) -> float:
        """The most micro-batches whose activations a rank holds at once, summed over its stages."""
        kept = most = 0
        for box in self.ranks[rank]:
            # A forward pass keeps its activations until the weights have their gradients: after a
            # whole backward pass, or after its second half. The first half frees nothing yet.
            kept += {"F": 1, "I": 0}.get(box.action.kind, -1)
            most = max(most, kept)
        return most / self.stages_per_rank

    @property
    def title(self) -> str:
        ranks, name = len(self.ranks), SCHEDULES[self.schedule].title
        stages = f"{ranks * self.stages_per_rank} stages on " if self.stages_per_rank > 1 else ""
        return (
            f"{name}: {stages}{ranks} ranks, {self.micro_batches} micro-batches, bubble "
            f"{self.bubble_share:.1%}"
        )

    def turn(self, box: Box) -> int:
        return box.action.stage // len(self.ranks)


def simulate(
    schedule: str,
    num_ranks: int,
    micro_batches: int,
    stages_per_rank: int | None = None,
    costs: Costs | None = None,
) -> Timeline:
    """The timeline of a schedule.

    Raises:
        UserError: the schedule cannot run this many micro-batches.
    """
    order = order_of_actions(schedule, num_ranks, micro_batches, stages_per_rank)
    return place(order, schedule, stages_per_rank or SCHEDULES[schedule].stages_per_rank, costs)


def place(
    order: Sequence[Sequence[Action]],
    schedule: str,
    stages_per_rank: int = 1,
    costs: Costs | None = None,
) -> Timeline:
    """Place the actions of each rank in time: each starts when its rank is free and its input is there."""
    costs = costs or Costs()
    last = len(order) * stages_per_rank - 1
    ranks: list[list[Box]] = [[] for _ in order]
    done: dict[tuple[int, str, int], float] = {}
    position = [0] * len(order)
    # Each turn advances every rank as far as it can. An action may wait for one of a rank that
    # comes later in the list, so turns go on until all are done; one without any progress is a
    # deadlock.
    while any(index < len(actions) for index, actions in zip(position, order, strict=True)):
        before = list(position)
        for rank, actions in enumerate(order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = [done.get(need) for need in _needs(action, last)]
                if None in needed:
                    break
                start = max([ranks[rank][-1].end if ranks[rank] else 0, *needed])
                box = Box(action, start, start + costs.of(action.kind))
                ranks[rank].append(box)
                # Half a backward pass or a whole one give the previous stage the same thing.
                done[
                    action.stage, "B" if action.kind == "I" else action.kind, action.micro_batch
                ] = box.end
                position[rank] += 1
        assert position != before, "the ranks wait for each other"
    return Timeline(
        schedule, len({action.micro_batch for action in order[0]}), stages_per_rank, ranks
    )


def _needs(action: Action, last: int) -> list[tuple[int, str, int]]:
    stage, number = action.stage, action.micro_batch
    if action.kind == "F":
        return [(stage - 1, "F", number)] if stage else []
    if action.kind == "W":
        return [(stage, "B", number)]
    # A backward pass needs its own activations, and from the next stage the gradient of its output.
    return [(stage, "F", number), *([(stage + 1, "B", number)] if stage < last else [])]


def rows_of_text(timeline: Timeline) -> list[Text]:
    """One line per rank, one or more columns per unit of time: the micro-batch's number, then a
    shade per kind.

    If a rank has several stages, a letter after the number says which.
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
            row.append(
                text.ljust(round((box.end - box.start) * unit), FILL[kind]),
                style=f"black on {colours[kind]}",
            )
        row.append(IDLE * (round(timeline.duration * unit) - len(row)), style="bright_black")
        rows.append(row)
    return rows


def show(timeline: Timeline, console: Console) -> None:
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
    console.print(
        Text(f"micro-batches whose activations each rank keeps at most: {kept}"), soft_wrap=True
    )


def _legend(timelines: Sequence[Timeline]) -> Text:
    shown = {box.action.kind for timeline in timelines for boxes in timeline.ranks for box in boxes}
    legend = Text()
    for kind in (kind for kind in NAMES if kind in shown):
        legend.append(f"n{FILL[kind] * 2}", style=f"black on {COLOURS[kind]}")
        legend.append(f" {NAMES[kind]}   ")
    return legend.append(f"{IDLE * 3} waiting", style="bright_black")


def timelines_of(
    schedule: str, stages: int, micro_batches: int, stages_per_rank: int | None
) -> list[Timeline]:
    if schedule == ALL:
        return [simulate(name, stages, micro_batches) for name in SCHEDULES]
    needed = SCHEDULES[schedule].stages_per_rank
    count = stages_per_rank or needed
    may_be_more = schedule in ("interleaved", "zero_bubble")
    if count < needed or (count > needed and not may_be_more):
        wanted = f"{needed} or more" if may_be_more else f"exactly {needed}"
        raise UserError(
            f"--stages_per_rank {count}: the {schedule} schedule needs {wanted}",
            code="uneven-split",
        )
    if stages % count:
        raise UserError(
            f"--stages {stages}: {count} stages per rank need a multiple of {count}",
            code="uneven-split",
        )
    return [simulate(schedule, stages // count, micro_batches, count)]


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw timelines on top of each other with the same scale, so that the shortest is the fastest."""
    import matplotlib as mpl  # which takes a second to import
    from matplotlib.figure import Figure

    heights = [INCHES_PER_RANK * len(timeline.ranks) + INCHES_PER_TITLE for timeline in timelines]
    with mpl.rc_context({"font.size": 9, "text.color": INK, "axes.edgecolor": MUTED}):
        figure = Figure(figsize=(INCHES_WIDE, sum(heights) + 0.55), layout="constrained")
        panels = figure.subplots(len(timelines), squeeze=False, height_ratios=heights)[:, 0]
        # With two stages on a rank each is half as large, and so is a box: only then can schedules
        # be compared on one scale.
        longest = max(timeline.duration / timeline.stages_per_rank for timeline in timelines)
        for axes, timeline in zip(panels, timelines, strict=True):
            _panel(axes, timeline, longest)
        for axes in panels[:-1]:
            axes.set_xticks([])
        panels[-1].set_xlabel(
            "time, in forward passes of a rank's whole part (simulated)", color=MUTED
        )
        _figure_legend(figure, timelines)
        try:
            figure.savefig(path, dpi=DOTS_PER_INCH, format="png", pil_kwargs={"optimize": True})
        except OSError as error:
            raise UserError(
                f"--png {path}: cannot be written ({error.strerror})", code="not-writable"
            ) from error


def _panel(axes: Axes, timeline: Timeline, longest: float) -> None:
    from matplotlib.patches import Rectangle

    # Boxes of several stages on a rank are drawn smaller.
    scale = 1 / timeline.stages_per_rank
    room = (INCHES_WIDE - 0.8) / longest
    for rank, boxes in enumerate(timeline.ranks):
        axes.add_patch(
            Rectangle((0, rank - 0.45), timeline.duration * scale, 0.9, color=BUBBLE, linewidth=0)
        )
        for box in boxes:
            start, width = box.start * scale, (box.end - box.start) * scale
            turn, number = timeline.turn(box), str(box.action.micro_batch)
            colour = (PASTEL if turn % 2 else COLOURS)[box.action.kind]
            axes.add_patch(
                Rectangle(
                    (start, rank - 0.45),
                    width,
                    0.9,
                    facecolor=colour,
                    edgecolor="white",
                    linewidth=0.6,
                )
            )
            # A number that does not fit would cover the next box.
            if width * room > INCHES_PER_DIGIT * len(number):
                axes.text(
                    start + width / 2, rank, number, ha="center", va="center_baseline", fontsize=7
                )
    axes.set_title(timeline.title, loc="left", fontsize=10)
    axes.set_xlim(0, longest)
    # Reversed, so that rank 0 is at the top.
    axes.set_ylim(len(timeline.ranks) - 0.45, -0.55)
    axes.set_yticks(
        range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))]
    )
    axes.tick_params(length=0, colors=MUTED)
    axes.spines[:].set_visible(False)


def _figure_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    shown = {
        (box.action.kind, t.turn(box) % 2) for t in timelines for boxes in t.ranks for box in boxes
    }
    names = {kind: name for kind, name in NAMES.items() if any(kind == other for other, _ in shown)}
    if (
        "B" in names and "I" in names
    ):  # one colour: the half is what the whole gives the stage before
        names["B"] = f"backward, or its {names.pop('I')}"
    patches = [Patch(color=COLOURS[kind], label=name) for kind, name in names.items()]
    patches.append(Patch(color=BUBBLE, label="bubble"))
    if any(turn for _, turn in shown):
        patches.append(Patch(color=PASTEL["F"], label="pale: a rank's second stage"))
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False, fontsize=8)


def main() -> None:
    parser = OneLineParser(prog="python -m training.parallelism.timeline", description=__doc__)
    parser.add_argument(
        "--stages",
        type=positive,
        default=4,
        help="stages of the whole pipeline; with --schedule all, its ranks, each holding as many "
        "stages as the "
        "schedule needs (default: %(default)s)",
    )
    parser.add_argument(
        "--micro_batches", type=positive, default=8, help="in one step (default: %(default)s)"
    )
    parser.add_argument(
        "--schedule", choices=[*SCHEDULES, ALL], default="1f1b", help="default: %(default)s"
    )
    parser.add_argument(
        "--stages_per_rank", type=positive, help="default: what the schedule needs, 1 or 2"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw it as a PNG")
    options = parser.parse_args()
    timelines = timelines_of(
        options.schedule, options.stages, options.micro_batches, options.stages_per_rank
    )
    console = Console(highlight=False)
    for timeline in timelines:
        show(timeline, console)
        console.print()
    console.print(_legend(timelines), soft_wrap=True)
    if options.png:
        draw(timelines, options.png)
        console.print(f"drawn: {options.png}", soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
