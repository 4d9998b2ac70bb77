"""Is the accuracy of texts without labels known, does the alarm find foreign texts and stay silent otherwise, and what
does it cost?

A model is trained on the first months of current events and observed for ninety more. Parts that are not measured again
keep what the page has of them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.drift import alarms, cost, months
from benchmarks.drift.page import MODULE, render
from benchmarks.honest.texts import add_text_flags
from common.errors import positive

PACKAGES = ("numpy", "tokenizers", "scikit-learn", "torch", "transformers")
Results = Iterator[dict[str, Any]]


def main() -> None:
    options = _parse()

    def write(results: dict[str, Any]) -> None:
        harness.write_page(options.output, render(results), results)

    harness.measure_parts(options, PARTS, MODULE, PACKAGES, write)


def _months(options: Namespace) -> Results:
    yield months.measure(options)


def _other_texts(options: Namespace) -> Results:
    yield months.measure_foreign(options)


def _alarm(options: Namespace) -> Results:
    yield alarms.measure(options)


PARTS: dict[str, Callable[[Namespace], Results]] = {
    "months": _months,
    "other_texts": _other_texts,
    "alarm": _alarm,
    "cost": cost.measure,
}


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="observing.md", rounds=2)
    add = parser.add_argument
    news = harness.ROOT / "checkpoints" / "news"
    add(
        "--model",
        type=Path,
        default=news,
        help="an artefact for AG News (default: checkpoints/news)",
    )
    add_text_flags(parser)
    add(
        "--encoder",
        default="sentence-transformers/all-MiniLM-L6-v2",
        help="of the model of the first months (default: sentence-transformers/all-MiniLM-L6-v2)",
    )
    add(
        "--work",
        type=Path,
        default=harness.ROOT / "checkpoints" / "events",
        help="folder for that model, its rows and all answers (default: checkpoints/events)",
    )
    add(
        "--languages",
        type=Path,
        default=harness.ROOT / "data" / "languages",
        help="folder with a TSV file per language, with a column text (default: data/languages)",
    )
    add(
        "--domains",
        type=Path,
        nargs="*",
        default=[],
        help="folders with a test.csv, with a column text, of other domains (default: none)",
    )
    add("--seconds", type=harness.seconds, default=48, help="of each load, for cost (default: 48)")
    harness.add_parts_flag(parser, PARTS)
    add(
        "--trials",
        type=positive,
        default=200,
        help="of each mixture with foreign texts (default: 200)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
