"""Data parallelism by hand against DDP, the same steps by turns: what buckets and overlap are worth.

With ``--cifar10``, also what one and two ranks learn of CIFAR-10.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.processes import ROOT, Layout, end_with_children, run_ranks
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, ratio, spread, write_table
from training.by_hand.cnn import CNN
from training.errors import TrainingFailure, positive, run_command

MODULE = "benchmarks.by_hand"
SCRIPT = "training/by_hand/train_cifar10.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
EPOCH = re.compile(r"epoch (?P<epoch>\d+)/\d+  loss (?P<loss>\S+)  test accuracy (?P<accuracy>\S+)%")
SILENT, BY_HAND = "no communication", "by hand"  # the ways that others are held against
STEP_HEADER = ["a step", "calls", "ms", "rounds", "× no communication", "× by hand", "ms in calls", "of these hidden"]
STEP_HEADER += ["weights differ from DDP's"]
CIFAR_HEADER = ["ranks", "test accuracy", "loss", "wall time, min", "CPU time, min"]
INTRODUCTION = f"""# Data parallelism by hand

Written by `python -m {MODULE}`. Two processes train the same CNN (`training/by_hand/cnn.py`) on the same batches in
five ways, by turns. *no communication*: each rank keeps its own gradients; no training together, but the least that a
step can take. *by hand*: `average_gradients` of `training/by_hand/data_parallel.py`, one all-reduce a tensor, after
the backward pass. *in one call*: the same, with all gradients in one vector. *DDP, one bucket*: DDP that can send
nothing before the last gradient is there. *DDP*: as it comes, a bucket of 1 MB and then of 25 MB, each sent while the
backward pass goes on. *ms in calls*: while a collective was under way, as the profiler saw it, waiting for the other
rank included. *hidden*: the share of it in which the rank computed too. Times are medians over rounds, of the slower
rank, with the smallest and the largest; *×* is the median of the ratio within a round. The batches are small, so that
communication is a share of a step that can be seen between two processes of one machine.

"""


def main() -> None:
    """Measure and write the page."""
    options = _parse()
    end_with_children()
    sections = [INTRODUCTION, fact_list(_facts(options)), "\n"]
    for width in options.widths:
        sections += [step_section(width, options), "\n"]
        write_table(options.output, "".join(sections).rstrip("\n") + "\n")
    if options.cifar10:
        sections.append(cifar10_section(options))
        write_table(options.output, "".join(sections))
    print(f"Written: {options.output}")


def step_section(width: int, options: Namespace) -> str:
    """The table of one size of the model."""
    fields = {"width": width, "rows": options.rows, "rounds": options.rounds, "steps": options.steps}
    results = run_ranks([json.dumps(fields)], Layout(2, 1), module="benchmarks.by_hand_worker")
    tensors = [parameter.numel() for parameter in CNN(width=width).parameters()]
    title = f"## {len(tensors)} tensors, {4 * sum(tensors) / 1e6:.2f} MB of gradients\n\n"
    text = title + f"`CNN(width={width})`.\n\n" + markdown_table(STEP_HEADER, step_rows(results))
    print(text, flush=True)
    return text


def step_rows(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each way: times of the slower rank, the profile of rank 0, the largest difference on either."""
    times = {name: slower([rank[name]["seconds"] for rank in results]) for name in results[0]}
    rows = []
    for name, seconds in times.items():
        profile = results[0][name]["profile"]
        rows.append(
            [
                name,
                f"{profile['calls']:.0f}",
                f"{1e3 * median(seconds):.1f}",
                spread([1e3 * second for second in seconds]),
                ratio(seconds, times[SILENT]),
                ratio(seconds, times[BY_HAND]),
                f"{1e3 * profile['seconds']:.1f}",
                f"{profile['hidden']:.0%}" if profile["calls"] else "–",
                f"{max(rank[name]['gap'] for rank in results):.0e}",
            ]
        )
    return rows


def slower(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Of each round, the time of the slower rank."""
    return [max(of_round) for of_round in zip(*seconds, strict=True)]


def cifar10_section(options: Namespace) -> str:
    """The table of what one and two ranks learn."""
    rows = []
    for ranks in (1, 2):
        command = [*TORCHRUN, f"--nproc_per_node={ranks}", SCRIPT, "--data", str(options.cifar10.resolve())]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        last = run_and_follow(command)
        minutes = (time.monotonic() - began) / 60
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 60
        rows.append([str(ranks), f"{last['accuracy']}%", last["loss"], f"{minutes:.1f}", f"{cpu:.1f}"])
    shown = f"`torchrun --standalone --nproc_per_node=RANKS {SCRIPT} --data {options.cifar10.name}`"
    return (
        f"## CIFAR-10\n\n{shown}, {last['epoch']} epochs; all 10,000 test images count once.\n\n"
        f"{markdown_table(CIFAR_HEADER, rows)}"
    )


def run_and_follow(command: Sequence[str]) -> dict[str, str]:
    """Run a training, show its lines as they come, and return what the last epoch's says.

    Raises:
        TrainingFailure: it failed, or printed no epoch.
    """
    last = None
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                last = EPOCH.match(line) or last
        except BaseException:
            process.terminate()
            raise
    if process.returncode or last is None:
        raise TrainingFailure(f"{SCRIPT} ended with code {process.returncode}")
    return last.groupdict()


def _facts(options: Namespace) -> dict[str, str]:
    return circumstances(MODULE, ["torch"]) | {
        "Runs": f"2 processes of one core, {options.rows} images a rank and step, {options.rounds} rounds of "
        f"{options.steps} steps a way"
    }


def _parse() -> Namespace:
    parser = Parser(MODULE, __doc__.splitlines()[0])
    parser.add_argument("--widths", nargs="+", type=positive, default=[32, 256], help="of the CNN (default: 32 256)")
    parser.add_argument("--rows", type=positive, default=4, help="images a rank and step (default: 4)")
    parser.add_argument("--rounds", type=positive, default=15, help="default: 15")
    parser.add_argument("--steps", type=positive, default=6, help="of a way in a round (default: 6)")
    parser.add_argument("--cifar10", type=Path, help="CIFAR-10's files; unset: its table is left out")
    parser.add_argument("--output", type=Path, default=HERE / "by_hand.md", help="default: benchmarks/by_hand.md")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
