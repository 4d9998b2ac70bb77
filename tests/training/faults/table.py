"""The table of faults, written between two marks of a page."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import torch

from common.files import write_whole
from common.hardware import cpu_name, usable_cpus
from tests.training.faults.cases import FAMILIES
from tests.training.faults.judgement import Finding

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
HEADER = ("fault", "promised", "what happened", "recovery, s")


def write_faults(page: Path, findings: Sequence[Finding]) -> None:
    """Put the table between the marks of ``page``; what stood there goes."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    write_whole(page, f"{before}{BEGIN}\n{_table(findings)}{END}{after}".encode())


def _table(findings: Sequence[Finding]) -> str:
    found = {finding.fault: finding for finding in findings}
    faults = [fault for family in FAMILIES for fault in family]
    untried = ("not tried on this machine", "")
    rows = [_row(found[f.name]) if f.name in found else (f.name, f.promised, *untried) for f in faults]
    lines = [HEADER, ("---", "---", "---", "---:"), *merge_ranks(rows)]
    machine = f"{cpu_name()}, {usable_cpus()} cores"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, gloo"
    return f"{len(found)} faults, {datetime.now(UTC):%Y-%m-%d}, on {machine}; {versions}.\n\n" + "".join(
        f"| {' | '.join(line)} |\n" for line in lines
    )


# No column for rows or weights: a fault that lost or repeated a row, or changed a weight, fails its test.
def _row(finding: Finding) -> tuple[str, ...]:
    recovery = "–" if finding.recovery is None else f"{finding.recovery:.1f}"
    return (finding.fault, finding.promised, finding.happened.replace("|", "\\|"), recovery)


def merge_ranks(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows, with the same fault on one rank after the other in one row, as ``5.6 / 5.1``."""
    merged = []
    for name, group in groupby(rows, key=lambda row: re.sub(r"^rank \d killed", "either rank killed", row[0])):
        same = list(group)
        first, promised, happened, recovery = (list(dict.fromkeys(column)) for column in zip(*same, strict=True))
        merged.append((name if len(same) > 1 else first[0], promised[0], " / ".join(happened), " / ".join(recovery)))
    return merged
