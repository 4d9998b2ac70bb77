"""What all benchmarks share: flags, rounds, medians and ratios, the facts of a measurement, and the page."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from common.errors import OneLineParser, UserError, positive, run_command
from common.files import write_whole
from common.hardware import cpu_name, usable_cpus
from training.model.precision import cpu_has_bf16

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NONE = "–"  # a cell without a figure
PACKAGES = ("torch", "transformers")
AG_NEWS_ROWS = 120_000  # for training
Case = TypeVar("Case")
Result = TypeVar("Result")


class Parser(OneLineParser):
    """The flags of a benchmark, with those that most of them have."""

    def __init__(
        self, module: str, description: str, *, page: str = "", rounds: int = 0, seeds: int = 0
    ) -> None:
        super().__init__(
            prog=f"python -m {module}", description=description.strip().split("\n\n")[0]
        )
        add_common_flags(self, page, rounds)
        if seeds:
            self.add_argument(
                "--seeds",
                type=positive,
                default=seeds,
                help=f"runs of each variant (default: {seeds})",
            )


def add_common_flags(parser: argparse.ArgumentParser, page: str, rounds: int) -> None:
    """Add ``--rounds`` and ``--output`` with these defaults; 0 and an empty name leave them out."""
    if rounds:
        parser.add_argument("--rounds", type=positive, default=rounds, help=f"default: {rounds}")
    if page:
        shown = f"the page (default: benchmarks/{page})"
        parser.add_argument("--output", type=_markdown_path, default=HERE / page, help=shown)


def _markdown_path(text: str) -> Path:
    # Results and figure go to the same name with .json and .png, which must not be the page itself.
    if not text.endswith(".md"):
        raise argparse.ArgumentTypeError(f"{text}: must end in .md")
    return Path(text)


def seconds(text: str) -> float:
    """Read the length of a measurement, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 600:
        raise argparse.ArgumentTypeError(f"{text}: must be between 0.1 and 600 seconds")
    return value


def run_benchmark(main: Callable[[], None]) -> None:
    """Run a benchmark; SIGTERM ends it like an error, so that it stops the processes it has started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    run_command(main)


def report(line: str) -> None:
    """Print progress at once, also into a pipe."""
    print(line, flush=True)


# Rounds. A shared machine drifts over minutes, so the variants of a comparison alternate within
# each round, and what is compared is the ratio within a round, never the medians of two series that
# were measured one after the other.


def in_turns(cases: Sequence[Case], number: int) -> list[Case]:
    """The cases in the order of round ``number``: every other round runs backwards, every second
    one starts elsewhere.

    Two cases swap places; three go through all their orders in six rounds.
    """
    # The start moves by a third of the list and not by one place, so that long lists do not keep
    # their neighbours.
    start = number // 2 * max(1, len(cases) // 3) % max(1, len(cases))
    turned = [*cases[start:], *cases[:start]]
    return turned[::-1] if number % 2 else turned


def run_rounds(
    cases: Mapping[str, Case],
    num_rounds: int,
    measure: Callable[[Case, int], Result],
    describe: Callable[[Result], str],
) -> Iterator[dict[str, Result]]:
    """Measure every case once per round, in alternating order; yields the results of each round by the cases' names."""
    for number in range(num_rounds):
        # Given out after each round, so that a page is written even if a later round fails or is
        # interrupted after hours.
        found: dict[str, Result] = {}
        for name in in_turns(list(cases), number):
            found[name] = measure(cases[name], number)
            report(f"round {number + 1}/{num_rounds}, {name}: {describe(found[name])}")
        # In the order of the cases and not of their turns, or the rows of a table would follow the
        # round.
        yield {name: found[name] for name in cases}


def median_ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The smallest and the largest of several rounds."""
    return f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"


def mean_and_spread(values: Sequence[float], digits: int = 1) -> str:
    """The mean, with the smallest and the largest in brackets if there are several."""
    middle = f"{mean(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({spread(values, digits)})"


def median_and_spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, with the smallest and the largest in brackets if there are several."""
    middle = f"{median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({spread(values, digits)})"


# The page.


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(columns: Mapping[str, Callable[[Case], str]], cases: Iterable[Case]) -> str:
    """A Markdown table from what each column shows of a case."""
    return markdown_table(
        list(columns), [[cell(case) for cell in columns.values()] for case in cases]
    )


class Goal(NamedTuple):
    """What was promised of a figure: its least or most value; how it is shown, and its limit."""

    what: str
    measured: float | None  # None: nothing was measured, so the page leaves the goal out
    bound: Literal["at least", "at most"]
    limit: float
    shape: str
    limit_shape: str = ""  # the same as shape

    def row(self, measured: float) -> list[str]:
        """The goal's row of the table."""
        is_least = self.bound == "at least"
        is_met = measured >= self.limit if is_least else measured <= self.limit
        limit = (self.limit_shape or self.shape).format(self.limit)
        shown = self.shape.format(measured)
        return [self.what, f"{self.bound} {limit}", shown, "yes" if is_met else "**no**"]


def goals_table(goals: Iterable[Goal]) -> str:
    """The goals whose figures were measured, and whether they are met."""
    rows = [goal.row(goal.measured) for goal in goals if goal.measured is not None]
    return markdown_table(["", "goal", "measured", "met"], rows)


def measurement_facts(module: str, packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Facts about this measurement: date, commit, command, machine and the packages' versions."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cpu = (
        f"{cpu_name()}, {usable_cpus()} cores, {'with' if cpu_has_bf16() else 'without'} bf16 in "
        "hardware"
    )
    versions = [
        f"Python {platform.python_version()}",
        *(f"{name} {_version(name)}" for name in packages),
    ]
    return {
        "Measured": f"{datetime.now(UTC):%Y-%m-%d}, commit {_commit()}",
        "Command": f"`{_command(module)}`",
        "Machine": f"{cpu}; {' + '.join(gpus) or 'no GPU'}",
        "Versions": ", ".join(versions),
    }


def rows_of(name: str, num_training: int, num_test: int) -> str:
    """The fact that says how many rows there were; not every copy of AG News has all of its training rows."""
    part = f" of {AG_NEWS_ROWS:,}" if name == "ag_news" and num_training < AG_NEWS_ROWS else ""
    return f"{name}; {num_training:,}{part} training rows, {num_test:,} test rows"


def fact_list(facts: Mapping[str, str]) -> str:
    """Facts as a Markdown list."""
    return "".join(f"- {name}: {value}\n" for name, value in facts.items())


def introduction(module: str, title: str, text: str) -> str:
    """How every page begins: its title, the command that writes it, and what its columns mean."""
    return f"# {title}\n\nWritten by `python -m {module}`.\n{text.strip()}\n\n"


def write_page(path: Path, text: str, results: Any = None, figure: bytes | None = None) -> None:
    """Write a page, and next to it its results as JSON and its figure as PNG."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Each file is replaced as a whole, so that a reader finds the last complete page while a long
        # measurement is running, and after one that was killed.
        write_whole(path, text.encode())
        if results is not None:
            plain = json.loads(json.dumps(results))  # tuples become lists, as in the file
            write_whole(path.with_suffix(".json"), f"{row_per_line(plain)}\n".encode())
        if figure is not None:
            write_whole(path.with_suffix(".png"), figure)
    except OSError as error:
        raise UserError(
            f"--output {path}: cannot be written ({error.strerror})", code="not-writable"
        ) from error
    report(f"Written: {path}")


def row_per_line(value: Any, indent: str = "") -> str:
    """JSON with a line for each element of a list, and for each object of plain values."""
    # The files are committed: with a line per measurement, a diff shows which ones are new, and a
    # file of rounds stays short enough to read.
    items = value.values() if isinstance(value, dict) else value
    is_nested = isinstance(value, dict | list) and any(
        isinstance(item, dict | list) for item in items
    )
    if not is_nested:
        return json.dumps(value)
    if isinstance(value, dict):
        opening, closing = "{}"
        lines = [
            f"{json.dumps(name)}: {row_per_line(item, indent + ' ')}"
            for name, item in value.items()
        ]
    else:
        opening, closing = "[]"
        lines = [json.dumps(item) for item in value]
    body = ",\n".join(f"{indent} {line}" for line in lines)
    return f"{opening}\n{body}\n{indent}{closing}"


def read_results(path: Path) -> dict[str, Any]:
    """Measurements of earlier runs, kept next to the page; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        message = f"{path}: not valid JSON ({error}); remove it to start from scratch"
        raise UserError(message, code="benchmark-input") from error


# Parts. A page about several questions is measured in parts, because one changed and the others take
# hours: what is not measured again keeps what the page has of it.


def add_parts_flag(parser: argparse.ArgumentParser, parts: Iterable[str]) -> None:
    parser.add_argument(
        "--parts", nargs="+", choices=list(parts), default=list(parts), help="default: all"
    )


def measure_parts(
    options: argparse.Namespace,
    parts: Mapping[str, Callable[[argparse.Namespace], Iterable[dict[str, Any]]]],
    module: str,
    packages: Sequence[str],
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Measure each of ``--parts``, and write the page after each result that a part yields."""
    results = read_results(options.output.with_suffix(".json"))
    for part in options.parts:
        report(f"{part}:")
        measured = {"facts": measurement_facts(module, packages)}
        for found in parts[part](options):
            # In the order of the page, whatever the order of the runs.
            results |= {part: measured | found}
            results = {name: results[name] for name in parts if name in results}
            write(results)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


MEASURED = (
    "common",
    "training",
    "inference",
    "loop",
    "deployment",
    "benchmarks/*.py",
    "benchmarks/*.c",
)


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        short = git("rev-parse", "--short", "HEAD")
        # Only what is measured: a page that was just written is not a change of the program.
        changed = git("status", "--porcelain", "--", *MEASURED)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return short + (" with changes not yet committed" if changed else "")


def _command(module: str) -> str:
    """The command line, without what means nothing elsewhere: absolute folders, flags for another tool after ``--``."""
    # A page is committed, and whose home folder a model lay in is nobody else's business.
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]

    def shown(part: str) -> str:
        flag, is_given, value = part.rpartition("=") if part.startswith("--") else ("", "", part)
        return f"{flag}{is_given}.../{Path(value).name}" if Path(value).is_absolute() else part

    return shlex.join(["python", "-m", module, *map(shown, own)])
