"""Studies: variants are measured with several seeds, and a page compares what came of them.

A benchmark of this kind is a :class:`Study`: it says what is compared, how a trial is measured, and
what the page shows.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.processes import Layout, run_ranks
from benchmarks.training_run import train_rank, words_of, write_rows
from common.errors import positive
from common.hardware import usable_cpus
from training.data.dataset import Rows, TextData, load_data

# What is kept as JSON: the facts, what the introduction names, and in "rounds" the figures of
# each variant, a round per seed.
Run = dict[str, Any]
Flags = Sequence[str]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One variant with one seed. ``output``: a place for its model, which is deleted afterwards."""

    options: Namespace
    data: TextData
    flags: Flags
    seed: int
    output: Path

    @property
    def run_dir(self) -> Path:
        return self.output.with_name(f"{self.output.name}.run")

    def write_rows(self, **splits: Rows) -> Path:
        """Write rows of the data where training reads them."""
        return write_rows(self.output.with_name("rows"), self.data.label_names, **splits)

    def train(self, layout: Layout | None = None, **given: Any) -> tuple[Figures, Figures]:
        """Train with the variant's flags and the given ones, by default with one process per core.

        Returns:
            The results on the test rows, and what rank 0 found, with the ``seconds`` of all steps.
        """
        cache = self.output.parents[1] / "cache"  # all trials share the tokens
        # The variant's own flags come last, so they win over what all variants are given.
        given |= {"seed": self.seed, "output_dir": self.output, "cache_dir": cache}
        layout = layout or Layout(usable_cpus(), 1)
        rank, *_ = run_ranks(train_rank, layout, flags=[*words_of(given), *self.flags])
        epochs = [record for record in rank["records"] if record["kind"] == "epoch"]
        # Steps alone, without start, validation and test, which would blur what the variants differ
        # in.
        rank["seconds"] = sum(record["seconds"] for record in epochs)
        return json.loads((self.output / "metrics.json").read_text(encoding="utf-8"))["test"], rank


@dataclass(frozen=True)
class Row:
    """A row of the table: a variant with its figures in all rounds of a run."""

    name: str
    run: Run

    def values(self, figure: str) -> list[Any]:
        return [found[self.name][figure] for found in self.run["rounds"]]

    def percent(self, figure: str) -> list[float]:
        return [100 * value for value in self.values(figure)]


Column = Callable[[Row], str]


def row_name(row: Row) -> str:
    return row.name


def mean_percent(figure: str) -> Column:
    return lambda row: harness.mean_and_spread(row.percent(figure))


def median_seconds(row: Row) -> str:
    return harness.median_and_spread(row.values("seconds"), 0)


@dataclass(frozen=True)
class Study:
    """What is compared, how it is measured, and what the page says of it."""

    name: str  # of the module and its page
    question: str  # the module's docstring, for --help
    title: str
    introduction: str  # its braces are filled from the run and from ``words`` of it
    columns: Mapping[str, Column]
    variants: Mapping[str, Flags] | Callable[[Namespace], Mapping[str, Flags]]
    flags: Mapping[str, Mapping[str, Any]]  # as argparse takes them
    measure: Callable[[Trial], Figures] | None = None  # None: the study has a loop of its own
    # What the run keeps of the options and the data, besides options that are numbers.
    about: Callable[[Namespace, TextData], Run] = lambda options, data: {}
    words: Callable[[Run], dict[str, Any]] = lambda run: {}
    order: Callable[[Run], Iterable[str]] = lambda run: run["rounds"][0]  # of the table's rows
    goals: Callable[[Run], str] = lambda run: ""  # what follows the table
    seeds: int = 3  # the default of the flag; 0: the study has --rounds instead
    rounds: int = 0
    packages: Sequence[str] = harness.PACKAGES

    @property
    def module(self) -> str:
        return f"benchmarks.{self.name}"

    def main(self) -> None:
        """Measure every variant with every seed, alternately; write the page after each round."""
        options = self.parse()
        data = load_data(options.dataset)
        run = self.begin(options, data) | {"rounds": []}
        variants = self.variants(options) if callable(self.variants) else self.variants
        with tempfile.TemporaryDirectory(prefix=f"{self.name}-") as folder:
            # Models are deleted after each trial: dozens of encoders would fill the disk.
            def measure(flags: Flags, seed: int) -> Figures:
                with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as scratch:
                    # The number of the round is the seed, so all variants of a round share it.
                    return self.measure(Trial(options, data, flags, seed, Path(scratch) / "model"))

            num_rounds = options.seeds if self.seeds else options.rounds
            for found in harness.run_rounds(variants, num_rounds, measure, describe):
                run["rounds"].append(found)
                harness.write_page(options.output, self.page(run), run)

    def parse(self) -> Namespace:
        defaults = {"page": f"{self.name}.md", "seeds": self.seeds, "rounds": self.rounds}
        parser = harness.Parser(self.module, self.question, **defaults)
        for flag, settings in self.flags.items():
            parser.add_argument(f"--{flag}", **settings)
        return parser.parse_args()

    def begin(self, options: Namespace, data: TextData) -> Run:
        """A run without figures."""
        name = Path(data.name).name
        facts = harness.measurement_facts(self.module, self.packages)
        facts["Data"] = harness.rows_of(name, len(data.train), len(data.test))
        run = {"facts": facts, "name": name, "tests": len(data.test)}
        # Not the number of rounds: the page says how many there are already.
        run |= {flag: value for flag, value in vars(options).items() if type(value) is int}
        run.pop("rounds", None)
        return run | self.about(options, data)

    def page(self, run: Run) -> str:
        """The page of a run."""
        # The rounds that are there and not those that were asked for: the page is written after
        # each one.
        counts = {"seeds": len(run.get("rounds", ())), "processes": usable_cpus()}
        text = self.introduction.format(**run | counts | self.words(run))
        introduction = harness.introduction(self.module, self.title, text)
        table = harness.table(self.columns, [Row(name, run) for name in self.order(run)])
        return f"{introduction}{table}{self.goals(run)}\n{harness.fact_list(run['facts'])}"


def describe(found: Figures) -> str:
    seconds = f" in {found['seconds']:.0f} s" if "seconds" in found else ""
    return f"accuracy {found['accuracy']:.4f}{seconds}"


def number(default: int, shown: str) -> dict[str, Any]:
    """A flag for a positive number."""
    return {"type": positive, "default": default, "help": f"{shown} (default: {default})"}


def dataset(shown: str = "as for training") -> dict[str, Any]:
    """The flag for the data."""
    return {"default": str(harness.ROOT / "data" / "ag_news"), "help": shown}


ENCODER = {"type": Path, "required": True, "help": "the encoder to fine-tune"}
