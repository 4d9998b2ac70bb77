"""Write a faster artefact beside a model: `python -m inference.export MODEL`."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from common.errors import ModelLoadError, OneLineParser, UserError, first_line, positive, run_command
from common.manifest import PRECISIONS
from common.model_folder import SavedModel, is_artefact, read_saved_model
from common.rows import SAMPLE_NEWS, TEXT_AND_LABEL, Columns, LabelledRows, find_rows, read_labelled_rows
from inference.errors import ExportRefusedError
from inference.exporting.engine_files import default_engine

if TYPE_CHECKING:
    from inference.exporting.build import Exported


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m inference.export",
        description="Write a faster artefact beside a model, compare it with the reference on labelled rows, and keep "
        "it only if accuracy holds.",
    )
    parser.add_argument("model", type=Path, help="model folder or .pt file")
    parser.add_argument(
        "--engine",
        choices=list(PRECISIONS),
        help="what the artefact is for (default: native where this processor supports it, else onnx)",
    )
    parser.add_argument("--precision", choices=["int8", "fp32"], default="int8", help="fp32 is for onnx only")
    parser.add_argument(
        "--rows",
        type=Path,
        help="labelled rows to measure on: a folder with test.csv, a CSV or JSONL file (default: the dataset that the "
        "model's metrics.json names if it is here, else the sample news)",
    )
    parser.add_argument(
        "--max_drop",
        type=float,
        default=0.5,
        help="refuse to lose more accuracy than this, in percentage points (default: 0.5)",
    )
    parser.add_argument("--limit", type=positive, help="measure on this many rows only, evenly spread (default: all)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 1 when accuracy falls too far.

    Raises:
        UserError: It cannot be done.
    """
    options = _parse_arguments(arguments)
    sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    try:
        saved = _read_model(options.model)
        rows = _read_rows(options, saved, console)
        exported = _export(options, saved, rows, console)
    except ExportRefusedError as refusal:
        print(f"error: {refusal} [export-refused]", file=sys.stderr)
        for line in refusal.changed:
            print(f"  {line}", file=sys.stderr)
        return 1
    except ImportError as error:
        raise UserError(f"needs the package {error.name}; pip install {error.name}", code="package-missing") from error
    except (ModelLoadError, OSError, ValueError) as error:
        raise UserError(_one_line(error), code=getattr(error, "code", "export-failed")) from error
    _print_result(console, exported, options.model)
    return 0


def _read_model(path: Path) -> SavedModel:
    if is_artefact(path):
        raise ValueError(f"{path}: is an artefact already; give the model it was made from")
    return read_saved_model(path)


def _read_rows(options: argparse.Namespace, saved: SavedModel, console: Console) -> LabelledRows:
    dataset = saved.metadata.get("dataset")
    path = options.rows or find_rows(dataset)
    text, label = (str(saved.metadata.get(f"{name}_column", name)) for name in ("text", "label"))
    rows = read_labelled_rows(
        path, saved.labels, options.limit, TEXT_AND_LABEL if path == SAMPLE_NEWS else Columns(text, label)
    )
    if options.rows is None and str(path) != dataset:
        console.print(f"Measuring on the sample news ({len(rows.texts)} rows): --rows names a test set of your own.")
    return rows


def _export(options: argparse.Namespace, saved: SavedModel, rows: LabelledRows, console: Console) -> Exported:
    engine = options.engine or default_engine(saved.config)
    if options.precision not in PRECISIONS[engine]:
        known = ", ".join(PRECISIONS[engine])
        raise ValueError(f"--precision {options.precision}: the {engine} engine has {known} only")
    console.print(f"Exporting {options.model} for the {engine} engine", soft_wrap=True)
    from inference.exporting.build import export  # PyTorch takes seconds: not before the arguments are known to be good

    stages = _Stages(console, len(rows.texts))
    with stages.bars:
        return export(saved, engine, options.precision, rows, options.max_drop, stages)


class _Stages:
    """A bar for the stage that runs, and a line for each that is done."""

    def __init__(self, console: Console, num_rows: int) -> None:
        columns = (TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.bars = Progress(*columns, console=console, transient=True)
        self._num_rows = num_rows
        self._running: TaskID | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show a stage that runs, and keep its line with the time it took."""
        began = time.perf_counter()
        self._running = self.bars.add_task(name, total=None)
        yield
        self.bars.remove_task(self._running)
        self.bars.console.print(f"  {name}: {time.perf_counter() - began:.1f} s")

    def advance(self, rows: int) -> None:
        """Count rows that the running stage has compared."""
        self.bars.update(self._running, advance=rows, total=self._num_rows)


def _print_result(console: Console, exported: Exported, model: Path) -> None:
    manifest = exported.manifest
    accuracy, size, speed = manifest.accuracy, manifest.size, manifest.speed
    table = Table(
        title=f"{manifest.engine} {manifest.precision}, measured on {accuracy['rows']} rows", title_justify="left"
    )
    for column, justify in (("", "left"), ("before", "right"), ("after", "right"), ("change", "right")):
        table.add_column(column, justify=justify)
    before, after = speed["before_texts_per_second"], speed["after_texts_per_second"]
    table.add_row(
        "accuracy",
        f"{accuracy['before']:.2%}",
        f"{accuracy['after']:.2%}",
        f"{0 - accuracy['drop_points']:+.2f} points",
    )
    table.add_row("other label", "", "", f"{accuracy['disagreement_percent']:.2f}%")
    table.add_row("size", _megabytes(size["before_bytes"]), _megabytes(size["after_bytes"]), _ratio(size))
    table.add_row("texts a second", f"{before:.0f}", f"{after:.0f}", f"{after / before:.1f} times")
    console.print(table)
    console.print(f"Written to {exported.folder}", soft_wrap=True)
    serve = f"MODEL_CHECKPOINT={shlex.quote(str(model))} uvicorn inference.app:app --port 7860"
    console.print(f"Next: {serve}", soft_wrap=True)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _ratio(size: dict[str, int]) -> str:
    return f"{size['after_bytes'] / size['before_bytes']:.0%}"


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return first_line(error)


if __name__ == "__main__":
    run_command(main)
