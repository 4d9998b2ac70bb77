"""Watch a run in the terminal, while it trains or afterwards, or compare several runs."""

from __future__ import annotations

import contextlib
import io
import os
import select
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.errors import OneLineParser, run_command
from common.escaping import printable
from training.monitoring.events import read_metrics
from training.monitoring.records import format_percent, format_time, metrics_of
from training.monitoring.run_folder import RunFolder, RunSnapshot
from training.monitoring.status import LOST, RankStatus

SECONDS_PER_FRAME = 0.5
PLAIN_WIDTH = 120
NOT_THERE = "–"
# Letters, so that the bar can be read without colours too.
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
STATES = {
    "running": "green",
    "finished": "bold green",
    "stopped": "yellow",
    "failed": "bold red",
    "silent": "red",
}
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_CELLS = 32
PHASE_CELLS = 12
MOST_RANKS = 16
MOST_EVENTS = 6
MOST_REMARKS = 4
# Fields of an event that every event has, or that are elsewhere in the frame.
HIDDEN_FIELDS = {
    "kind",
    "time",
    "rank",
    "restart",
    "step",
    "total_steps",
    "seconds",
    "host",
    "pid",
    "process_started",
}
HIDDEN_FIELDS |= {
    "learning_rate",
    "is_best",
    "num_bytes",
    "blocked_seconds",
    "validation_loss",
    "validation_macro_f1",
}


def main() -> None:
    parser = OneLineParser(prog="python -m training.watch", description=__doc__)
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="the run folder, OUTPUT_DIR.run; several are compared in one table",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one frame and exit, as without a terminal"
    )
    options = parser.parse_args()
    folders = [RunFolder(run) for run in options.runs]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that only knows ASCII shows a question mark for a block of a bar, and the run
        # is watched all the same.
        sys.stdout.reconfigure(errors="replace")
    console = make_console()
    snapshots = [folder.refresh() for folder in folders]
    if len(folders) == 1 and console.is_terminal and not options.once:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(folders[0], console)
    elif remote := [one.silent_seconds for one in snapshots if one.has_remote_ranks]:
        # By then a rank that is alive has written again, and one that is not is silent.
        time.sleep(max(remote) + 1)
    console.print(draw(folders[0].refresh()) if len(folders) == 1 else compare(folders))


def make_console() -> Console:
    """A console that prints frames; without a terminal plain and as wide as a log."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", None)
    width = None if is_terminal or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(
        force_terminal=is_terminal, width=width, markup=False, highlight=False, emoji=False
    )


def _follow(folder: RunFolder, console: Console) -> None:
    with _key_pressed() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        # A run that has failed or stopped may be started again, so only a finished one ends this.
        while (snapshot := folder.refresh()).state != "finished":
            live.update(fit_to_height(snapshot, console), refresh=True)
            if pressed(SECONDS_PER_FRAME) in ("q", "Q"):
                return


@contextlib.contextmanager
def _key_pressed() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits so many seconds for a key and returns it, or '' for none."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    import termios  # not on every system
    import tty

    # Keys arrive one by one, without Enter and without being shown. Whatever happens, the terminal
    # gets its own settings back, or the shell would not show what is typed.
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield (
            lambda seconds: (
                sys.stdin.read(1) if select.select([sys.stdin], [], [], seconds)[0] else ""
            )
        )
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def fit_to_height(snapshot: RunSnapshot, console: Console) -> RenderableType:
    """The frame with as many ranks as the terminal has lines for, because a live frame cannot be scrolled."""
    # All but the ranks is drawn once to count its lines, because some of them come and go.
    num_others = len(console.render_lines(draw(snapshot, most_ranks=0)))
    return draw(snapshot, max(1, console.height - num_others))


def draw(snapshot: RunSnapshot, most_ranks: int = MOST_RANKS) -> RenderableType:
    """One frame, for 80 columns or more: progress, curves, ranks, last events.

    Of more than ``most_ranks`` ranks, those that need attention are shown first.
    """
    parts = [
        _title(snapshot),
        _progress(snapshot),
        _figures(snapshot),
        _checkpoint(snapshot),
        Text(""),
    ]
    parts += [Text(printable(remark), "red") for remark in _remarks(snapshot)[:MOST_REMARKS]]
    if snapshot.statuses:
        hidden = len(snapshot.statuses) - most_ranks
        legend = f"and {hidden} more ranks; " if hidden > 0 else ""
        legend += (
            "  ".join(f"{letter} {name}" for name, (letter, _) in PHASES.items()) + "  . other"
        )
        parts += [_ranks(snapshot, most_ranks), Text(legend, "dim", no_wrap=True)]
    if snapshot.events:
        parts += [Text(""), *(_event(event) for event in list(snapshot.events)[-MOST_EVENTS:])]
    return Group(*parts)


def compare(folders: Sequence[RunFolder]) -> Table:
    """A column per run: the settings in which they differ, and what came of them."""
    snapshots = [folder.refresh() for folder in folders]
    results = [
        _results(snapshot, read_metrics(folder.path))
        for folder, snapshot in zip(folders, snapshots, strict=True)
    ]
    settings = dict.fromkeys(name for snapshot in snapshots for name in snapshot.config)
    rows = {
        name: [str(snapshot.config.get(name, NOT_THERE)) for snapshot in snapshots]
        for name in settings
        if name != "output_dir"  # each run has its own
    }
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", style="dim")
    names = [snapshot.name for snapshot in snapshots]
    if len(set(names)) < len(names):
        names = [str(folder.path) for folder in folders]
    for name in names:
        table.add_column(Text(printable(name)), justify="right", overflow="fold")
    different = {name: values for name, values in rows.items() if len(set(values)) > 1}
    for name, values in different.items():
        table.add_row(name, *(Text(printable(value) or "(empty)") for value in values))
    table.caption = None if different else "Their settings are the same."
    table.add_section()
    for name in dict.fromkeys(name for result in results for name in result):
        table.add_row(name, *(Text(result.get(name, NOT_THERE)) for result in results))
    return table


def _results(snapshot: RunSnapshot, records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What the table has of a run below its settings."""
    found = {"state": snapshot.state, "steps": f"{snapshot.step:,} of {snapshot.total_steps:,}"}
    steps = [record for record in records if record["kind"] == "step"]
    if steps:
        found["time"] = format_time(steps[-1]["seconds"])
    # Null if the clock said that a step took no time.
    if paces := [step["samples_per_second"] for step in steps if step["samples_per_second"]]:
        found["samples/s"] = f"{statistics.median(paces):,.0f}"
    evaluations = {}
    for record in records:
        if record["kind"] == "epoch" and record.get("is_best") and record.get("validation"):
            evaluations["validation"] = record["validation"]  # of the model that is kept
        elif record["kind"] == "test":
            evaluations["test"] = record
    for part, evaluation in evaluations.items():
        for name, metric in metrics_of(evaluation).items():
            found[f"{part} {metric.title}"] = metric.shown(evaluation[name])
    return found


def _remarks(snapshot: RunSnapshot) -> list[str]:
    """Why ranks failed, then which are slow."""
    failed = [rank for rank in snapshot.statuses if rank.message]
    # Those that only lost another rank say nothing if that one gives a reason.
    with_reason = [rank for rank in failed if not rank.message.startswith(LOST)]
    remarks = [f"rank {rank.rank}: {rank.message}" for rank in with_reason or failed]
    return remarks + [
        f"rank {rank.rank} is slower than the others in: {', '.join(rank.slow_now)}"
        for rank in snapshot.statuses
        if rank.slow_now
    ]


def sparkline(values: Sequence[float], cells: int = SPARKLINE_CELLS) -> str:
    """A curve in one line: the mean of each part of it, from the lowest to the highest block."""
    if not values:
        return ""
    cells = min(cells, len(values))
    # Whole numbers, and no more parts than values: so no part is empty.
    edges = [i * len(values) // cells for i in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    height = (high - low) or 1.0
    return "".join(BARS[round((mean - low) / height * (len(BARS) - 1))] for mean in means)


def _title(snapshot: RunSnapshot) -> Text:
    config, state = snapshot.config, snapshot.state
    facts = [printable(config[name]) for name in ("model", "dataset", "strategy") if name in config]
    if snapshot.statuses:
        size = snapshot.statuses[0].world_size
        facts.append(f"{size} rank{'s' * (size > 1)}")
    if snapshot.starts > 1:
        facts.append(f"{snapshot.starts - 1} restart{'s' * (snapshot.starts > 2)}")
    parts = (
        (printable(snapshot.name), "bold"),
        "  ",
        (state, STATES.get(state, "")),
        "  ",
        (", ".join(facts), "dim"),
    )
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _progress(snapshot: RunSnapshot) -> RenderableType:
    if not snapshot.total_steps:
        return Text("no step yet" if snapshot.state == "running" else f"step {snapshot.step:,}")
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    # Ranks that resumed a finished run took no step themselves: then the last logged step has the
    # epoch.
    last_epoch = snapshot.recent[-1].get("epoch", 0) if snapshot.recent else 0
    epoch = max(last_epoch, *(status.epoch for status in snapshot.statuses))
    left = snapshot.seconds_left
    eta = f"ETA {format_time(left)}" if left and snapshot.state == "running" else ""
    share = format_percent(snapshot.step / snapshot.total_steps, digits=0)
    bar = ProgressBar(snapshot.total_steps, snapshot.step)
    grid.add_row(
        f"step {snapshot.step:,}/{snapshot.total_steps:,}",
        bar,
        f"{share}  epoch {epoch}  {eta}".rstrip(),
    )
    return grid


def _figures(snapshot: RunSnapshot) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    last = snapshot.recent[-1] if snapshot.recent else {}
    if last.get("loss") is not None:
        text.append(f"loss {last['loss']:.4f} ")
    text.append(sparkline(snapshot.losses) if last else "", "cyan")
    for name, pattern in (
        ("learning_rate", " lr {:.2e}"),
        ("samples_per_second", "  {:,.0f} samples/s"),
        ("tokens_per_second", "  {:,.0f} tokens/s"),
    ):
        if last.get(name) is not None:
            text.append(pattern.format(last[name]))
    return text


def _checkpoint(snapshot: RunSnapshot) -> Text:
    event = snapshot.checkpoint or {}
    saved = [status for status in snapshot.statuses if status.last_checkpoint_step is not None]
    if not saved:
        if event and snapshot.statuses:
            return Text(f"checkpoint of step {event['step']:,}, by an earlier start of this run")
        return Text("no checkpoint yet" if snapshot.statuses else "", "dim")
    first = saved[0]
    parts = [f"checkpoint of step {first.last_checkpoint_step:,}"]
    # Both times are by the clock of the rank's machine, which may differ from this one's.
    if first.last_checkpoint_time is not None and snapshot.state == "running":
        parts.append(f"{format_time(max(0.0, first.written - first.last_checkpoint_time))} ago")
    if event.get("step") == first.last_checkpoint_step:
        parts.append(
            f"{event.get('blocked_seconds', 0):.2f} s blocked of {event.get('seconds', 0):.2f} s"
        )
        if event.get("num_bytes"):
            parts.append(_bytes(event["num_bytes"]))
    return Text(", ".join(parts))


def _ranks(snapshot: RunSnapshot, most: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for heading in ("rank", "host", "pid", "state", "phase", "step", "a step's time", "memory"):
        right = heading in ("rank", "pid", "step", "memory")
        table.add_column(
            heading, justify="right" if right else "left", no_wrap=True, overflow="ellipsis"
        )

    def urgency(rank: RankStatus) -> int:  # the most urgent first
        return (
            0
            if rank.state == "failed"
            else 1
            if snapshot.is_silent(rank)
            else 2
            if rank.slow_now
            else 3
        )

    shown = sorted(snapshot.statuses, key=lambda rank: (urgency(rank), rank.rank))[:most]
    # Chosen by urgency, and shown by number, so that a rank stays in its place from frame to frame.
    for rank in sorted(shown, key=lambda rank: rank.rank):
        state = Text(rank.state, STATES.get(rank.state, ""))
        if snapshot.is_silent(rank):
            state = Text(f"silent {_short(snapshot.silent[rank.rank])}", "bold red")
        elif rank.slow_now:
            state = Text("slow", "bold yellow")
        phase = f"{rank.phase} {_short(rank.phase_seconds)}" if rank.state == "running" else ""
        process = [str(rank.rank), printable(rank.host[:10]), str(rank.pid)]
        table.add_row(
            *process,
            state,
            phase,
            f"{rank.step:,}",
            _phase_bar(rank.phases),
            _bytes(rank.memory_bytes),
        )
    return table


def _phase_bar(phases: dict[str, float]) -> Text:
    """A step's time as a bar; each cell is the phase that the middle of the cell falls into."""
    total, text = sum(phases.values()), Text()
    if total <= 0:
        return text
    order = [
        *(name for name in PHASES if name in phases),
        *(name for name in phases if name not in PHASES),
    ]
    until, ends = 0.0, []
    for name in order:
        until += phases[name] / total
        ends.append((until, PHASES.get(name, OTHER)))
    for cell in range(PHASE_CELLS):
        middle = (cell + 0.5) / PHASE_CELLS
        text.append(*next((look for end, look in ends if middle <= end), ends[-1][1]))
    return text


def _event(event: dict[str, Any]) -> Text:
    fields = []
    for name, value in event.items():
        if (
            name not in HIDDEN_FIELDS
            and value not in (None, "")
            and not isinstance(value, dict | list)
        ):
            fields.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    who = f"rank {event.get('rank', '?')}, step {event.get('step', '?')}"
    style = {"failed": "red", "hang": "red", "checkpoint_failed": "red", "straggler": "yellow"}.get(
        event["kind"], ""
    )
    what = f"{event['kind'].replace('_', ' ')}  {', '.join(fields)}".rstrip()
    return Text.assemble(
        (printable(f"{clock}  {who:18} "), "dim"),
        (printable(what), style),
        no_wrap=True,
        overflow="ellipsis",
    )


def _short(seconds: float) -> str:
    return format_time(seconds) if seconds >= 60 else f"{seconds:.0f}s"


def _bytes(count: float) -> str:
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 1000 and unit != "TB":
        count, unit = count / 1000, next(units)
    return f"{count:.1f} {unit}" if count < 10 and unit != "B" else f"{count:.0f} {unit}"


if __name__ == "__main__":
    run_command(main)
