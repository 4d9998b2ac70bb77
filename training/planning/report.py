"""Report: an answer as one HTML page with bars, whole in one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.files import write_whole
from training.planning.answer import Answer
from training.planning.plan import Plan
from training.planning.sections import (
    MOST_ROWS,
    PARTS,
    TIMES,
    DryRuns,
    commands,
    gib,
    plan_name,
    sections,
    title,
    warnings,
    work_line,
)


@dataclass(frozen=True)
class Bar:
    """A row of a chart: pieces as (place of the colour, what it says, percent of the chart's width)."""

    name: str
    figure: str
    pieces: list[tuple[int, str, float]]


def write_report(path: Path, answer: Answer, dry_runs: DryRuns) -> None:
    """Write the page; it needs no other file and no network.

    Raises:
        OSError: it cannot be written.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    fitting = [plan for plan in answer.plans if plan.fits][:MOST_ROWS]
    page = environment.get_template("report.html").render(
        title=title(answer),
        work=work_line(answer),
        tiles=_tiles(answer),
        memory=[_memory_bar(plan) for plan in fitting],
        memory_parts=list(PARTS.values()),
        times=[_time_bar(plan, max(other.time.total for other in fitting)) for plan in fitting],
        time_parts=list(TIMES.values()),
        sections=sections(answer, dry_runs),
        commands=commands(answer),
        warnings=warnings(answer),
    )
    write_whole(path, page.encode())


def _tiles(answer: Answer) -> list[tuple[str, str, str]]:
    # (name, figure, small print)
    if not answer.best:
        return [("Layouts that fit", "none", f"of {len(answer.plans)}")]
    best = answer.best[0]
    tiles = [
        ("Layouts that fit", str(sum(plan.fits for plan in answer.plans)), f"of {len(answer.plans)}"),
        ("Tokens per second", f"{best.tokens_per_second:,.0f}", plan_name(best)),
        ("MFU", f"{best.mfu:.0%}", f"{best.share_of_ideal:.0%} of the ideal speed"),
        ("Memory", f"{gib(best.memory.total)} GiB", f"of {gib(best.available)} that can be filled"),
    ]
    if answer.target_tokens:
        days = best.days(answer.target_tokens)
        tiles.append(("Days", f"{days:,.2f}", f"for {answer.target_tokens / 1e9:,.2f} billion tokens"))
    return tiles


def _memory_bar(plan: Plan) -> Bar:
    pieces = [
        (place, f"{label} {gib(getattr(plan.memory, part))} GiB", 100 * getattr(plan.memory, part) / plan.available)
        for place, (part, label) in enumerate(PARTS.items())
    ]
    return Bar(plan_name(plan), f"{gib(plan.memory.total)} GiB", pieces)


def _time_bar(plan: Plan, longest: float) -> Bar:
    pieces = [
        (place, f"{label} {getattr(plan.time, part):.3f} s", 100 * getattr(plan.time, part) / longest)
        for place, (part, label) in enumerate(TIMES.items())
    ]
    return Bar(plan_name(plan), f"{plan.time.total:.3g} s", pieces)
