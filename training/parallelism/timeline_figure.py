"""Timelines of pipeline schedules as one PNG. Imports matplotlib, which takes a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from common.errors import UserError
from training.parallelism.timeline import COLOURS, NAMES, PASTEL, Timeline

INCHES_WIDE = 9.0
INCHES_A_RANK = 0.3
INCHES_A_TITLE = 0.45
DOTS_PER_INCH = 120
INK = "#1c2128"
MUTED = "#5b6470"
BUBBLE = "#f1f3f5"
# A number needs this much room, in inches for each of its digits.
INCHES_A_DIGIT = 0.075


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw timelines one above the other, on one scale, so that the shorter is the faster.

    Raises:
        UserError: the file cannot be written.
    """
    heights = [INCHES_A_RANK * len(timeline.ranks) + INCHES_A_TITLE for timeline in timelines]
    with mpl.rc_context({"font.size": 9, "text.color": INK, "axes.edgecolor": MUTED}):
        figure = Figure(figsize=(INCHES_WIDE, sum(heights) + 0.55), layout="constrained")
        panels = figure.subplots(len(timelines), squeeze=False, height_ratios=heights)[:, 0]
        longest = max(timeline.duration / timeline.stages_per_rank for timeline in timelines)
        for axes, timeline in zip(panels, timelines, strict=True):
            _panel(axes, timeline, longest)
        for axes in panels[:-1]:
            axes.set_xticks([])
        panels[-1].set_xlabel("time, in forward passes of a rank's whole part (simulated)", color=MUTED)
        _legend(figure, timelines)
        try:
            figure.savefig(path, dpi=DOTS_PER_INCH, format="png", pil_kwargs={"optimize": True})
        except OSError as error:
            raise UserError(f"--png {path}: cannot be written ({error.strerror})") from error


def _panel(axes: Axes, timeline: Timeline, longest: float) -> None:
    # A stage of several on a rank is as much smaller.
    scale = 1 / timeline.stages_per_rank
    room = (INCHES_WIDE - 0.8) / longest
    for rank, boxes in enumerate(timeline.ranks):
        axes.add_patch(Rectangle((0, rank - 0.45), timeline.duration * scale, 0.9, color=BUBBLE, linewidth=0))
        for box in boxes:
            start, width = box.start * scale, (box.end - box.start) * scale
            turn, number = timeline.turn(box), str(box.action.micro_batch)
            colour = (PASTEL if turn % 2 else COLOURS)[box.action.kind]
            axes.add_patch(
                Rectangle((start, rank - 0.45), width, 0.9, facecolor=colour, edgecolor="white", linewidth=0.6)
            )
            if width * room > INCHES_A_DIGIT * len(number):
                axes.text(start + width / 2, rank, number, ha="center", va="center_baseline", fontsize=7)
    axes.set_title(timeline.title, loc="left", fontsize=10)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(timeline.ranks) - 0.45, -0.55)
    axes.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))])
    axes.tick_params(length=0, colors=MUTED)
    axes.spines[:].set_visible(False)


def _legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    shown = {(box.action.kind, t.turn(box) % 2) for t in timelines for boxes in t.ranks for box in boxes}
    names = {kind: name for kind, name in NAMES.items() if any(kind == other for other, _ in shown)}
    if "B" in names and "I" in names:  # one colour: the half is what the whole gives the stage before
        names["B"] = f"backward, or its {names.pop('I')}"
    patches = [Patch(color=COLOURS[kind], label=name) for kind, name in names.items()]
    patches.append(Patch(color=BUBBLE, label="bubble"))
    if any(turn for _, turn in shown):
        patches.append(Patch(color=PASTEL["F"], label="pale: a rank's second stage"))
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
