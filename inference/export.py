"""Write a faster artefact of a model, `python -m inference.export MODEL`."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from common.errors import OneLineParser, UserError, first_line, positive, run_command
from common.escaping import printable
from common.model_folder import PRECISIONS, SavedModel, is_artefact, read_saved_model
from common.rows import (
    SAMPLE_NEWS,
    TEXT_AND_LABEL,
    Columns,
    LabelledRows,
    find_rows,
    read_labelled_rows,
)
from common.text import counted
from inference.engines import native
from inference.engines.native.architecture import EncoderShape

if TYPE_CHECKING:
    from inference.exporting.build import Exported


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m inference.export",
        description="Write a faster artefact of a model, compare it with the original on labelled "
        "rows, and keep it if it answers as well.",
    )
    parser.add_argument("model", type=Path, help="model folder or .pt file")
    parser.add_argument(
        "--engine",
        choices=list(PRECISIONS),
        help="engine that will run the artefact (default: native if it supports this processor "
        "and model, else onnx)",
    )
    parser.add_argument(
        "--precision",
        choices=["int8", "fp32"],
        default="int8",
        help="fp32 is available for onnx only (default: int8)",
    )
    parser.add_argument(
        "--rows",
        type=Path,
        help="labelled rows to measure on: a folder with test.csv, or a CSV or JSONL file "
        "(default: the dataset in the model's metrics.json if it is on this machine, else the "
        "sample news)",
    )
    parser.add_argument(
        "--max_drop",
        type=float,
        default=0.5,
        help="largest loss to accept: percentage points of accuracy, for a multi-label model "
        "percentage points of micro-F1, for a regression model percent of RMSE (default: 0.5)",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        help="measure on this many rows, spread evenly over the file (default: all)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = _parse_arguments(arguments)
    # For terminals that lack the characters of the table.
    sys.stdout.reconfigure(errors="replace")
    # Else square brackets in a path would be taken for markup.
    console = Console(highlight=False, markup=False)
    try:
        if is_artefact(options.model):
            what = f"{options.model}: is already an artefact; give the model it was made from"
            raise UserError(what, code="export-failed")
        saved = read_saved_model(options.model)
        rows = _read_rows(options, saved, console)
        engine = options.engine or _default_engine(saved.config)
        if options.precision not in PRECISIONS[engine]:
            supported = " and ".join(PRECISIONS[engine])
            what = f"--precision {options.precision}: the {engine} engine supports {supported} only"
            raise UserError(what, code="export-failed")
        console.print(
            printable(f"Exporting {options.model} for the {engine} engine"), soft_wrap=True
        )
        # Importing PyTorch takes seconds, so it waits until the arguments are known to be good.
        from inference.exporting.build import end_unfinished, export

        signal.signal(signal.SIGTERM, end_unfinished)  # before this, nothing has been written
        exported = export(saved, engine, options.precision, rows, options.max_drop, console)
    except ImportError as error:
        raise UserError(
            f"needs the package {error.name}; pip install {error.name}", code="package-missing"
        ) from error
    except (OSError, ValueError) as error:
        names_file = isinstance(error, OSError) and error.filename
        what = f"{error.filename}: {error.strerror}" if names_file else first_line(error)
        raise UserError(what, code="export-failed") from error
    _print_result(console, exported, options.model)


def _read_rows(options: argparse.Namespace, saved: SavedModel, console: Console) -> LabelledRows:
    dataset = saved.metadata.get("dataset")
    path = options.rows or find_rows(dataset, saved.problem_type)
    text, label = (str(saved.metadata.get(f"{name}_column", name)) for name in ("text", "label"))
    pair = str(saved.metadata.get("pair_column", "text_pair")) if saved.reads_pairs else ""
    if saved.reads_pairs and path == SAMPLE_NEWS:
        what = (
            f"{options.model}: reads pairs of texts, and the sample news has only single "
            "texts; name rows with --rows"
        )
        raise UserError(what, code="data-not-found")
    # The rows are read by the columns that training read, which the model's metrics name.
    columns = TEXT_AND_LABEL if path == SAMPLE_NEWS else Columns(text, label, pair)
    rows = read_labelled_rows(path, saved.labels, options.limit, columns, saved.problem_type)
    if options.rows is None and path == SAMPLE_NEWS:
        console.print(
            f"Measuring on the sample news ({counted(len(rows.texts), 'row')}); --rows takes your "
            "own test set."
        )
    return rows


def _default_engine(config: dict[str, Any]) -> str:
    """The fastest engine for this model on this processor that needs no extra package."""
    try:
        EncoderShape.of(config)
    except ValueError:
        return "onnx"
    return "native" if native.is_supported()[0] else "onnx"


def _print_result(console: Console, exported: Exported, model: Path) -> None:
    manifest = exported.manifest
    size, speed = manifest.size, manifest.speed
    table = Table(
        title=f"{manifest.engine} {manifest.precision}, measured on "
        f"{counted(manifest.accuracy['rows'], 'row')}",
        title_justify="left",
    )
    for column, justify in (
        ("", "left"),
        ("before", "right"),
        ("after", "right"),
        ("change", "right"),
    ):
        table.add_column(column, justify=justify)
    for row in exported.measured:
        table.add_row(*row)
    before, after = size["before_bytes"], size["after_bytes"]
    table.add_row(
        "size", f"{before / 1e6:.1f} MB", f"{after / 1e6:.1f} MB", f"{after / before:.0%}"
    )
    before, after = speed["before_texts_per_second"], speed["after_texts_per_second"]
    table.add_row(
        "texts per second", f"{before:.0f}", f"{after:.0f}", f"{after / before:.1f} times"
    )
    console.print(table)
    console.print(printable(f"Written to {exported.folder}"), soft_wrap=True)
    serve = f"MODEL_CHECKPOINT={shlex.quote(str(model))} uvicorn inference.app:app --port 7860"
    console.print(printable(f"Next: {serve}"), soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
