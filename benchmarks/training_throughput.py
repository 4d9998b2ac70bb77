"""How fast does training run on this machine, compared with the usual training loops?

Writes a page of tables, and next to it the rounds as JSON, from which the page is written after
every round: sizes and datasets measured earlier stay on it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import harness, training_on_gpu
from benchmarks.processes import Layout, last_line, run_ranks
from benchmarks.variants import VARIANTS, epoch_rank, matmul_rank
from benchmarks.workload import GLOBAL_BATCH, MAX_LENGTH, SIZES, VOCABULARY, Workload, make_workload
from common.errors import TrainingFailure, positive
from training.data.dataset import SAMPLE
from training.facts import TINY
from training.model.precision import cpu_has_bf16
from training.monitoring.events import METRICS_FILE
from training.tasks import CausalLanguageModel, Classification, MultiLabelClassification

MODULE = "benchmarks.training_throughput"
MATMUL = "matmul-"
STARTUP = "start-up"
STARTUP_COMMAND = (
    "torchrun --standalone --nproc_per_node=2 training/train_ddp.py --model tiny --dataset sample"
)
STARTUP_TIMEOUT = 600  # seconds
TITLES = {"minilm": "MiniLM", "base": "Base"}
# On the first layout only our own variants run, for comparison with the second.
SCALED = {"1x1": "2x1"}
DEFAULT_VARIANTS = [
    "plain",
    "trainer",
    "trainer-grouped",
    "ours",
    "trainer-grouped-bf16",
    "ours-bf16",
]
LANGUAGE_MODEL_VARIANTS = ["trainer", "trainer-grouped", "trainer-packed", "ours", "ours-bf16"]
LANGUAGE_MODEL = f"""Here a sample is a text. A batch has {GLOBAL_BATCH} texts or, if texts are joined, about the same
number of tokens in blocks of {MAX_LENGTH}. The head over {VOCABULARY:,} tokens counts as work.

"""
INTRODUCTION = f"""
The rounds are in the JSON file next to this page. Every variant trains on the same rows from the same random weights of
the same DistilBERT (dropout 0.1), with a global batch of {GLOBAL_BATCH}, in fp32 unless its name says bf16, with fused
AdamW, a peak learning rate of 2e-5 and gradients clipped to a norm of 1. Texts are tokenized before the clock starts
and cut at {MAX_LENGTH} tokens. A round times one whole epoch of every variant, from before its first batch is assembled
to the end of its last step, after a few steps on other rows with a throwaway copy of the model; nothing is evaluated,
logged to files or saved. Each process has its own cores.

- *samples/s*: the median of the rounds, with the smallest and the largest next to it. *×*: the median of the ratios
  within a round, compared with the variant in the column's header at the same processes × threads. *× best Trainer*:
  with the fastest `transformers.Trainer` of the same precision in that round.
- *padding*: the share of the computed tokens that are padding.
- *GFLOP/s, nominal*: matrix products of the blocks, forward and backward, for the real tokens with every block in full,
  although ours computes the last block only for the first token. *GFLOP/s, done*: the products that are actually
  computed, with padding and without what ours leaves out. In brackets is the share of this machine's matrix rate in
  that precision, which is the best `torch.mm` of 2048 × 2048 matrices, in all processes at once, measured in the same
  run. If the nominal share is above the other one, this is because work is saved, not because the machine is faster.
  Embeddings, head, normalization, dropout and the optimizer count as no work, but take time.
- `transformers.Trainer` runs at its defaults except for what is named here; its progress bar and log are off, and
  `average_tokens_across_devices=False` is set, because otherwise it multiplies a classifier's gradients by the number
  of ranks.
- `torch_compile` compiles in the steps before the clock starts; a length that is new in the epoch may compile again
  there.
- *loss*: the mean over the epoch, to check that all variants train alike.
"""


def main() -> None:
    options = _parse()
    facts = harness.measurement_facts(MODULE, (*harness.PACKAGES, "accelerate"))
    if options.startup:
        seconds = measure_startup(options.rounds)
        put(options.output, STARTUP, {"facts": facts, "seconds": seconds})
        return
    if options.device == "gpu":
        for section in training_on_gpu.measure(options, facts):
            put(options.output, training_on_gpu.SECTION, section)
        return
    layouts = {text: Layout.parse(text) for text in options.layouts}
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        workload = make_workload(
            Path(folder),
            options.size,
            options.dataset,
            options.tokenizer,
            options.rows,
            options.task,
        )

        def measure(job: tuple[str, str], number: int) -> dict[str, Any]:
            variant, layout = job
            if variant.startswith(MATMUL):
                ranks = run_ranks(
                    matmul_rank, layouts[layout], precision=variant.removeprefix(MATMUL)
                )
                return {"flops": sum(rank["flops"] for rank in ranks)}
            return join_ranks(
                run_ranks(epoch_rank, layouts[layout], folder=folder, variant=variant),
                len(workload.timed),
            )

        section = new_section(facts, workload, options)
        jobs = {
            f"{variant} {layout}": (variant, layout)
            for variant, layout in plan(options.variants, options.layouts)
        }
        for found in harness.run_rounds(jobs, options.rounds, measure, describe):
            section["rounds"].append(found)
            task = "" if options.task == Classification.name else f", {options.task}"
            # Processors are as different as sizes are: each kind has a section.
            name = f"{options.size}, {workload.dataset}{task}, {section['processor']}"
            put(options.output, name, section)


def plan(variants: Sequence[str], layouts: Sequence[str]) -> list[tuple[str, str]]:
    """What runs in a round, as (variant, layout), and which matrix rates are measured with it."""
    jobs = []
    for layout in layouts:
        # A layout that only shows how ours scales leaves out the others.
        only_ours = SCALED.get(layout) in layouts
        chosen = [name for name in variants if VARIANTS[name].is_ours or not only_ours]
        # The machine's matrix rate is measured in every round, right before the variants whose
        # share of it is shown: on another day or beside other work it is another one.
        precisions = dict.fromkeys(VARIANTS[name].precision for name in chosen)
        jobs += [(f"{MATMUL}{precision}", layout) for precision in precisions]
        jobs += [(name, layout) for name in chosen]
    return jobs


def join_ranks(ranks: Sequence[dict[str, Any]], rows: int) -> dict[str, Any]:
    """One measurement from those of its ranks: the slowest rank's time, the sum of their work."""
    seconds = max(rank["seconds"] for rank in ranks)
    return {
        "seconds": seconds,
        "samples_per_second": rows / seconds,
        "cells": sum(rank["cells"] for rank in ranks),
        "squares": sum(rank["squares"] for rank in ranks),
        "loss": sum(rank["loss"] for rank in ranks) / len(ranks),
        "threads": ranks[0]["threads"],
    }


def describe(result: dict[str, Any]) -> str:
    if "flops" in result:
        return f"{result['flops'] / 1e9:.0f} GFLOP/s"
    return f"{result['samples_per_second']:.1f} samples/s"


def measure_startup(rounds: int) -> list[float]:
    """Seconds from the launcher's start to the first optimizer step, with tokens in the cache."""
    with tempfile.TemporaryDirectory(prefix="startup-", ignore_cleanup_errors=True) as folder:
        # The first start tokenizes the data and brings the libraries into the page cache. Later
        # starts have both, as a user's have, so this one is not counted.
        _first_step(Path(folder), "warm-up")
        seconds = []
        for number in range(1, rounds + 1):
            seconds.append(_first_step(Path(folder), str(number)))
            harness.report(f"start-up {number}/{rounds}: {seconds[-1]:.1f} s")
    return seconds


def _first_step(folder: Path, name: str) -> float:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *STARTUP_COMMAND.removeprefix("torchrun ").split(),
    ]
    command += ["--cache_dir", str(folder / "cache"), "--output_dir", str(folder / name)]
    metrics = folder / f"{name}.run" / METRICS_FILE
    with (folder / f"{name}.log").open("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=harness.ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            # The first line of metrics.jsonl is written right after the first optimizer step.
            # Only the size of a file is looked at, in short pauses: to read the log would take time
            # from the cores that are measured.
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None or time.perf_counter() - started > STARTUP_TIMEOUT:
                    message = f"{STARTUP_COMMAND}: ended before its first step ({last_line(log)})"
                    raise TrainingFailure(message, code="benchmark-failed")
                time.sleep(0.005)
            return time.perf_counter() - started
        finally:
            # The ranks finish their step, save and leave.
            process.send_signal(signal.SIGTERM)
            process.wait()


def new_section(facts: dict[str, str], workload: Workload, options: Namespace) -> dict[str, Any]:
    """What the page needs to know about a workload, with no rounds yet."""
    return {
        "facts": facts,
        "size": workload.size,
        "dataset": workload.dataset,
        "task": workload.task,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "rows": len(workload.timed),
        "tokens": int(workload.timed.lengths.sum()),
        "nominal_work": workload.nominal_work,
        "layouts": options.layouts,
        "variants": options.variants,
        "rounds": [],
    }


def put(path: Path, name: str, section: dict[str, Any]) -> None:
    """Replace the section of that name, and write the page from all of them."""
    results = harness.read_results(path.with_suffix(".json")) | {name: section}
    harness.write_page(path, page(results), results)


def page(results: dict[str, Any]) -> str:
    """The sections on CPUs, then GPUs, which may not have been measured, then start-up."""
    results = {training_on_gpu.SECTION: {}} | results
    names = sorted(
        results, key=lambda name: (name == STARTUP, name == training_on_gpu.SECTION, name)
    )
    text = harness.introduction(MODULE, "Training throughput", INTRODUCTION)
    return text + "\n".join(render(results[name]) for name in names)


def render(section: dict[str, Any]) -> str:
    """A section of the page."""
    if not section or "peak" in section:
        return training_on_gpu.render(section)
    if "seconds" in section:
        seconds = section["seconds"]
        row = [
            f"`{STARTUP_COMMAND}`",
            f"{median(seconds):.1f}",
            harness.spread(seconds),
            str(len(seconds)),
        ]
        note = (
            "This is the wall time from starting the launcher to the first step's line in "
            "`metrics.jsonl`, with the "
            "tokens already cached.\n"
        )
        header = ["command", "seconds to the first optimizer step", "range", "rounds"]
        return (
            "## "
            f"Start-up\n\n{harness.fact_list(section['facts'])}\n{note}\n{harness.markdown_table(header, [row])}"
        )
    rounds, blocks = section["rounds"], SIZES[section["size"]]
    family, width, note = "DistilBERT", blocks.hidden_dim, ""
    if section.get("task") == CausalLanguageModel.name:
        # Llama's feed-forward has three matrices; `write_language_model` says why they are
        # narrower.
        family, width, note = "Llama", blocks.hidden_dim * 2 // 3, LANGUAGE_MODEL
    jobs = [(name, layout) for layout in section["layouts"] for name in section["variants"]]
    facts = section["facts"] | {
        "Model": f"{family}, {blocks.n_layers} blocks of {blocks.dim} ({width}), {blocks.n_heads} heads",
        "Rows": f"{section['rows']:,} of {section['tokens'] / section['rows']:.1f} tokens each on average",
        "Rounds": str(len(rounds)),
    }
    # Sections that were measured before there were tasks name none.
    task = section.get("task", Classification.name)
    task = "" if task == Classification.name else f", {task}"
    processor = f", {section['processor']}" if "processor" in section else ""
    return (
        f"## {TITLES[section['size']]} size, "
        f"{section['dataset']}{task}{processor}\n\n{harness.fact_list(facts)}\n{note}"
        f"{harness.table(_columns(section), [job for job in jobs if ' '.join(job) in rounds[0]])}"
        f"{_matrix_rates(section)}{_scaling(section)}"
    )


def _columns(section: dict[str, Any]) -> dict[str, Callable[[tuple[str, str]], str]]:
    def values(job: tuple[str, str], field: str) -> list[float]:
        return [
            found[" ".join(job)][field] for found in section["rounds"] if " ".join(job) in found
        ]

    def rates(job: tuple[str, str]) -> list[float]:
        return values(job, "samples_per_second")

    def against(variant: str) -> Callable[[tuple[str, str]], str]:
        def cell(job: tuple[str, str]) -> str:
            theirs = rates((variant, job[1]))
            return f"{harness.median_ratio(rates(job), theirs):.2f}" if theirs else harness.NONE

        return cell

    def against_best(job: tuple[str, str]) -> str:
        """Compared with the fastest Trainer of the same precision in each round."""
        ours, layout = VARIANTS[job[0]], job[1]
        peers = [
            rates((name, layout))
            for name in section["variants"]
            if name.startswith("trainer") and VARIANTS[name].precision == ours.precision
        ]
        peers = [found for found in peers if found]
        if not (ours.is_ours and peers):
            return harness.NONE
        best = [max(of_round) for of_round in zip(*peers, strict=True)]
        return f"{harness.median_ratio(rates(job), best):.2f}"

    def share_of_peak(job: tuple[str, str], work: float) -> str:
        rate = work / median(values(job, "seconds"))
        return f"{rate / 1e9:.0f} ({rate / _peak(section, VARIANTS[job[0]].precision, job[1]):.0%})"

    def work_done(job: tuple[str, str]) -> float:
        # Ours computes the last block only for the first token of each row, so its number of rows
        # counts.
        cells, squares = (int(median(values(job, field))) for field in ("cells", "squares"))
        if is_language_model:
            return SIZES[section["size"]].training_work(cells, squares, vocabulary=VOCABULARY)
        return SIZES[section["size"]].training_work(
            cells, squares, section["rows"] if VARIANTS[job[0]].is_ours else 0
        )

    is_language_model = section.get("task") == CausalLanguageModel.name
    packed = {"× Trainer, joined": against("trainer-packed")} if is_language_model else {}
    return {
        "variant": lambda job: VARIANTS[job[0]].title,
        "processes × threads": lambda job: job[1].replace("x", " × "),
        "samples/s": lambda job: f"{median(rates(job)):.1f}",
        "range": lambda job: harness.spread(rates(job)),
        "× plain": against("plain"),
        "× Trainer": against("trainer"),
        "× Trainer, length grouping": against("trainer-grouped"),
        **packed,
        "× best Trainer": against_best,
        "padding": lambda job: f"{1 - section['tokens'] / median(values(job, 'cells')):.1%}",
        "GFLOP/s, nominal": lambda job: share_of_peak(job, section["nominal_work"]),
        "GFLOP/s, done": lambda job: share_of_peak(job, work_done(job)),
        "loss": lambda job: f"{median(values(job, 'loss')):.3f}",
    }


def _peak(section: dict[str, Any], precision: str, layout: str) -> float:
    # The best of all rounds: what the machine can do, not what disturbed it in one of them.
    return max(found[f"{MATMUL}{precision} {layout}"]["flops"] for found in section["rounds"])


def _matrix_rates(section: dict[str, Any]) -> str:
    rates = []
    for key in sorted(key for key in section["rounds"][0] if key.startswith(MATMUL)):
        precision, layout = key.removeprefix(MATMUL).split()
        rates.append(
            f"{precision} {layout.replace('x', ' × ')}: "
            f"{_peak(section, precision, layout) / 1e9:.0f}"
        )
    return f"\nMatrix rates of this machine, GFLOP/s: {'; '.join(rates)}.\n"


def _scaling(section: dict[str, Any]) -> str:
    lines = []
    for one_core, two_cores in SCALED.items():
        for name in section["variants"]:
            keys = f"{name} {one_core}", f"{name} {two_cores}"
            if not all(key in section["rounds"][0] for key in keys):
                continue
            one, two = (
                [found[key]["samples_per_second"] for found in section["rounds"]] for key in keys
            )
            # Within a round: both layouts then ran on a machine of the same speed.
            shares = [100 * b / (2 * a) for a, b in zip(one, two, strict=True)]
            title = VARIANTS[name].title.replace("*", "")
            lines.append(
                f"\nScaling of {title}: two pinned cores with one process each train at "
                f"{median(shares):.0f}% of twice "
                f"the speed of one pinned core (rounds: {harness.spread(shares, 0)}%).\n"
            )
    return "".join(lines)


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__, page="training_throughput.md", rounds=5)
    add = parser.add_argument
    add(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="gpu: fill that section (default: cpu)",
    )
    add("--size", choices=SIZES, default="minilm", help="of the model (default: minilm)")
    add(
        "--dataset",
        default=SAMPLE,
        help="a folder in AG News' layout (default: the built-in sample)",
    )
    add(
        "--task",
        choices=(Classification.name, MultiLabelClassification.name, CausalLanguageModel.name),
        default=Classification.name,
        help="with multi_label, each row has its one label; with causal_lm its text alone "
        "(default: classification)",
    )
    add("--rows", type=positive, default=1600, help="of the timed epoch (default: 1600)")
    add(
        "--tokenizer",
        default=TINY,
        help="a folder or tokenizer.json; default: one trained on the rows",
    )
    add(
        "--layouts",
        nargs="+",
        default=["2x1", "1x2", "1x1"],
        metavar="PxT",
        help="default: %(default)s",
    )
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        help="default: all but trainer-rebalanced and those that compile, which takes minutes per "
        "round; bf16 if the CPU has it",
    )
    add("--startup", action="store_true", help="measure only the time to the first step")
    options = parser.parse_args()
    chosen = (
        LANGUAGE_MODEL_VARIANTS if options.task == CausalLanguageModel.name else DEFAULT_VARIANTS
    )
    default = [name for name in chosen if VARIANTS[name].precision != "bf16" or cpu_has_bf16()]
    options.variants = options.variants or default
    return options


if __name__ == "__main__":
    harness.run_benchmark(main)
