"""Tables: Markdown, and what stands above it: when, where, with what and by which command it was measured."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.processes import ROOT
from common.errors import OneLineParser, UserError
from common.files import write_whole
from common.hardware import cpu_name, usable_cpus
from training.model.precision import cpu_has_bf16

HERE = Path(__file__).resolve().parent


class Parser(OneLineParser):
    """The parser of a benchmark."""

    def __init__(self, module: str, description: str) -> None:
        super().__init__(prog=f"python -m {module}", description=description)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The smallest and the largest of several rounds."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def ratio(ours: Sequence[float], theirs: Sequence[float] | None) -> str:
    """The median over rounds of the ratio within a round."""
    if not theirs:
        return "–"
    return f"{median(a / b for a, b in zip(ours, theirs, strict=False)):.2f}"


TRAINING_PACKAGES = ("torch", "transformers", "accelerate", "scikit-learn")


def circumstances(module: str, packages: Sequence[str] = TRAINING_PACKAGES) -> dict[str, str]:
    """Facts about this measurement: date, commit, command, machine and the packages' versions."""
    versions = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)]
    return {
        "Measured": f"{datetime.now(UTC):%Y-%m-%d}, commit {_commit()}",
        "Command": f"`{_command(module)}`",
        "Machine": _machine(),
        "Versions": ", ".join(versions),
    }


def fact_list(facts: dict[str, str]) -> str:
    """Facts as a Markdown list."""
    return "".join(f"- {name}: {value}\n" for name, value in facts.items())


def write_table(path: Path, text: str) -> None:
    """Write a page of tables whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})", code="not-writable") from error


def read_results(path: Path) -> dict[str, Any]:
    """Measurements of earlier runs, kept beside the page; none where there is no file."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path}: not valid JSON ({error}); remove it to start afresh", code="benchmark-input"
        ) from error


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> str:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cpu = f"{cpu_name()}, {usable_cpus()} cores, {'with' if cpu_has_bf16() else 'without'} bf16 in hardware"
    return f"{cpu}; {' + '.join(gpus) or 'no GPU'}"


def _commit() -> str:
    try:
        short = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--", "training", "inference", "deployment", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return short + (" with changes not yet committed" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _command(module: str) -> str:
    """The command line, without what means nothing elsewhere: folders of absolute paths, flags for a tool after --."""
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    shown = (f".../{Path(part).name}" if Path(part).is_absolute() else part for part in own)
    return shlex.join(["python", "-m", module, *shown])
