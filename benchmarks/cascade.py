"""Does a cascade keep its promise, where does it end, and how much faster is it than the big model?

Everything is measured with the artefacts that are served. Parts that are not measured again keep
what the page has of them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.cascading import promise, speed
from benchmarks.cascading.page import MODULE, render
from benchmarks.cascading.scores import Both, Ids, both_models, read_rows
from benchmarks.honest.texts import LABEL_OF, add_text_flags, read_events
from common.errors import positive

PACKAGES = ("numpy", "scipy", "tokenizers", "fastapi", "torch")
Results = Iterator[dict[str, Any]]


def main() -> None:
    options = _parse()

    def write(results: dict[str, Any]) -> None:
        harness.write_page(options.output, render(results), results)

    harness.measure_parts(options, PARTS, MODULE, PACKAGES, write)


def _splits(options: Namespace) -> Results:
    rows, _ = read_rows(options)
    both = both_models(options, rows.texts)
    yield promise.measure_splits(both, np.asarray(rows.targets), options.splits)


def _shift(options: Namespace) -> Results:
    rows, labels = read_rows(options)
    right = np.asarray(rows.targets)
    events = [one for one in read_events(options.events) if one.category in LABEL_OF]
    scored = both_models(options, [one.text for one in events])
    told = np.array([labels.index(LABEL_OF[one.category]) for one in events])
    years = np.array([one.year for one in events])
    sets: dict[str, tuple[Both, Ids]] = {
        promise.ROWS: (both_models(options, rows.texts), right),
        "titles": (both_models(options, [text.first for text in rows.texts]), right),
    }
    for year in sorted(set(years)):
        places = np.flatnonzero(years == year)
        sets[f"events of {year}"] = (scored[places], told[places])
    sets["all events"] = (scored, told)
    yield promise.measure_shift(sets, options.series)


PARTS: dict[str, Callable[[Namespace], Results]] = {
    "splits": _splits,
    "shift": _shift,
    "bulk": speed.measure_bulk,
    "serving": speed.measure_serving,
}


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="cascade.md", rounds=5)
    add = parser.add_argument
    checkpoints = harness.ROOT / "checkpoints"
    add(
        "--big",
        type=Path,
        nargs="+",
        default=[checkpoints / "minilm_agnews" / "native"],
        help="artefacts, each with its cascade where python -m inference.cascade writes it; splits "
        "and shift use the first (default: checkpoints/minilm_agnews/native)",
    )
    add("--small", type=Path, default=checkpoints / "news", help="default: checkpoints/news")
    add_text_flags(parser)
    add(
        "--cache",
        type=Path,
        default=harness.ROOT / "build" / "cascade_scores",
        help="where the models' answers are kept (default: build/cascade_scores)",
    )
    harness.add_parts_flag(parser, PARTS)
    add("--splits", type=positive, default=500, help="into halves (default: 500)")
    add("--series", type=positive, default=100, help="of texts for the audit (default: 100)")
    add("--bulk_rows", type=positive, default=2000, help="in the file (default: 2000)")
    add("--seconds", type=harness.seconds, default=10, help="of each load (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
