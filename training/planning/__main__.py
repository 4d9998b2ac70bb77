"""Plan a training run on hardware that you do not have.

For example: python -m training.planning --model llama-13b --gpus 32 --gpu a100-80gb

The largest model that fits: python -m training.planning --largest --gpus 32 --gpu a100-80gb
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import OneLineParser, UserError, positive, run_command
from common.files import write_json
from training.planning.hardware import GPUS, Cluster, build_cluster
from training.planning.largest import LargestAnswer, largest_model
from training.planning.layouts import CHECKPOINTING_MODES, STRATEGIES, Work
from training.planning.models import NAMED_SHAPES, ModelShape, find_shape
from training.planning.plan import SHORTEST_TEXT, Answer, answer, no_layout_fits, tokens_of_run
from training.planning.tables import as_record, largest_record, print_answer, print_largest

# What can be planned while someone waits; all published runs are smaller.
MOST_GPUS, MOST_BATCH_TOKENS, MOST_DAYS = 8192, 2**28, 36_500
FAMILIES_SCALED = ("llama-7b", "distilbert-base")  # by --largest


def _tokens(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e18:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: must be a number of tokens, such as 2e9")


def _run(text: str) -> tuple[str, float, float]:
    try:
        model, days, utilisation = text.split(":")
        found = model, float(days), float(utilisation)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: must be MODEL:DAYS:UTILISATION, such as llama-7b:21:0.6"
        ) from None
    if not (0 < found[1] <= MOST_DAYS and 0 < found[2] <= 1):
        raise argparse.ArgumentTypeError(
            f"{text}: the days must be above 0 and at most {MOST_DAYS}, the utilisation above 0 "
            "and at most 1"
        )
    return found


_NUMBER = {"type": positive, "metavar": "N"}
_FLAGS: dict[str, dict[str, Any]] = {
    "--model": {
        "metavar": "NAME|PATH",
        "help": f"{', '.join(NAMED_SHAPES)}, or a config.json; needed without --largest",
    },
    "--largest": {
        "action": "store_true",
        "help": "find the largest model that fits under each strategy: with the proportions of "
        f"--model, or with those of each of {' and '.join(FAMILIES_SCALED)}",
    },
    "--gpus": {**_NUMBER, "required": True, "help": "GPUs of the whole cluster"},
    "--gpu": {"required": True, "metavar": "NAME", "help": ", ".join(GPUS)},
    "--nodes": {
        **_NUMBER,
        "help": "machines (default: the fewest that these GPUs are usually sold in)",
    },
    "--strategy": {
        "choices": (*STRATEGIES, "all"),
        "default": "all",
        "metavar": "NAME",
        "help": f"plan only this strategy: {', '.join(STRATEGIES)} (default: all)",
    },
    "--batch_tokens": {
        **_NUMBER,
        "help": "tokens per global batch (default: 4 rows per GPU, or 32 for a classifier)",
    },
    "--seq_len": {**_NUMBER, "help": "tokens per row (default: 2048, or 128 for a classifier)"},
    "--micro_batch": {**_NUMBER, "help": "rows per micro-batch (default: the fastest)"},
    "--precision": {
        "choices": ("fp32", "bf16", "fp16"),
        "help": "default: bf16, or what the GPU supports",
    },
    "--activation_checkpointing": {
        "choices": CHECKPOINTING_MODES,
        "metavar": "MODE",
        "help": f"{', '.join(CHECKPOINTING_MODES)} (default: the fastest)",
    },
}
# What the whole run is to achieve; one of them at most.
_TARGETS: dict[str, dict[str, Any]] = {
    "--target_tokens": {
        "type": _tokens,
        "metavar": "N",
        "help": "how many days this many tokens take, such as 2e9",
    },
    "--target_run": {
        "type": _run,
        "metavar": "RUN",
        "help": "MODEL:DAYS:UTILISATION, such as llama-7b:21:0.6: the same for the tokens that one "
        "of these GPUs processes with another model",
    },
}


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m training.planning", description=__doc__)
    for name, settings in _FLAGS.items():
        parser.add_argument(name, **settings)
    target = parser.add_mutually_exclusive_group()
    for name, settings in _TARGETS.items():
        target.add_argument(name, **settings)
    everything = "also print where memory and time go, what does not fit, and how it scales"
    parser.add_argument("--details", action="store_true", help=everything)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    return parser


def ask(arguments: Sequence[str]) -> Answer:
    """The answer to a command line.

    Raises:
        UserError: a flag is wrong, or the flags contradict each other.
    """
    return _answer(build_parser().parse_args(arguments))


def _answer(flags: argparse.Namespace) -> Answer:
    if flags.model is None:
        raise UserError(
            "--model: is missing; give one, or --largest for the largest model that fits",
            code="flag-value",
        )
    shape, cluster, work = _question(flags, flags.model)
    target_tokens = flags.target_tokens
    if flags.target_run:
        model, days, utilisation = flags.target_run
        target_tokens = tokens_of_run(find_shape(model), cluster, work.seq_len, days, utilisation)
    return answer(shape, cluster, work, _strategies(flags), target_tokens)


def ask_for_largest(arguments: Sequence[str]) -> list[LargestAnswer]:
    """The answers to a command line with ``--largest``, one for each family.

    Raises:
        UserError: as :func:`ask`.
    """
    return _largest(build_parser().parse_args(arguments))


def _largest(flags: argparse.Namespace) -> list[LargestAnswer]:
    if flags.target_tokens or flags.target_run:
        raise UserError(
            "--largest and --target_tokens or --target_run: give one of them", code="flag-value"
        )
    strategies = _strategies(flags)
    # All questions before the first answer, which takes seconds: a flag may be wrong for one family
    # only.
    models = [flags.model] if flags.model else FAMILIES_SCALED
    questions = [_question(flags, model) for model in models]
    return [
        LargestAnswer(*question, [largest_model(*question, strategy) for strategy in strategies])
        for question in questions
    ]


def _strategies(flags: argparse.Namespace) -> Sequence[str]:
    return STRATEGIES if flags.strategy == "all" else (flags.strategy,)


def _question(flags: argparse.Namespace, model: str) -> tuple[ModelShape, Cluster, Work]:
    _check_limits(flags)
    shape = find_shape(model)
    cluster = build_cluster(flags.gpu, flags.gpus, flags.nodes)
    return shape, cluster, _work(flags, shape, cluster)


def _check_limits(flags: argparse.Namespace) -> None:
    if flags.gpus > MOST_GPUS:
        raise UserError(
            f"--gpus {flags.gpus}: at most {MOST_GPUS} can be planned", code="flag-value"
        )
    if (flags.batch_tokens or 0) > MOST_BATCH_TOKENS:
        raise UserError(
            f"--batch_tokens {flags.batch_tokens}: at most {MOST_BATCH_TOKENS} can be planned",
            code="flag-value",
        )
    if (flags.seq_len or SHORTEST_TEXT) < SHORTEST_TEXT:
        raise UserError(
            f"--seq_len {flags.seq_len}: the trainer takes rows of {SHORTEST_TEXT} tokens or more",
            code="flag-value",
        )


def _work(flags: argparse.Namespace, shape: ModelShape, cluster: Cluster) -> Work:
    is_classifier = shape.num_labels is not None
    seq_len = flags.seq_len or min(shape.max_positions, 128 if is_classifier else 2048)
    if seq_len > shape.max_positions:
        raise UserError(
            f"--seq_len {seq_len}: {shape.name} has {shape.max_positions} positions",
            code="max-length",
        )
    tokens = flags.batch_tokens or seq_len * (32 if is_classifier else 4) * cluster.gpus
    if tokens % seq_len:
        nearest = max(1, tokens // seq_len) * seq_len
        raise UserError(
            f"--batch_tokens {tokens} and --seq_len {seq_len}: does not make whole rows; use "
            f"{nearest}",
            code="uneven-split",
        )
    # bf16 first: it needs no loss scaling, and its halves are as fast as fp16's.
    supported = cluster.gpu.peak_flops
    precision = flags.precision or next(one for one in ("bf16", "fp16", "fp32") if one in supported)
    if precision not in supported:
        raise UserError(
            f"--precision {precision}: {cluster.gpu.name} supports {', '.join(supported)}",
            code="precision-unsupported",
        )
    return Work(
        tokens // seq_len, seq_len, precision, flags.micro_batch, flags.activation_checkpointing
    )


def main() -> None:
    flags = build_parser().parse_args()
    if flags.largest:
        families = _largest(flags)
        _write(flags.json, [largest_record(family) for family in families])
        print_largest(families)
        return
    found = _answer(flags)
    _write(flags.json, as_record(found))
    print_answer(found, details=flags.details)
    if not found.best:
        raise no_layout_fits(found)


def _write(path: Path | None, record: Any) -> None:
    if path is None:
        return
    try:
        write_json(path, record)
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}", code="not-writable") from error


if __name__ == "__main__":
    run_command(main)
