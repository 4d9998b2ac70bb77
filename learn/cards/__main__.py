"""The twelve cards: python -m learn.cards run, show, or serve."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import OneLineParser, UserError, positive, run_command
from common.escaping import printable
from common.files import lock_run_folder

# What brings PyTorch along is imported where it is used: --help and a wrong flag take no seconds.
if TYPE_CHECKING:
    from learn.cards.pipeline import Pipeline

DEFAULT_OUTPUT = Path("checkpoints/cards")
DEFAULT_PORT = 8420


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m learn.cards", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a pipeline on real ranks")
    page = "write the run as a page, in a single file"
    run.add_argument("--report", type=Path, metavar="FILE.html", help=page)
    show = commands.add_parser("show", help="draw the wiring of a pipeline")
    show.add_argument("--mermaid", action="store_true", help="as a Mermaid flow chart")
    serve = commands.add_parser("serve", help="step through a pipeline on a page")
    port = "on this machine; 0: any (default: %(default)s)"
    serve.add_argument("--port", type=int, default=DEFAULT_PORT, help=port)
    for command in (run, serve):
        add = command.add_argument
        kept = (
            "folder for what the ranks held; a run replaces the one before it (default: "
            "%(default)s)"
        )
        add("--output", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help=kept)
        on_ray = (
            "run the ranks on the machines of a Ray cluster; auto: this machine's, local: one for "
            "this command"
        )
        add("--cluster", metavar="ADDRESS", help=on_ray)
    # Each of these sets a field of one card (SETTINGS in pipeline.py); without it the file decides.
    for command in (run, show, serve):
        add = command.add_argument
        add("pipeline", type=Path, nargs="?", metavar="PIPELINE.yaml", help="default: iris")
        ranks = "ranks (default: what the pipeline says)"
        add("--workers", type=positive, metavar="N", help=ranks)
        training = "of training (default: as the pipeline says)"
        add("--epochs", type=positive, metavar="N", help=training)
        how = "how the model is distributed over the ranks"
        add("--strategy", metavar="{ddp,fsdp,deepspeed}", help=how)
    return parser


def configured(flags: argparse.Namespace) -> Pipeline:
    """The pipeline that the flags name, with what they set."""
    from learn.cards.pipeline import DEFAULT_PIPELINE, SETTINGS, read_pipeline

    pipeline = read_pipeline(flags.pipeline or DEFAULT_PIPELINE)
    for name in SETTINGS:
        value = getattr(flags, name)
        if value is not None:
            pipeline = pipeline.with_setting(name, value, f"--{name} {value}")
    return pipeline


def run(flags: argparse.Namespace) -> None:
    from learn.cards.console import Progress
    from learn.cards.history import History
    from learn.cards.report import check_report, write_report
    from learn.cards.runner import Event, Runner

    pipeline = configured(flags)
    # Before the run, not after all its minutes.
    if flags.report:
        check_report(flags.report)
    history = History(pipeline)
    progress = Progress(pipeline, history)

    def follow(event: Event) -> None:
        history.record(event)
        progress.show(event)

    runner = Runner(pipeline, flags.output, follow, flags.cluster)
    try:
        with progress, runner:
            runner.run()
    finally:
        # Of a run that failed too: there it says most.
        if flags.report:
            write_report(flags.report, runner, history)
            print(f"The run on a page: {printable(flags.report)}")
    print(f"What each rank held before and after each card: {printable(runner.storage.folder)}")


def show(flags: argparse.Namespace) -> None:
    from rich.console import Console

    from learn.cards.console import as_mermaid, as_table
    from learn.cards.runner import num_epochs, num_workers

    pipeline = configured(flags)
    if flags.mermaid:
        print(as_mermaid(pipeline))
    else:
        table = as_table(pipeline, num_workers(pipeline), num_epochs(pipeline))
        Console(highlight=False, markup=False).print(table)


def serve(flags: argparse.Namespace) -> None:
    from learn.cards.serve import serve_page

    serve_page(configured(flags), flags.output, flags.port, flags.cluster)


def main() -> None:
    flags = build_parser().parse_args()
    if flags.command == "show":
        show(flags)
        return
    if sys.stderr.isatty():
        print("Loading PyTorch, which takes a few seconds ...", file=sys.stderr)
    try:
        flags.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output {flags.output}: cannot be written ({error.strerror})", code="not-writable"
        ) from error
    # One program per folder: a second run would delete what the first one's page is showing.
    with lock_run_folder(flags.output, "--output"):
        {"run": run, "serve": serve}[flags.command](flags)


if __name__ == "__main__":
    run_command(main)
