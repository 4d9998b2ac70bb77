"""Dashboard: a run in one frame of a terminal, 80 columns or more, with colours or without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from training.monitoring.records import format_percent, format_time
from training.monitoring.run_folder import Picture
from training.monitoring.status import LOST, RankStatus

# Letters, so that the bar reads without colours too.
PHASES = {
    "data": ("d", "yellow"),
    "forward": ("f", "green"),
    "backward": ("b", "cyan"),
    "optimizer": ("o", "blue"),
    "agree": ("a", "magenta"),
    "evaluate": ("e", "bright_black"),
    "save": ("s", "red"),
}
OTHER = (".", "bright_black")
STATES = {"running": "green", "finished": "bold green", "stopped": "yellow", "failed": "bold red", "silent": "red"}
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_CELLS = 32
PHASE_CELLS = 12
MOST_RANKS = 16
MOST_EVENTS = 6
MOST_REMARKS = 4
# Of an event, what every one has, and what stands elsewhere in the frame.
UNSAID = {"kind", "time", "rank", "restart", "step", "total_steps", "seconds", "host", "pid", "process_started"}
UNSAID |= {"learning_rate", "is_best", "num_bytes", "blocked_seconds", "validation_loss", "validation_macro_f1"}


def draw(picture: Picture, most_ranks: int = MOST_RANKS) -> RenderableType:
    """A run as it stands: where it is, its curves, its ranks, its last events.

    Args:
        picture: what its folder showed.
        most_ranks: ranks of which a line is shown; of more, those that need a look come first.
    """
    parts = [_title(picture), _progress(picture), _figures(picture), _checkpoint(picture), Text("")]
    parts += [Text(remark, "red") for remark in _remarks(picture)[:MOST_REMARKS]]
    if picture.statuses:
        parts += [_ranks(picture, most_ranks), Text(_legend(picture, most_ranks), "dim", no_wrap=True)]
    if picture.events:
        parts += [Text(""), *(_event(event) for event in list(picture.events)[-MOST_EVENTS:])]
    return Group(*parts)


def sparkline(values: Sequence[float], cells: int = SPARKLINE_CELLS) -> str:
    """A curve in one line: the mean of each part of it, from the lowest to the highest block."""
    if not values:
        return ""
    cells = min(cells, len(values))
    edges = [i * len(values) // cells for i in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    height = (high - low) or 1.0
    return "".join(BARS[round((mean - low) / height * (len(BARS) - 1))] for mean in means)


def _title(picture: Picture) -> Text:
    config, state = picture.config, picture.state
    facts = [str(config[name]) for name in ("model", "dataset", "strategy") if name in config]
    if picture.statuses:
        size = picture.statuses[0].world_size
        facts.append(f"{size} rank{'s' * (size > 1)}")
    if picture.starts > 1:
        facts.append(f"{picture.starts - 1} restart{'s' * (picture.starts > 2)}")
    parts = ((picture.name, "bold"), "  ", (state, STATES.get(state, "")), "  ", (", ".join(facts), "dim"))
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _progress(picture: Picture) -> RenderableType:
    if not picture.total_steps:
        return Text("no step yet" if picture.state == "running" else f"step {picture.step:,}")
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    # Ranks that resumed a finished run took no step themselves, so the last recorded one may know better.
    last_epoch = picture.recent[-1].get("epoch", 0) if picture.recent else 0
    epoch = max(last_epoch, *(status.epoch for status in picture.statuses))
    left = picture.seconds_left
    eta = f"ETA {format_time(left)}" if left and picture.state == "running" else ""
    where = f"step {picture.step:,}/{picture.total_steps:,}"
    share = format_percent(picture.step / picture.total_steps, digits=0)
    bar = ProgressBar(picture.total_steps, picture.step)
    grid.add_row(where, bar, f"{share}  epoch {epoch}  {eta}".rstrip())
    return grid


def _figures(picture: Picture) -> Text:
    if not picture.recent:
        return Text("")
    last, text = picture.recent[-1], Text(no_wrap=True, overflow="ellipsis")
    for name, pattern in (("loss", "loss {:.4f} "), ("learning_rate", " lr {:.2e}")):
        if last.get(name) is not None:
            text.append(pattern.format(last[name]))
        if name == "loss":
            text.append(sparkline(picture.losses), "cyan")
    for name, unit in (("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s")):
        if last.get(name) is not None:
            text.append(f"  {last[name]:,.0f} {unit}")
    return text


def _checkpoint(picture: Picture) -> Text:
    saved = [status for status in picture.statuses if status.last_checkpoint_step is not None]
    if not saved:
        if picture.checkpoint and picture.statuses:
            return Text(f"checkpoint of step {picture.checkpoint['step']:,}, by an earlier start of this run")
        return Text("no checkpoint yet", "dim") if picture.statuses else Text("")
    first = saved[0]
    words = [f"checkpoint of step {first.last_checkpoint_step:,}"]
    if first.last_checkpoint_time is not None and picture.state == "running":
        words.append(f"{format_time(max(0.0, first.written - first.last_checkpoint_time))} ago")
    event = picture.checkpoint or {}
    if event.get("step") == first.last_checkpoint_step:
        words.append(f"{event.get('blocked_seconds', 0):.2f} s blocked of {event.get('seconds', 0):.2f} s")
        if event.get("num_bytes"):
            words.append(_bytes(event["num_bytes"]))
    return Text(", ".join(words))


def _ranks(picture: Picture, most: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for heading in ("rank", "host", "pid", "state", "phase", "step", "a step's time", "memory"):
        right = heading in ("rank", "pid", "step", "memory")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    ranks = picture.statuses
    if len(ranks) > most:
        ranks = sorted(ranks, key=lambda rank: (_urgency(rank, picture.is_silent(rank)), rank.rank))[:most]
        ranks.sort(key=lambda rank: rank.rank)
    for rank in ranks:
        silent = picture.silent[rank.rank] if picture.is_silent(rank) else None
        table.add_row(*_cells(rank, silent))
    return table


def _urgency(rank: RankStatus, is_silent: bool) -> int:
    """Which ranks are shown where there is no room for all: the lowest first."""
    return 0 if rank.state == "failed" else 1 if is_silent else 2 if rank.slow_now else 3


def _cells(rank: RankStatus, silent: float | None) -> list[str | Text]:
    state = Text(rank.state, STATES.get(rank.state, ""))
    if silent is not None:
        state = Text(f"silent {_short(silent)}", "bold red")
    elif rank.slow_now:
        state = Text("slow", "bold yellow")
    phase = f"{rank.phase} {_short(rank.phase_seconds)}" if rank.state == "running" else ""
    place = [str(rank.rank), rank.host[:10], str(rank.pid)]
    return [*place, state, phase, f"{rank.step:,}", _phase_bar(rank.phases), _bytes(rank.memory_bytes)]


def _remarks(picture: Picture) -> list[str]:
    """Why ranks failed, and which are slow; of those that only lost another one nothing, where that one says why."""
    failed = [rank for rank in picture.statuses if rank.message]
    own = [rank for rank in failed if not rank.message.startswith(LOST)]
    slow = [
        f"rank {rank.rank} is slower than the others in: {', '.join(rank.slow_now)}"
        for rank in picture.statuses
        if rank.slow_now
    ]
    return [f"rank {rank.rank}: {rank.message}" for rank in own or failed] + slow


def _phase_bar(phases: dict[str, float]) -> Text:
    """A step's time as a bar, each cell the phase that its middle falls into."""
    whole, text = sum(phases.values()), Text()
    if whole <= 0:
        return text
    order = [*(name for name in PHASES if name in phases), *(name for name in phases if name not in PHASES)]
    until, ends = 0.0, []
    for name in order:
        until += phases[name] / whole
        ends.append((until, PHASES.get(name, OTHER)))
    for cell in range(PHASE_CELLS):
        middle = (cell + 0.5) / PHASE_CELLS
        text.append(*next((look for end, look in ends if middle <= end), ends[-1][1]))
    return text


def _legend(picture: Picture, most: int) -> str:
    hidden = len(picture.statuses) - most
    more = f"and {hidden} more ranks; " if hidden > 0 else ""
    return more + "  ".join(f"{letter} {name}" for name, (letter, _) in PHASES.items()) + "  . other"


def _event(event: dict[str, Any]) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    said = [f"{name} {_value(value)}" for name, value in event.items() if name not in UNSAID and _is_plain(value)]
    who = f"rank {event.get('rank', '?')}, step {event.get('step', '?')}"
    style = {"failed": "red", "hang": "red", "checkpoint_failed": "red", "straggler": "yellow"}.get(event["kind"], "")
    words = f"{event['kind'].replace('_', ' ')}  {', '.join(said)}".rstrip()
    return Text.assemble((f"{clock}  {who:18} ", "dim"), (words, style), no_wrap=True, overflow="ellipsis")


def _is_plain(value: Any) -> bool:
    return value is not None and value != "" and not isinstance(value, dict | list)


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(seconds: float) -> str:
    return format_time(seconds) if seconds >= 60 else f"{seconds:.0f}s"


def _bytes(count: float) -> str:
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 1000 and unit != "TB":
        count, unit = count / 1000, next(units)
    return f"{count:.1f} {unit}" if count < 10 and unit != "B" else f"{count:.0f} {unit}"
