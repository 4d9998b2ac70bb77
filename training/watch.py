"""Watch a run in the terminal, while it trains or afterwards: python -m training.watch RUN [--once]."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console, RenderableType
from rich.live import Live

from common.errors import OneLineParser, run_command
from training.monitoring.dashboard import draw
from training.monitoring.run_folder import Picture, RunFolder

SECONDS_PER_FRAME = 0.5
PLAIN_WIDTH = 120


def main() -> None:
    """Show a run until it has finished or a person leaves."""
    parser = OneLineParser(prog="python -m training.watch", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder, OUTPUT_DIR.run")
    parser.add_argument("--once", action="store_true", help="print one frame and leave; so it is without a terminal")
    options = parser.parse_args()
    folder = RunFolder(options.run)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that only knows ASCII
    console = make_console()
    if console.is_terminal and not options.once:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(folder, console)
    elif (picture := folder.look()).has_strangers:
        # By then a rank that lives has written again, and one that does not is silent.
        time.sleep(picture.silent_seconds + 1)
    console.print(draw(folder.look()))


def make_console() -> Console:
    """A console that prints frames; without a terminal plain and as wide as a log."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", None)
    width = None if is_terminal or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(force_terminal=is_terminal, width=width, markup=False, highlight=False, emoji=False)


def fitted(picture: Picture, console: Console) -> RenderableType:
    """The frame with as many ranks as the terminal has lines for: it shows nothing beyond its last one."""
    num_others = len(console.render_lines(draw(picture, most_ranks=0)))
    return draw(picture, max(1, console.height - num_others))


def _follow(folder: RunFolder, console: Console) -> None:
    """Redraw until the run has finished, or q is pressed."""
    with _key_pressed() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while (picture := folder.look()).state != "finished":
            live.update(fitted(picture, console), refresh=True)
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

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield lambda seconds: sys.stdin.read(1) if select.select([sys.stdin], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


if __name__ == "__main__":
    run_command(main)
