"""Data parallelism by hand against DDP, the same steps by turns: what fewer calls and overlap are worth.

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

from benchmarks.by_hand_worker import CASES, PROFILED_STEPS, Case
from benchmarks.processes import ROOT, Layout, end_with_children, run_ranks
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, ratio, spread, write_table
from common.errors import TrainingFailure, UserError, positive, run_command

MODULE = "benchmarks.by_hand"
SCRIPT = "learn/by_hand/train_cifar10.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
EPOCH = re.compile(r"epoch (?P<epoch>\d+)/\d+  loss (?P<loss>\S+)  test accuracy (?P<accuracy>\S+)%")
SILENT, BY_HAND = "no communication", "by hand"  # the ways that others are held against
ONE_CALL, ONE_BUCKET, DDP = "by hand, in one call", "DDP, one bucket", "DDP"
CLEAR = 0.8  # of the rounds
STEP_HEADER = ["a step", "calls", "ms", "rounds", "× no communication", "× by hand", "ms in calls", "of these hidden"]
STEP_HEADER += ["weights differ from DDP's"]
CIFAR_HEADER = ["ranks", "test accuracy", "loss", "wall time, min", "CPU time, min"]
INTRODUCTION = f"""# Data parallelism by hand

Written by `python -m {MODULE}`. Two processes train the same model on the same batches in five ways, by turns.
*no communication*: each rank keeps its own gradients; no training together, but the least that a step can take. *by
hand*: `average_gradients` of `learn/by_hand/data_parallel.py`, one all-reduce a tensor, after the backward pass. *in
one call*: the same, with all gradients in one vector. *DDP, one bucket*: DDP that can send nothing before the last
gradient is there. *DDP*: gradients are laid into buckets in the order in which they come. A bucket is closed once it
holds as much as its limit, and sent while the backward pass goes on; the last one cannot be, as nothing is left to
compute. *calls* says how many buckets that makes.

Times are medians over rounds, of the slower rank, with the smallest and the largest; *×* is the median of the ratio
within a round. *ms in calls*: while a collective was under way, as the profiler saw it, waiting for the other rank
included. *hidden*: the share of it in which the rank computed too. Both are medians over rounds and ranks, of steps of
their own, taken in each round right after the timed ones, from when both ranks were there. The batches are small, so
that communication is a share of a step that can be seen between two processes of one machine. The conclusions are
computed too: what holds in {CLEAR:.0%} of the rounds is called a gain or a loss.

"""


def main() -> None:
    """Measure and write the page."""
    options = _parse()
    end_with_children()
    sections = [INTRODUCTION, fact_list(_facts(options)), "\n"]
    for name, case in CASES.items():
        sections += [step_section(name, case, options), "\n"]
        write_table(options.output, "".join(sections).rstrip("\n") + "\n")
    if options.cifar10:
        sections.append(cifar10_section(options))
        write_table(options.output, "".join(sections))
    print(f"Written: {options.output}")


def step_section(name: str, case: Case, options: Namespace) -> str:
    """The table of one model, and what it says."""
    fields = json.dumps({"rounds": options.rounds, "steps": options.steps})
    # Not pinned: a rank's one core would have to be its gloo threads' too, and nothing could overlap.
    results = run_ranks([fields, name], Layout(2, 1), pin=False, module="benchmarks.by_hand_worker")
    tensors = [parameter.numel() for parameter in case.make().parameters()]
    limits = f"{case.bucket_mb} MiB" if case.bucket_mb else "1 MiB for the first bucket, 25 MiB for others"
    text = (
        f"## {len(tensors)} tensors, {4 * sum(tensors) / 1e6:.2f} MB of gradients\n\n"
        f"`{name}`, {case.rows} images a rank and step. DDP's limit: {limits}.\n\n"
        f"{markdown_table(STEP_HEADER, step_rows(results))}\n{conclusion(results)}"
    )
    print(text, flush=True)
    return text


def step_rows(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each way: times of the slower rank, profiles of both, the largest difference on either."""
    times = slower_times(results)
    rows = []
    for name, seconds in times.items():
        calls, in_calls, hidden = (profiled(results, name, field) for field in ("calls", "seconds", "hidden"))
        rows.append(
            [
                name,
                f"{calls:.0f}",
                f"{1e3 * median(seconds):.1f}",
                spread([1e3 * second for second in seconds]),
                ratio(seconds, times[SILENT]),
                ratio(seconds, times[BY_HAND]),
                f"{1e3 * in_calls:.1f}",
                f"{hidden:.0%}" if calls else "–",
                f"{max(rank[name]['gap'] for rank in results):.0e}",
            ]
        )
    return rows


def conclusion(results: Sequence[dict[str, Any]]) -> str:
    """What the rounds say of fewer calls and of overlap."""
    times = slower_times(results)
    by_hand, buckets = (profiled(results, name, "calls") for name in (BY_HAND, DDP))
    overlap = "none is possible, DDP has one bucket too."
    if buckets > 1:
        overlap = f"DDP's {buckets:.0f} buckets take {compared(times[DDP], times[ONE_BUCKET])} as one bucket."
    return (
        f"- Fewer calls: by hand, one call takes {compared(times[ONE_CALL], times[BY_HAND])} as {by_hand:.0f} calls.\n"
        f"- Overlap: {overlap}\n"
    )


def compared(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """How often one way is the faster one, and whether that is clear."""
    faster = sum(a < b for a, b in zip(ours, theirs, strict=True))
    share = faster / len(ours)
    verdict = "a gain" if share >= CLEAR else "a loss" if share <= 1 - CLEAR else "no clear gain or loss"
    return f"{ratio(ours, theirs)} times as long (faster in {faster} of {len(ours)} rounds: {verdict})"


def profiled(results: Sequence[dict[str, Any]], name: str, field: str) -> float:
    """The median of a field of the profiles of one way, over rounds and ranks."""
    return median(profile[field] for rank in results for profile in rank[name]["profiles"])


def slower_times(results: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Of each way and round, the time of the slower rank."""
    return {name: slower([rank[name]["seconds"] for rank in results]) for name in results[0]}


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
        raise TrainingFailure(f"{SCRIPT} ended with code {process.returncode}", code="benchmark-failed")
    return last.groupdict()


def _facts(options: Namespace) -> dict[str, str]:
    return circumstances(MODULE, ["torch"]) | {
        "Runs": f"2 processes of one thread, on whichever core is free; {options.rounds} rounds, a way takes "
        f"{options.steps} timed and {PROFILED_STEPS} profiled steps in each"
    }


def _parse() -> Namespace:
    parser = Parser(MODULE, __doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=15, help="default: 15")
    parser.add_argument("--steps", type=positive, default=6, help="of a way in a round (default: 6)")
    parser.add_argument("--cifar10", type=Path, help="CIFAR-10's files; unset: its table is left out")
    parser.add_argument("--output", type=Path, default=HERE / "by_hand.md", help="default: benchmarks/by_hand.md")
    options = parser.parse_args()
    if options.cifar10 and not options.cifar10.exists():
        raise UserError(f"--cifar10 {options.cifar10}: no such file or folder", code="data-not-found")
    return options


if __name__ == "__main__":
    run_command(main)
