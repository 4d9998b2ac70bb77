"""Train a model again, with the rows that were reviewed: `python -m loop.retrain OLD ...`.

Every stage is a command that could be started by hand: training, the export, the verdict. Whatever
is finished is kept, so the same command, started again, continues.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from common.commands import HOUSE, run_module
from common.credentials import without_password
from common.errors import ModelLoadError, OneLineParser, UserError, positive, run_command
from common.escaping import printable
from common.files import sha256_of, write_json
from common.model_folder import (
    PRECISIONS,
    SavedModel,
    artefact_folder,
    is_artefact,
    read_saved_model,
    verified_manifest,
)
from common.problem_types import SINGLE_LABEL
from common.rows import Columns, read_labelled_rows
from loop.comparison import EXIT_CODES
from loop.new_rows import (
    CALIBRATION,
    COUNTS,
    VERDICT,
    NewRows,
    lines_about,
    read_reviewed,
    reviewed_in_store,
)
from loop.record import Artefact

# Up to so many rows, the head learns and the encoder stays as it is: what training calls few rows
# (docs/data.md).
FEW_ROWS = 1_000
_INPUTS = "inputs.json"

_DESCRIPTION = """
Train OLD again on its old rows and the reviewed ones, export the new model, and compare both on the
golden rows. Ends with the verdict and its exit code: PROMOTE (0), HOLD (10) or REJECT (11). Started
again after it was stopped, it continues.

What follows -- is given to training, such as -- --epochs 2.
"""


def _parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m loop.retrain", description=_DESCRIPTION.strip())
    flag = parser.add_argument
    flag("old", type=Path, metavar="OLD", help="the folder of the model that serves")
    flag("--rows", type=Path, required=True, metavar="FILE", help="the rows it was trained on")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--reviewed",
        type=Path,
        metavar="FILE",
        help="reviewed rows: JSON lines with text, label and, of those drawn like every other text, "
        '"why": "uniform"',
    )
    source.add_argument(
        "--store",
        metavar="ADDRESS",
        help="take the reviewed rows from the server's observations: an SQLite file or postgresql://...",
    )
    flag("--model", metavar="NAME", help="name of the model in the store (default: that of OLD)")
    flag(
        "--golden",
        type=Path,
        required=True,
        metavar="FILE",
        help="rows whose labels are right and on which no model is ever trained",
    )
    flag("--output_dir", type=Path, required=True, metavar="NEW", help="folder of the new model")
    flag("--text_column", default="text", metavar="NAME", help="column of the text (default: text)")
    flag(
        "--label_column",
        default="label",
        metavar="NAME",
        help="column of the label (default: label)",
    )
    flag(
        "--method",
        choices=("auto", "head", "fine_tune"),
        default="auto",
        help="head: the last layer learns, in seconds; fine_tune: all weights do, beginning with "
        f"those of OLD; auto: head up to {FEW_ROWS:,} rows (default: auto)",
    )
    flag(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="ranks of fine-tuning, usually one per GPU (default: 1)",
    )
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    if options.model and not options.store:
        parser.error("--model: names the model in a store; give --store too")
    options.training_flags = arguments[end + 1 :]
    return options


def main(arguments: list[str] | None = None) -> int:
    options = _parse_arguments(sys.argv[1:] if arguments is None else arguments)
    # By default, Python would end at once, and leave behind the command that it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    saved = _read_old(options.old)
    rows = _rows_folder(options, saved)
    _train(options, saved, rows)
    _export(options.output_dir, rows)
    old, new = str(options.old), str(options.output_dir)
    return run_module(
        "loop.verdict",
        [old, new, "--rows", str(rows / VERDICT)],
        new,
        _say,
        also_good=EXIT_CODES.values(),
    )


def _read_old(path: Path) -> SavedModel:
    """The model to begin with.

    Raises:
        UserError: it is none, or cannot learn more.
    """
    saved = read_saved_model(path)
    what = ""
    if saved.weights is None:
        what = "has only the exported artefact; name the folder that training wrote"
    elif not path.is_dir():
        what = "is a file; name the model folder"
    elif saved.problem_type is not SINGLE_LABEL or saved.reads_pairs or saved.windows:
        what = "only a model that gives single texts one label, without windows, can be retrained"
    elif not any(is_artefact(artefact_folder(path, engine)) for engine in PRECISIONS):
        what = f"has no artefact to compare with; run python -m inference.export {path}"
    if what:
        raise UserError(f"{path}: {what}", code="model-unusable")
    return saved


# ---------------------------------------------------------------- rows


def _rows_folder(options: argparse.Namespace, saved: SavedModel) -> Path:
    """The folder with the rows of this retraining, which an earlier start may have written.

    Raises:
        UserError: a file cannot be used, there is nothing to learn or to compare on, or the earlier
            start was about something else.
    """
    folder = options.output_dir.with_name(f"{options.output_dir.name}.rows")
    inputs = _inputs(options)
    if (folder / _INPUTS).is_file():
        if json.loads((folder / _INPUTS).read_text(encoding="utf-8")) != inputs:
            raise UserError(
                f"{options.output_dir}: begun with other rows or flags; give another --output_dir, "
                f"or delete {folder} and {options.output_dir}",
                code="flags-conflict",
            )
        print(printable(f"Continuing with the rows in {folder}"))
    else:
        _split(options, saved).write(folder)
        write_json(folder / _INPUTS, inputs)
    counts = json.loads((folder / COUNTS).read_text(encoding="utf-8"))
    print("\n".join(lines_about(counts)), flush=True)
    return folder


def _inputs(options: argparse.Namespace) -> dict[str, Any]:
    """What a retraining depends on. A store changes all the time, so what it had at the beginning
    counts.
    """
    # Training resumes on any number of ranks.
    free = ("output_dir", "processes")
    given = {name: str(value) for name, value in vars(options).items() if name not in free}
    if options.store:
        # This goes into a file beside the model, and a new password does not make it another store.
        given["store"] = without_password(options.store)
    files = (options.rows, options.golden, options.reviewed)
    hashes = {str(path): sha256_of(path) for path in files if path and path.is_file()}
    return {**given, "files": hashes}


def _split(options: argparse.Namespace, saved: SavedModel) -> NewRows:
    labels, columns = saved.labels, Columns(options.text_column, options.label_column)
    note = ""
    if options.reviewed:
        reviewed = read_reviewed(options.reviewed, labels)
    else:
        # The export's name for it, as the server's: a promoted model is in a folder of another name.
        name = options.model or Artefact.at(options.old).manifest.source["name"]
        reviewed, note = reviewed_in_store(options.store, name, labels)
    if note:
        print(note)
    old, golden = (
        read_labelled_rows(path, labels, columns=columns) for path in (options.rows, options.golden)
    )
    rows = NewRows.split(old, reviewed, golden, labels)
    what = ""
    if not rows.counts["reviewed_trained"]:
        source = (
            f"--reviewed {options.reviewed}"
            if options.reviewed
            else f"--store {without_password(options.store)}"
        )
        what = f"{printable(source)}: no reviewed row is left to train on"
    elif not rows.verdict:
        what = f"--golden {options.golden}: too few rows to compare two models on"
    if what:
        raise UserError(what, code="data-empty")
    return rows


# ---------------------------------------------------------------- stages


def _train(options: argparse.Namespace, saved: SavedModel, rows: Path) -> None:
    counts = json.loads((rows / COUNTS).read_text(encoding="utf-8"))
    num_rows = counts["old"] - counts["golden_among_old"] + counts["reviewed_trained"]
    is_head = options.method == "head" or (options.method == "auto" and num_rows <= FEW_ROWS)
    flags = {
        "dataset": rows,
        "output_dir": options.output_dir,
        "model": options.old,
        "method": "head" if is_head else "fine_tune",
        "max_length": saved.max_length,
        "clean": saved.cleaning,
        # Reviews are made by people: what both the model and the words contradict counts less.
        **({} if is_head else {"suspects": "reweight"}),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += options.training_flags
    module = "training.train_single"
    if options.processes > 1 and not is_head:
        # What training/run_ddp.sh starts. Through the script, a stop would end the shell first.
        module, script = "training.launch", str(HOUSE / "training" / "train_ddp.py")
        words = ["--standalone", f"--nproc_per_node={options.processes}", script, *words]
    _announce(module, words)
    run_module(module, words, f"--output_dir {options.output_dir}", _say)


def _export(model: Path, rows: Path) -> None:
    if any(_is_current(artefact_folder(model, engine), model) for engine in PRECISIONS):
        return  # of an earlier start
    words = [str(model), "--rows", str(rows / CALIBRATION)]
    _announce("inference.export", words)
    run_module("inference.export", words, str(model), _say)


def _is_current(artefact: Path, model: Path) -> bool:
    try:
        return is_artefact(artefact) and bool(verified_manifest(artefact, model))
    except ModelLoadError:
        return False


def _announce(module: str, words: list[str]) -> None:
    print(printable(f"$ python -m {module} {shlex.join(words)}"), flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
