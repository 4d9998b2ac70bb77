"""Classify files: `python -m inference.score texts.parquet answers.parquet --model MODEL`."""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from common.errors import OneLineParser, UserError, positive, run_command
from common.escaping import printable, without_secrets
from common.hardware import usable_cpus
from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from common.row_parts import ROWS_PER_PART
from common.text import counted
from inference import asking
from inference.bulk.job import Job, plan_job
from inference.bulk.scoring import Scoring
from inference.engines.answering import Answering
from inference.engines.model_loader import ModelLoader
from inference.engines.selection import ENGINES
from inference.settings import Settings, keep_tokenizer_on_one_thread

# From here on a single thread cannot tokenize as fast as the cores classify.
_CPUS_FOR_PARALLEL_TOKENIZING = 16

_DESCRIPTION = """
Classify every row of a file, a folder or a pattern ("texts/*.csv"), and write all rows with the
added columns label and confidence; a multi-label model adds labels, joined by "|", and a regression
model adds value. CSV, TSV, JSONL and Parquet are read and written, also at addresses such as
s3://bucket/texts.parquet.

Run the same command again after it was stopped or killed: finished parts are kept, and the output
is the same. Run it on several machines at once, with the same IN and OUT on a folder that they
share: they share the work.
"""
_EXAMPLE = (
    "example: python -m inference.score texts.csv answers.parquet "
    "--model checkpoints/distilbert_agnews --text_column message"
)


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m inference.score", description=_DESCRIPTION.strip(), epilog=_EXAMPLE
    )
    flag = parser.add_argument
    flag("source", metavar="IN", help="a file, a folder (with all below it) or a pattern in quotes")
    flag(
        "out",
        metavar="OUT",
        help="for a file, one that ends in .csv, .tsv, .jsonl or .parquet; otherwise a folder",
    )
    flag(
        "--model", type=Path, help="model folder, .pt file or artefact (default: MODEL_CHECKPOINT)"
    )
    flag(
        "--engine",
        choices=ENGINES,
        metavar="NAME",
        help=f"{', '.join(ENGINES)} (default: ENGINE, else the fastest that works here)",
    )
    flag(
        "--text_column",
        default="text",
        metavar="NAME",
        help="column with the text, or several as in title,body (default: text)",
    )
    flag(
        "--pair_column",
        metavar="NAME",
        help="column with the second text, for a model that reads pairs (default: text_pair)",
    )
    flag(
        "--bad_rows",
        choices=("refuse", "keep"),
        default="refuse",
        help="a row without a text, or that cannot be read: refuse ends with its line, keep writes "
        "it without a label and with the reason in a column error (default: refuse)",
    )
    flag("--probabilities", action="store_true", help="also write the probability of every label")
    asking.add_flags(parser)
    flag(
        "--prefix",
        default="",
        metavar="TEXT",
        help="what the names of the added columns begin with",
    )
    flag(
        "--format",
        choices=("csv", "tsv", "jsonl", "parquet"),
        default="",
        help="of the files in the folder OUT (default: that of each input)",
    )
    flag(
        "--part_rows",
        type=positive,
        default=ROWS_PER_PART,
        metavar="N",
        help="rows per part, which is the most work that a killed process loses "
        f"(default: {ROWS_PER_PART})",
    )
    flag(
        "--restart",
        action="store_true",
        help="discard the finished parts of an earlier start, for example if the input or a flag "
        "has changed; not for commands that share their work",
    )
    flag("--quiet", action="store_true", help="print no progress")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = _parse_arguments(arguments)
    # First of all: loading a model takes seconds, in which a scheduler may stop the job.
    signal.signal(signal.SIGTERM, _stop)
    if usable_cpus() < _CPUS_FOR_PARALLEL_TOKENIZING:
        keep_tokenizer_on_one_thread()
    # What the output depends on: a start with other values is another job, and does not go on with
    # this one's parts.
    settings = {
        name: getattr(options, name)
        for name in ("text_column", "bad_rows", "probabilities", "prefix", "format", "part_rows")
    }
    # Only what is asked for: without, the record is that of a job begun by an earlier version.
    settings |= asking.asked_by(options, Settings.from_environment())
    job = plan_job(options.source, options.out, settings)
    model = _load_model(options, job)
    if model.reads_pairs:
        # Only the model tells whether there is a second text, so this is settled after it is
        # loaded.
        job.settings["pair_column"] = options.pair_column or "text_pair"
    _refuse_flags(options, model)
    # What can be refused is refused before anything is written, and before --restart removes parts.
    scoring = Scoring(job, model, quiet=options.quiet)
    scoring.check_inputs()
    if options.restart:  # last, so that a mistake in the command costs no finished part
        job.discard()
    try:
        job.begin(_describe(model))
    except UserError as error:
        if error.code != "score-job-changed":
            raise
        # Copies that start at the same moment may each have measured another engine as the fastest.
        # One of them has begun the job since this one looked, and the others take its engine.
        model = _load_model(options, job)
        job.begin(_describe(model))
        scoring = Scoring(job, model, quiet=options.quiet)
    if not job.finished:
        scoring.run()
        print(scoring.progress.summary(), file=sys.stderr)
    done = (
        f"{options.out}: {counted(job.record['rows'], 'row')}, "
        f"{job.record['model']['name']} ({model.info['engine']})"
    )
    print(printable(without_secrets(done)))


def _refuse_flags(options: argparse.Namespace, model: ModelLoader) -> None:
    what = ""
    if options.pair_column and not model.reads_pairs:
        what = f"--pair_column {options.pair_column}: this model reads single texts"
    elif options.probabilities and model.answering.problem_type is REGRESSION:
        what = "--probabilities: this model answers with a number, which has none"
    if what:
        raise UserError(f"{what}; leave the flag out", code="flags-conflict")


def _load_model(options: argparse.Namespace, job: Job) -> ModelLoader:
    settings = Settings.from_environment()
    # A job that has begun keeps its engine: which one is measured as the fastest may change from
    # start to start.
    begun_with = None if options.restart else job.earlier_record().get("model", {}).get("runtime")
    engine = options.engine or (
        settings.engine if settings.engine != "auto" else begun_with or "auto"
    )
    return ModelLoader(options.model or settings.model_checkpoint, engine, settings.hardware)


def _describe(model: ModelLoader) -> dict[str, Any]:
    """What answers depend on, for the record of the job."""
    words = model.info["engine"].split()
    return {
        "name": model.info["name"],
        "revision": model.info["revision"],
        "runtime": "torch_compiled" if words[-1] == "compiled" else words[0],
        "precision": model.info["precision"],
        "labels": model.labels,
        "max_length": model.max_length,
        **_meaning(model.answering),
        **({"small": _describe(model.cascade.small)} if model.cascade else {}),
    }


def _meaning(answering: Answering) -> dict[str, Any]:
    # What is not part of the weights, and so not of the revision.
    meaning: dict[str, Any] = {}
    if answering.calibration is not None:
        record = json.dumps(answering.calibration.record, sort_keys=True)
        meaning["calibration"] = hashlib.sha256(record.encode()).hexdigest()[:12]
    if answering.problem_type is not SINGLE_LABEL:
        meaning["problem_type"] = answering.problem_type.name
    if answering.problem_type is MULTI_LABEL:
        meaning["thresholds"] = answering.thresholds
    return meaning


def _stop(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a scheduler and its script may both send it
    print(
        "stopped; finished parts are kept, rerun the same command to resume",
        file=sys.stderr,
        flush=True,
    )
    sys.exit(128 + number)


if __name__ == "__main__":
    run_command(main)
