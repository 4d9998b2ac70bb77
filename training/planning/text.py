"""Text: an answer in the terminal, and as Markdown between the marks of a page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.errors import UserError
from common.files import write_whole
from training.planning.answer import Answer
from training.planning.sections import DryRuns, Section, commands, sections, summary, title, warnings, work_line

PLAIN_WIDTH = 150
BEGIN, END = "<!-- begin: python -m training.planning -->\n", "<!-- end: python -m training.planning -->"


def print_answer(answer: Answer, dry_runs: DryRuns) -> None:
    """Print every table, the commands, and what to mind."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(f"{title(answer)}\n{work_line(answer)}; every figure is simulated", style="bold")
    console.print(summary(answer))
    for section in sections(answer, dry_runs):
        console.print()
        console.print(_table(section))
        for note in section.notes:
            console.print(note, style="dim")
    if commands(answer):
        console.print("\nTo launch the best", style="bold")
    for name, command in commands(answer):
        console.print(f"# {name}", style="dim")
        console.print(command, soft_wrap=True)
    for warning in warnings(answer):
        console.print(warning, style="yellow")


def _table(section: Section) -> Table:
    table = Table(title=f"{section.title} (simulated)", title_justify="left", title_style="bold", box=None)
    for place, name in enumerate(section.header):
        table.add_column(name, justify="right" if section.is_figure(place) else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*row)
    return table


def markdown(answer: Answer, dry_runs: DryRuns) -> str:
    """The answer as Markdown."""
    lines = [f"**{title(answer)}**, {work_line(answer)}. Every figure is simulated.", "", summary(answer), ""]
    for section in sections(answer, dry_runs):
        lines += [f"{section.title} (simulated):", ""]
        lines += [f"| {' | '.join(row)} |" for row in (section.header, _rule(section), *section.rows)]
        lines += ["", *section.notes, *[""] * bool(section.notes)]
    for name, command in commands(answer):
        lines += [f"To launch {name}:", "", "```bash", command, "```", ""]
    return "\n".join([*lines, *warnings(answer)]).rstrip() + "\n"


def _rule(section: Section) -> list[str]:
    return ["---:" if section.is_figure(place) else "---" for place in range(len(section.header))]


def read_page(path: Path) -> tuple[str, str]:
    """What stands before and after the answer in a Markdown page, with the marks.

    Raises:
        UserError: the page cannot be read, or has no marks.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--page {path}: {error.strerror}", code="plan-page") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--page {path}: is not UTF-8 text", code="plan-page") from error
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"--page {path}: has no lines {BEGIN.strip()} and {END.strip()}", code="plan-page")
    return before + begin, end + after


def write_page(path: Path, answer: Answer, dry_runs: DryRuns) -> None:
    """Put the answer between the marks of a Markdown page.

    Raises:
        OSError: the page cannot be written.
        UserError: as :func:`read_page`.
    """
    before, after = read_page(path)
    write_whole(path, (before + markdown(answer, dry_runs) + after).encode())
