"""What watching costs: runs with all checks and metrics against runs with none, by turns."""

from __future__ import annotations

import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from urllib.error import URLError
from urllib.request import urlopen

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.processes import Layout, end_with_children, free_port, run_ranks
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, spread, write_table
from benchmarks.workload import MAX_LENGTH, write_weights
from training.config import TINY
from training.dataset import load_news
from training.errors import positive, run_command
from training.quiet import quiet_libraries
from training.tokenized import load_tokenizer

MODULE = "benchmarks.observation_cost"
KINDS = ("off", "on")
FIRST_STEP = 5  # those before it pay for what happens once
SCRAPE_SECONDS = 5.0
HEADER = [
    "model",
    "processes",
    "nothing watches, ms a step",
    "all watch, ms a step",
    "cost",
    "of each round",
    "one comparison of copies, ms",
    "each 500 steps",
]
INTRODUCTION = f"""# What watching costs

Written by `python -m {MODULE}`. *all watch*: `--metrics_port`, with each page read every {SCRAPE_SECONDS:.0f} s, status
files, watchdog, events, metrics.jsonl and TensorBoard, loss spikes, stragglers, collectives, and the comparison of
copies. *nothing watches*: none of them. Runs of both kinds take turns. A step's time is from before the watchers hear
that it begins until they have heard all of it, the mean of a run's steps from step {FIRST_STEP} on; evaluations and
checkpoints are left out. The times are medians over rounds, the cost is the median of the rounds' ratios. *each 500
steps*: what the comparison of copies by itself is of as many steps, the default.

"""


@dataclass(frozen=True)
class Case:
    """A model on so many processes; `flags` beside the common ones."""

    model: str
    processes: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Milliseconds: of a step, in the mean of a run, and of one comparison of copies."""

    step: float
    comparison: float


Results = dict[tuple[Case, str], list[Outcome]]


# Five hundred steps of the larger model would take too long: its copies are compared more often than by default, each
# 40 steps, which overstates the cost.
LARGE = ("--batch_size", "8", "--max_train_rows", "700", "--epochs", "1", "--check_replicas_every", "40")
CASES = [
    Case(TINY, 1, ("--batch_size", "16", "--epochs", "9")),
    Case(TINY, 2, ("--batch_size", "8", "--epochs", "9")),
    Case("DistilBERT-size", 1, LARGE),
    Case("DistilBERT-size", 2, LARGE),
]


def main() -> None:
    """Measure, and write the page after each round."""
    options = _parse()
    end_with_children()
    quiet_libraries()
    results: Results = {(case, kind): [] for case in CASES for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="observation-") as folder:
        _write_model(Path(folder) / "base")
        for number in range(options.rounds):
            for case in CASES:
                for kind in KINDS[:: 1 if number % 2 == 0 else -1]:
                    results[case, kind].append(outcome := measure(case, kind, Path(folder)))
                    print(f"round {number + 1}, {case.model}, {case.processes}, {kind}: {outcome}", flush=True)
            write_table(options.output, render(results, number + 1))
    print(f"Written: {options.output}")


def measure(case: Case, kind: str, folder: Path) -> Outcome:
    """One run, the mean over its ranks."""
    model, port = TINY if case.model == TINY else folder / "base", free_port()
    common = ["--dataset", "sample", "--model", str(model), "--device", "cpu", "--precision", "fp32"]
    common += ["--max_length", str(MAX_LENGTH), "--cache_dir", str(folder / "cache"), "--save_every", "0"]
    watched = ["--metrics_port", str(port)] if kind == "on" else []
    with tempfile.TemporaryDirectory(dir=folder) as own, _scraping(port if watched else 0, case.processes):
        flags = [kind, *common, *watched, *case.flags, "--output_dir", f"{own}/model"]
        found = run_ranks(flags, Layout(case.processes, 1), module="benchmarks.observed_rank")
    steps = [seconds for rank in found for seconds in rank["seconds"][FIRST_STEP - 1 :]]
    return Outcome(1000 * fmean(steps), 1000 * fmean(rank["comparison"] for rank in found))


@contextmanager
def _scraping(first_port: int, count: int) -> Iterator[None]:
    """Read the page of each rank now and then, as Prometheus would."""
    enough = threading.Event()

    def scrape() -> None:
        while not enough.wait(SCRAPE_SECONDS):
            for port in range(first_port, first_port + count) if first_port else ():
                with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                    page.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def render(results: Results, rounds: int) -> str:
    """The page."""
    facts = circumstances(MODULE, ("torch", "transformers", "prometheus_client")) | {
        "Runs": f"the built-in sample, one thread a process, {rounds} rounds"
    }
    rows = [row(case, results[case, "off"], results[case, "on"]) for case in CASES]
    return INTRODUCTION + fact_list(facts) + "\n" + markdown_table(HEADER, rows)


def row(case: Case, off: Sequence[Outcome], on: Sequence[Outcome]) -> list[str]:
    """A line of the table."""
    costs = [100 * (b.step / a.step - 1) for a, b in zip(off, on, strict=True)]
    step, comparison = median(run.step for run in off), median(run.comparison for run in [*off, *on])
    times = [f"{step:.2f}", f"{median(run.step for run in on):.2f}"]
    compared = [f"{comparison:.1f}", f"{100 * comparison / (500 * step):.2f}%"] if case.processes > 1 else ["–", "–"]
    return [case.model, str(case.processes), *times, f"{median(costs):+.1f}%", f"{spread(costs)}%", *compared]


def _write_model(folder: Path) -> None:
    """Random weights of DistilBERT's size with a small tokenizer."""
    news = load_news("sample")
    write_weights(folder, "base", len(news.label_names))
    load_tokenizer(TINY, news.train.texts, MAX_LENGTH).save_pretrained(folder)


def _parse() -> Namespace:
    parser = Parser(MODULE, __doc__)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--output", type=Path, default=HERE / "observation_cost.md")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
