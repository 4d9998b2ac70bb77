"""Plan a training run on hardware that is not here.

For example: python -m training.planning --model llama-13b --gpus 32 --gpu a100-80gb
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.errors import OneLineParser, UserError, positive, run_command
from common.files import write_json
from training.planning.answer import Answer, answer, no_layout_fits, tokens_of_run
from training.planning.dry_run import SECONDS_LIMIT, DryRun, NoDryRun, dry_run
from training.planning.hardware import GPU, GPUS, Cluster, build_cluster, find_gpu
from training.planning.launch import SHORTEST
from training.planning.layouts import MODES, STRATEGIES, Work
from training.planning.models import NAMED_SHAPES, find_shape
from training.planning.plan import Plan
from training.planning.record import as_record
from training.planning.report import write_report
from training.planning.sections import describe
from training.planning.shapes import ModelShape, Precision
from training.planning.text import print_answer, read_page, write_page

# What can be planned while someone waits; published runs stay below.
MOST_GPUS, MOST_BATCH_TOKENS, MOST_DAYS = 8192, 2**28, 36_500


def build_parser() -> OneLineParser:
    """The planner's flags."""
    parser = OneLineParser(prog="python -m training.planning", description=__doc__)
    parser.add_argument(
        "--model", required=True, metavar="NAME|PATH", help=f"{', '.join(NAMED_SHAPES)}, or a config.json"
    )
    parser.add_argument("--gpus", type=positive, required=True, metavar="N", help="GPUs of the whole cluster")
    parser.add_argument("--gpu", required=True, metavar="NAME", help=", ".join(GPUS))
    parser.add_argument("--nodes", type=positive, metavar="N", help="machines (default: as few as the GPU is sold in)")
    parser.add_argument(
        "--strategy",
        choices=(*STRATEGIES, "all"),
        default="all",
        metavar="NAME",
        help=f"plan only this one: {', '.join(STRATEGIES)} (default: all)",
    )
    parser.add_argument(
        "--batch_tokens", type=positive, metavar="N", help="tokens of a global batch (default: a GPU's rows x the GPUs)"
    )
    parser.add_argument(
        "--seq_len", type=positive, metavar="N", help="tokens of a row (default: 2048, or 128 for a classifier)"
    )
    parser.add_argument(
        "--micro_batch", type=positive, metavar="N", help="rows of a micro-batch (default: the fastest)"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16, or what the GPU has")
    parser.add_argument(
        "--activation_checkpointing", choices=MODES, metavar="MODE", help=f"{', '.join(MODES)} (default: the fastest)"
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--target_tokens", type=_tokens, metavar="N", help="say how many days they take, such as 2e9")
    target.add_argument(
        "--target_run",
        type=_run,
        metavar="RUN",
        help="MODEL:DAYS:UTILISATION, the tokens that one of the GPUs gets through with another model, such as "
        "llama-7b:21:0.6",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the tables between the marks of a Markdown page"
    )
    parser.add_argument("--no_dry_run", action="store_true", help="formulas only: a second instead of a minute")
    return parser


def _tokens(text: str) -> float:
    try:
        tokens = float(text)
    except ValueError:
        tokens = 0.0
    if not 0 < tokens < 1e18:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of tokens, such as 2e9")
    return tokens


def _run(text: str) -> tuple[str, float, float]:
    try:
        model, days, utilisation = text.split(":")
        found = model, float(days), float(utilisation)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be MODEL:DAYS:UTILISATION, such as llama-7b:21:0.6") from None
    if not (0 < found[1] <= MOST_DAYS and 0 < found[2] <= 1):
        raise argparse.ArgumentTypeError(
            f"{text}: the days must be above 0 and at most {MOST_DAYS}, the utilisation above 0 and at most 1"
        )
    return found


def ask(arguments: Sequence[str]) -> Answer:
    """The answer to a command line.

    Raises:
        UserError: a flag is wrong, or the flags do not go together.
    """
    return _answer(build_parser().parse_args(arguments))


def _answer(flags: argparse.Namespace) -> Answer:
    _check_sizes(flags)
    shape = find_shape(flags.model)
    cluster = build_cluster(find_gpu(flags.gpu), flags.gpus, flags.nodes)
    work = _work(flags, shape, cluster)
    strategies = STRATEGIES if flags.strategy == "all" else (flags.strategy,)
    return answer(shape, cluster, work, strategies, _target(flags, cluster, work))


def _check_sizes(flags: argparse.Namespace) -> None:
    if flags.gpus > MOST_GPUS:
        raise UserError(f"--gpus {flags.gpus}: at most {MOST_GPUS} can be planned", code="flag-value")
    if (flags.batch_tokens or 0) > MOST_BATCH_TOKENS:
        raise UserError(
            f"--batch_tokens {flags.batch_tokens}: at most {MOST_BATCH_TOKENS} can be planned", code="flag-value"
        )
    if (flags.seq_len or SHORTEST) < SHORTEST:
        raise UserError(
            f"--seq_len {flags.seq_len}: the trainer takes rows of {SHORTEST} tokens or more", code="flag-value"
        )


def _work(flags: argparse.Namespace, shape: ModelShape, cluster: Cluster) -> Work:
    is_classifier = shape.num_labels is not None
    seq_len = flags.seq_len or min(shape.max_positions, 128 if is_classifier else 2048)
    if seq_len > shape.max_positions:
        raise UserError(f"--seq_len {seq_len}: {shape.name} has {shape.max_positions} positions", code="max-length")
    tokens = flags.batch_tokens or seq_len * (32 if is_classifier else 4) * cluster.gpus
    if tokens % seq_len:
        near = max(1, tokens // seq_len) * seq_len
        raise UserError(
            f"--batch_tokens {tokens} and --seq_len {seq_len}: not whole rows; take {near}", code="uneven-split"
        )
    precision = _precision(flags.precision, cluster.gpu)
    return Work(tokens // seq_len, seq_len, precision, flags.micro_batch, flags.activation_checkpointing)


def _precision(asked: Precision | None, gpu: GPU) -> Precision:
    if asked is None:
        return next(precision for precision in ("bf16", "fp16", "fp32") if precision in gpu.peak_flops)
    if asked not in gpu.peak_flops:
        raise UserError(
            f"--precision {asked}: {gpu.name} has {', '.join(gpu.peak_flops)}", code="precision-unsupported"
        )
    return asked


def _target(flags: argparse.Namespace, cluster: Cluster, work: Work) -> float | None:
    if flags.target_run is None:
        return flags.target_tokens
    model, days, utilisation = flags.target_run
    return tokens_of_run(find_shape(model), cluster, work.seq_len, days, utilisation)


def dry_runs_of(found: Answer) -> dict[int, DryRun | str]:
    """A dry run of each of the best plans, or why there is none; two at a time, and all in the time for all."""
    if found.best:
        print(f"dry runs of {', '.join(map(describe, found.best))} ...", file=sys.stderr, flush=True)
    ends = time.monotonic() + SECONDS_LIMIT
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(enumerate(pool.map(lambda plan: _dry_run(plan, ends), found.best)))


def _dry_run(plan: Plan, ends: float) -> DryRun | str:
    device = "cpu" if plan.cluster.gpu.name == "cpu" else "gpu"
    try:
        return dry_run(plan.shape, plan.layout, plan.layout.ranks, device, seconds=ends - time.monotonic())
    except NoDryRun as error:
        return str(error)


def _check_targets(flags: argparse.Namespace) -> None:
    """See that what is asked for can be written, before it takes time."""
    for flag in ("json", "html", "page"):
        path: Path | None = getattr(flags, flag)
        if path is None:
            continue
        if path.is_dir():
            raise UserError(f"--{flag} {path}: is a folder; name a file", code="not-writable")
        if not path.parent.is_dir():
            raise UserError(f"--{flag} {path}: there is no folder {path.parent}", code="not-writable")
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"--{flag} {path}: the folder cannot be written to", code="not-writable")
    if flags.page:
        read_page(flags.page)


def _write(flag: str, path: Path | None, write: Callable[[Path], None]) -> None:
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise UserError(f"--{flag} {path}: {error.strerror}", code="not-writable") from error


def main() -> None:
    """Answer, in every form that was asked for."""
    flags = build_parser().parse_args()
    _check_targets(flags)
    found = _answer(flags)
    runs = {} if flags.no_dry_run else dry_runs_of(found)
    _write("json", flags.json, lambda path: write_json(path, as_record(found, runs)))
    _write("html", flags.html, lambda path: write_report(path, found, runs))
    _write("page", flags.page, lambda path: write_page(path, found, runs))
    print_answer(found, runs)
    if not found.best:
        raise no_layout_fits(found)


if __name__ == "__main__":
    run_command(main)
