"""Put a small model in front of a big one, `python -m inference.cascade BIG SMALL`."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from common.calibration import CalibrationError
from common.errors import OneLineParser, UserError, first_line, run_command, share_or_name
from common.escaping import printable
from common.problem_types import PLAIN_TEXT
from common.rows import (
    SAMPLE_NEWS,
    TEXT_AND_LABEL,
    Reading,
    find_rows,
    read_labelled_rows,
    read_texts,
)
from inference.exporting.calibrating import columns_of
from inference.exporting.cascading import (
    CascadeError,
    HeldOut,
    Pair,
    default_target,
    write_cascade,
)
from inference.exporting.stages import end_unfinished


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m inference.cascade",
        description="Write a cascade: a small model answers the texts that it is sure of, and a "
        "big one answers the rest. Where the small one may answer is certified on texts that "
        "neither has seen, so that with 95% confidence almost all labels are those of the big one.",
    )
    parser.add_argument("big", type=Path, help="model with an artefact, or the artefact itself")
    parser.add_argument("small", type=Path, help="a faster model with the same labels")
    parser.add_argument(
        "--max_disagreement",
        type=_share,
        default=0.005,
        metavar="SHARE",
        help="the largest share of all texts whose label may differ from the big model's, such as "
        "0.5%% or 0.005 (default: 0.5%%)",
    )
    parser.add_argument(
        "--rows",
        type=Path,
        help="labelled rows that neither model has seen: a folder with test.csv, or a CSV or JSONL "
        "file (default: the dataset in the big model's metrics.json if it is on this machine)",
    )
    parser.add_argument(
        "--texts",
        type=Path,
        help="certify on these texts instead, which need no labels: a file, or a folder of files",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        help="where to write the cascade (default: BIG/cascade; of the artefact MODEL/native "
        "MODEL/cascade)",
    )
    return parser.parse_args(arguments)


def _share(text: str) -> float:
    found: float | str = text
    with contextlib.suppress(ValueError):
        found = share_or_name(text)
    if isinstance(found, str) or found == 1:
        what = "must be a share between 0 and 1, such as 0.5% or 0.005"
        raise argparse.ArgumentTypeError(f"{text}: {what}")
    return found


def main(arguments: list[str] | None = None) -> None:
    options = _parse_arguments(arguments)
    # For terminals that lack the characters of the bars.
    sys.stdout.reconfigure(errors="replace")
    # Else square brackets in a path would be taken for markup.
    console = Console(highlight=False, markup=False)
    target = options.output_dir or default_target(options.big)
    try:
        pair = Pair.load(options.big, options.small)
        labelled = _labelled(options, pair)
        certifying = _texts(options.texts, pair) if options.texts else labelled
        if certifying is None:
            what = f"{options.big}: its own dataset is not on this machine; name labelled rows with"
            raise UserError(f"{what} --rows, or texts with --texts", code="data-not-found")
        signal.signal(signal.SIGTERM, end_unfinished)  # before this, nothing has been written
        with _naming(target):
            write_cascade(pair, certifying, labelled, options.max_disagreement, target, console)
    except CalibrationError as error:
        bound = f"--max_disagreement {100 * options.max_disagreement:g}%"
        raise CascadeError(f"{bound}: {error}; nothing was written") from error
    except (OSError, ValueError) as error:
        names_file = isinstance(error, OSError) and error.filename
        what = f"{error.filename}: {error.strerror}" if names_file else first_line(error)
        raise CascadeError(f"{what}; nothing was written") from error
    console.print(printable(f"Written to {target}"), soft_wrap=True)
    serve = f"MODEL_CHECKPOINT={shlex.quote(str(target))} uvicorn inference.app:app --port 7860"
    console.print(printable(f"Next: {serve}"), soft_wrap=True)


@contextlib.contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Let errors name the cascade: a copy that fails on a full disk would name what it copies, and
    others a temporary folder.
    """
    try:
        yield
    except OSError as error:
        what = f"{target}: cannot be written ({error.strerror or error})"
        raise CascadeError(f"{what}; nothing was written") from error


def _labelled(options: argparse.Namespace, pair: Pair) -> HeldOut | None:
    """The rows that were named, or else those of the big model's dataset if they are here."""
    big = pair.big
    path, dataset = options.rows, big.metadata.get("dataset")
    if path is None:
        with contextlib.suppress(UserError):
            path = find_rows(dataset)
        # The sample news are the texts of a model only if it was trained on them.
        if path is None or (path == SAMPLE_NEWS and dataset != "sample"):
            return None
    own = columns_of(big.metadata, reads_pairs=big.reads_pairs)
    columns = TEXT_AND_LABEL if path == SAMPLE_NEWS else own
    rows = read_labelled_rows(path, big.labels, columns=columns)
    return HeldOut.of(pair, rows.name, rows.texts, rows.targets)


def _texts(path: Path, pair: Pair) -> HeldOut:
    big = pair.big
    reading = Reading(
        columns_of(big.metadata, reads_pairs=big.reads_pairs).without_label(),
        skip=False,
        flag="--texts",
        remedy="the columns must have the same names as in training",
        problem_type=PLAIN_TEXT,
    )
    return HeldOut.of(pair, str(path), read_texts(path, reading))


if __name__ == "__main__":
    run_command(main)
