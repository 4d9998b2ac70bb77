"""What watching costs: the time of a step that goes into all that looks on."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.processes import Layout, end_with_children, free_port, run_ranks
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, spread, write_table
from benchmarks.workload import MAX_LENGTH, write_weights
from common.errors import positive, run_command
from training.config import TINY
from training.data.dataset import load_news
from training.data.tokenized import load_tokenizer
from training.run.quiet import quiet_libraries
from training.run.subscribers import COMPARE_EVERY

MODULE = "benchmarks.observation_cost"
# How often what does not belong to a step is done: by default, and a page as Prometheus is set up to ask for it.
COMPARED_EVERY = 500  # steps
PAGE_EVERY, STATUS_EVERY = 15.0, 1.0  # seconds
FIRST_STEP = 5  # those before it pay for what happens once
HEADER = [
    "model",
    "processes",
    "step, ms",
    "hooks, ms",
    "look, ms",
    "comparison, ms",
    "page, ms",
    "status, ms",
    "all together",
]
INTRODUCTION = f"""# What watching costs

Written by `python -m {MODULE}`. All that can watch does: metrics, events, metrics.jsonl and TensorBoard, status file,
watchdog, loss spikes, and of two processes stragglers, collectives and the comparison of copies.

- *step*: from before its rows are read until all subscribers have received its last event; the mean from step
  {FIRST_STEP} on.
- *hooks*: of that, the time inside the subscribers; where they talk to other ranks with the wait for them.
- *look*: what a step whose collectives are recorded takes longer outside of them, between medians; one step in
  {COMPARE_EVERY} is.
- *comparison* of copies, counted once in {COMPARED_EVERY} steps; a *page* of metrics, each {PAGE_EVERY:.0f} s; the
  *status* file, each {STATUS_EVERY:.0f} s: timed by themselves, in the median of several times.
- *all together*: the share of a step that nobody would watch; its median over rounds, with the least and the most.

"""


@dataclass(frozen=True)
class Case:
    """A model on so many processes; `flags` beside the common ones."""

    model: str
    processes: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Milliseconds, as in the table."""

    step: float
    hooks: float
    look: float
    comparison: float
    page: float
    status: float

    @property
    def cost(self) -> float:
        """Of all that watches, as a share of a step that nobody would watch."""
        at_steps = self.hooks + self.look / COMPARE_EVERY
        by_time = (self.page / PAGE_EVERY + self.status / STATUS_EVERY) / 1000
        return (at_steps + self.comparison / COMPARED_EVERY) / (self.step - at_steps) + by_time


CASES = [
    Case(TINY, 1, ("--batch_size", "16", "--epochs", "3")),
    Case(TINY, 2, ("--batch_size", "8", "--epochs", "3")),
    Case("DistilBERT-size", 1, ("--batch_size", "8", "--epochs", "1", "--max_train_rows", "270")),
    Case("DistilBERT-size", 2, ("--batch_size", "4", "--epochs", "1", "--max_train_rows", "270")),
]


def main() -> None:
    """Measure, and write the page."""
    options = _parse()
    end_with_children()
    quiet_libraries()
    rounds: list[list[Outcome]] = []
    with tempfile.TemporaryDirectory(prefix="observation-") as folder:
        _write_model(Path(folder) / "base")
        for number in range(1, options.rounds + 1):
            rounds.append([measure(case, Path(folder)) for case in CASES])
            print(f"round {number}/{options.rounds}: " + ", ".join(f"{one.cost:.2%}" for one in rounds[-1]), flush=True)
    rows = [row(case, found) for case, found in zip(CASES, zip(*rounds, strict=True), strict=True)]
    facts = circumstances(MODULE, ("torch", "transformers", "prometheus_client"))
    facts |= {"Runs": f"the built-in sample, one thread per process, {options.rounds} rounds"}
    write_table(options.output, INTRODUCTION + fact_list(facts) + "\n" + markdown_table(HEADER, rows))
    print(f"Written: {options.output}")


def measure(case: Case, folder: Path) -> Outcome:
    """One run, the mean over its ranks."""
    model = TINY if case.model == TINY else folder / "base"
    flags = ["--dataset", "sample", "--model", str(model), "--device", "cpu", "--precision", "fp32"]
    flags += ["--save_every", "0", "--max_length", str(MAX_LENGTH), "--cache_dir", str(folder / "cache")]
    flags += ["--check_replicas_every", "0", "--metrics_port", str(free_port())]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        flags += [*case.flags, "--output_dir", f"{own}/model"]
        found = run_ranks(flags, Layout(case.processes, 1), module="benchmarks.observed_rank")
    outcomes = [outcome(rank, alone=case.processes == 1) for rank in found]
    return Outcome(*(fmean(values) for values in zip(*map(astuple, outcomes), strict=True)))


def outcome(rank: dict[str, Any], *, alone: bool) -> Outcome:
    """What one rank found."""
    steps = list(zip(rank["seconds"], rank["watching"], strict=True))
    looked = [step - watching for step, watching in steps[COMPARE_EVERY - 1 :: COMPARE_EVERY]]
    others = [step - watching for i, (step, watching) in enumerate(steps, start=1) if i % COMPARE_EVERY]
    look = 0.0 if alone else median(looked) - median(others)
    measured = steps[FIRST_STEP - 1 :]
    seconds = (
        fmean(step for step, _ in measured),
        fmean(watching for _, watching in measured),
        look,
        0.0 if alone else rank["comparison"],
        rank["page"],
        rank["status"],
    )
    return Outcome(*(1000 * value for value in seconds))


def row(case: Case, rounds: Sequence[Outcome]) -> list[str]:
    """A line of the table: medians over rounds, and of the whole cost also the least and the most."""
    found = Outcome(*(median(values) for values in zip(*map(astuple, rounds), strict=True)))
    costs = [100 * one.cost for one in rounds]
    of_two = [f"{found.look:.2f}", f"{found.comparison:.2f}"] if case.processes > 1 else ["–", "–"]
    times = [f"{found.step:.1f}", f"{found.hooks:.2f}", *of_two, f"{found.page:.2f}", f"{found.status:.2f}"]
    return [case.model, str(case.processes), *times, f"{median(costs):.2f}% ({spread(costs, 2)})"]


def _write_model(folder: Path) -> None:
    """Random weights of DistilBERT's size with a small tokenizer."""
    news = load_news("sample")
    write_weights(folder, "base", len(news.label_names))
    load_tokenizer(TINY, news.train.texts, MAX_LENGTH).save_pretrained(folder)


def _parse() -> Namespace:
    parser = Parser(MODULE, __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument("--output", type=Path, default=HERE / "observation_cost.md")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
