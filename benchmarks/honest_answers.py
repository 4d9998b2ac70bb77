"""Are the promises of a calibrated model kept, where do they end, and what do they cost?

Everything is measured with the artefact that is served. Parts that are not measured again keep what
the page has of them; the figures of the comparison with a frozen encoder need its folder.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.honest import cost, foreign, promises, shift
from benchmarks.honest.page import MODULE, draw, render
from benchmarks.honest.texts import Model, add_text_flags, foreign_texts, read_events
from common.errors import positive

PACKAGES = ("numpy", "scipy", "tokenizers", "fastapi", "torch", "transformers")
Results = Iterator[dict[str, Any]]


def main() -> None:
    options = _parse()

    def write(results: dict[str, Any]) -> None:
        figure = draw(results["shift"]) if "shift" in results else None
        harness.write_page(options.output, render(results), results, figure)

    harness.measure_parts(options, PARTS, MODULE, PACKAGES, write)


def _halves(options: Namespace) -> Results:
    model = Model(options)
    yield _promises(model, [len(model.right) // 2], options.splits)


def _sizes(options: Namespace) -> Results:
    yield _promises(Model(options), options.sizes, options.splits_of_sizes)


def _promises(model: Model, sizes: Sequence[int], splits: int) -> dict[str, Any]:
    found = []
    for size in sizes:
        arguments = (model.scored.logits, model.right, model.labels)
        found.append(promises.measure(*arguments, size, splits))
        harness.report(f"{size:,} rows: {found[-1]}")
    return {"sizes": found}


def _shift(options: Namespace) -> Results:
    yield shift.measure(Model(options), read_events(options.events))


def _foreign(options: Namespace) -> Results:
    model = Model(options)
    kinds = foreign_texts(options, model.rows.texts)
    yield foreign.measure(model, kinds, options.encoder)


def _cost(options: Namespace) -> Results:
    yield {"seconds": options.seconds, "rounds": cost.measure(options)}


PARTS: dict[str, Callable[[Namespace], Results]] = {
    "halves": _halves,
    "sizes": _sizes,
    "shift": _shift,
    "foreign": _foreign,
    "cost": _cost,
}


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="honest_answers.md", rounds=5)
    add = parser.add_argument
    news = harness.ROOT / "checkpoints" / "news"
    add("--model", type=Path, default=news, help="an artefact (default: checkpoints/news)")
    add_text_flags(parser)
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
    add("--encoder", type=Path, help="folder of all-MiniLM-L6-v2, to compare with (default: none)")
    harness.add_parts_flag(parser, PARTS)
    add("--splits", type=positive, default=500, help="into halves (default: 500)")
    add(
        "--sizes",
        type=positive,
        nargs="+",
        default=[2000, 1000, 300],
        help="fewer rows to fit on (default: 2000 1000 300)",
    )
    add("--splits_of_sizes", type=positive, default=200, help="of each of them (default: 200)")
    add("--seconds", type=harness.seconds, default=3, help="of each load (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
