"""Write a faster artefact of a model, `python -m inference.export MODEL`."""

from __future__ import annotations

import argparse
import csv
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from common.calibration import Bounds, CalibrationError
from common.errors import OneLineParser, UserError, first_line, positive, run_command, share_or_name
from common.escaping import printable, some_of
from common.model_folder import (
    PRECISIONS,
    SavedModel,
    is_artefact,
    read_manifest,
    read_saved_model,
)
from common.rows import (
    SAMPLE_NEWS,
    TEXT_AND_LABEL,
    LabelledRows,
    find_rows,
    read_labelled_rows,
)
from common.text import counted
from inference.engines import native
from inference.engines.native.architecture import EncoderShape
from inference.exporting.calibrating import calibrate_again, columns_of, lines_about
from inference.exporting.stages import end_unfinished

if TYPE_CHECKING:
    from inference.exporting.build import Exported


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m inference.export",
        description="Write a faster artefact of a model, compare it with the original on labelled "
        "rows, and keep it if it answers as well.",
    )
    parser.add_argument(
        "model",
        type=Path,
        help="model folder or .pt file; of an artefact, only its calibration is written again",
    )
    parser.add_argument(
        "--engine",
        choices=list(PRECISIONS),
        help="engine that will run the artefact (default: native if it supports this processor "
        "and model, else onnx)",
    )
    _add_bounds(parser)
    parser.add_argument(
        "--fold",
        type=Path,
        metavar="FOLDER",
        help="also write the model itself, in float32, with its calibration folded into the last "
        "layer: transformers' pipeline and others that know no manifest then answer with "
        "calibrated probabilities",
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
    options = parser.parse_args(arguments)
    arithmetic = [one for one in options.precision if "=" not in one]
    if len(arithmetic) > 1 or (arithmetic and arithmetic[0] not in ("int8", "fp32")):
        parser.error(f"--precision {arithmetic[-1]}: must be int8, fp32 or LABEL=SHARE")
    if (options.costs is None) is not (options.max_cost is None):
        parser.error("--costs and --max_cost go together")
    options.arithmetic = arithmetic[0] if arithmetic else "int8"
    return options


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        action="append",
        default=[],
        metavar="int8|fp32|LABEL=SHARE",
        help="int8 or fp32: of the artefact's arithmetic; fp32 is available for onnx only "
        "(default: int8). LABEL=98%%: find the probability from which on at least 98%% of the "
        "answers with this label are right, for the operating point `precision`",
    )
    parser.add_argument(
        "--max_error",
        action="append",
        default=[],
        metavar="[NAME=]SHARE",
        help="find the probability from which on at most this share of the answers is wrong, such "
        "as 2%% or careful=2%%, for an operating point of this name (MAX_ERROR, or max_error in a "
        "request, choose it)",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="what mistakes cost: a CSV file with the labels answered in its first line, and a "
        "line for each right label; for the operating point `costs`",
    )
    parser.add_argument(
        "--max_cost", type=float, help="with --costs: the largest mean cost of an answer"
    )


def main(arguments: list[str] | None = None) -> None:
    options = _parse_arguments(arguments)
    # For terminals that lack the characters of the table.
    sys.stdout.reconfigure(errors="replace")
    # Else square brackets in a path would be taken for markup.
    console = Console(highlight=False, markup=False)
    try:
        saved = read_saved_model(options.model)
        if is_artefact(options.model):
            _refuse_for_artefact(options)
        rows = _read_rows(options, saved, console)
        bounds = _bounds(options, saved.labels)
        # The sample news are the texts of a model only if it was trained on them.
        is_sample = options.rows is None and rows.name == str(SAMPLE_NEWS / "test.csv")
        are_own = not is_sample or saved.metadata.get("dataset") == "sample"
        if is_artefact(options.model):
            if not are_own:
                what = f"{options.model}: is an artefact, and its rows are not on this machine"
                raise UserError(f"{what}; name some with --rows", code="data-not-found")
            record = calibrate_again(options.model, bounds, rows)
            console.print("\n".join(map(printable, lines_about(record))), soft_wrap=True)
            console.print(printable(f"Written to {options.model}"), soft_wrap=True)
            return
        engine = options.engine or _default_engine(saved.config)
        if options.arithmetic not in PRECISIONS[engine]:
            supported = " and ".join(PRECISIONS[engine])
            what = (
                f"--precision {options.arithmetic}: the {engine} engine supports {supported} only"
            )
            raise UserError(what, code="export-failed")
        console.print(
            printable(f"Exporting {options.model} for the {engine} engine"), soft_wrap=True
        )
        # Importing PyTorch takes seconds, so it waits until the arguments are known to be good.
        from inference.exporting.build import Wishes, export

        signal.signal(signal.SIGTERM, end_unfinished)  # before this, nothing has been written
        wishes = Wishes(engine, options.arithmetic, options.max_drop, bounds, are_own, options.fold)
        exported = export(saved, wishes, rows, console)
    except CalibrationError as error:
        raise UserError(f"{error}; nothing was written", code="export-failed") from error
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
    if saved.reads_pairs and path == SAMPLE_NEWS:
        what = (
            f"{options.model}: reads pairs of texts, and the sample news has only single "
            "texts; name rows with --rows"
        )
        raise UserError(what, code="data-not-found")
    own = columns_of(saved.metadata, reads_pairs=saved.reads_pairs)
    columns = TEXT_AND_LABEL if path == SAMPLE_NEWS else own
    rows = read_labelled_rows(path, saved.labels, options.limit, columns, saved.problem_type)
    if options.rows is None and path == SAMPLE_NEWS:
        console.print(
            f"Measuring on the sample news ({counted(len(rows.texts), 'row')}); --rows takes your "
            "own test set."
        )
    return rows


def _refuse_for_artefact(options: argparse.Namespace) -> None:
    """Refuse a cascade, and what would need the weights that an artefact was made from."""
    if read_manifest(options.model).cascade:
        what = f"{options.model}: is a cascade, whose promises are about two models together"
        raise UserError(
            f"{what}; write it again with python -m inference.cascade", code="cascade-refused"
        )
    is_fp32 = options.arithmetic == "fp32"
    given = {"--fold": options.fold, "--engine": options.engine, "--precision fp32": is_fp32}
    if flag := next((flag for flag, value in given.items() if value), None):
        what = f"{options.model}: is an artefact, whose calibration alone can be written again"
        raise UserError(f"{what}; {flag} needs the model it was made from", code="export-failed")


def _bounds(options: argparse.Namespace, labels: Sequence[str]) -> Bounds:
    """What is to be certified.

    Raises:
        UserError: an option cannot be read, or names no label of the model.
    """
    max_errors = {}
    for given in options.max_error:
        name, _, share = given.rpartition("=")
        found = _share("--max_error", given, share)
        if name and (name in (*max_errors, "precision", "costs") or _is_share(name)):
            what = f"--max_error {given}: the name {name!r} is taken, or reads as a share"
            raise UserError(f"{what}; choose another", code="export-failed")
        max_errors[name or f"{found:g}"] = found
    precisions = {}
    for given in options.precision:
        label, _, share = given.rpartition("=")
        if label and label not in labels:
            what = f"--precision {given}: {label!r} is not one of the model's labels "
            raise UserError(what + some_of(list(labels)), code="export-failed")
        if label in precisions:
            what = f"--precision {given}: {label} has a bound already; give one for each label"
            raise UserError(what, code="export-failed")
        if label:
            precisions[label] = _share("--precision", given, share)
    costs = read_costs(options.costs, labels) if options.costs else ()
    if costs and not 0 < options.max_cost < max(map(max, costs)):
        what = f"--max_cost {options.max_cost:g}: must be greater than 0 and less than the largest "
        raise UserError(f"{what}cost in {options.costs}", code="export-failed")
    return Bounds(max_errors, precisions, costs, options.max_cost or 0.0)


def _is_share(name: str) -> bool:
    try:
        return not isinstance(share_or_name(name), str)
    except ValueError:
        return True  # a number, though not one between 0 and 1


def _share(flag: str, given: str, share: str) -> float:
    try:
        found = share_or_name(share)
    except ValueError:
        found = share
    if isinstance(found, str) or found == 1:
        what = f"{flag} {given}: {share!r} must be a share between 0 and 1, such as 2% or 0.02"
        raise UserError(what, code="export-failed")
    return found


def read_costs(path: Path, labels: Sequence[str]) -> list[list[float]]:
    """What answers cost, by right label and label answered, in the labels' order.

    Raises:
        UserError: the file is not such a table, or lacks a label.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        header, *lines = [[cell.strip() for cell in line] for line in csv.reader(file) if line] or [
            []
        ]
    answered, right = header[1:], [line[0] for line in lines]
    if sorted(answered) != sorted(labels) or sorted(right) != sorted(labels):
        what = f"--costs {path}: the first line and the first column must name each of the labels "
        raise UserError(what + some_of(list(labels)), code="export-failed")
    by_right = {line[0]: line[1:] for line in lines}
    try:
        costs = [[float(by_right[r][answered.index(a)]) for a in labels] for r in labels]
    except (IndexError, ValueError) as error:
        what = f"--costs {path}: a cost is missing or is not a number ({first_line(error)})"
        raise UserError(what, code="export-failed") from error
    if not all(0 <= cost < math.inf for row in costs for cost in row) or not any(map(any, costs)):
        what = f"--costs {path}: costs must be 0 or greater, and one of them greater"
        raise UserError(what, code="export-failed")
    return costs


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
    console.print("\n".join(map(printable, exported.about)), soft_wrap=True)
    console.print(printable(f"Written to {exported.folder}"), soft_wrap=True)
    serve = f"MODEL_CHECKPOINT={shlex.quote(str(model))} uvicorn inference.app:app --port 7860"
    console.print(printable(f"Next: {serve}"), soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
