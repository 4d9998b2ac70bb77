"""Check your solution of a lesson on real ranks: python -m learn.check LESSON my_solution.py."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.errors import OneLineParser, UserError, positive, run_command
from learn.checking.finding import MAX_RANKS, NOT_WRITTEN
from learn.checking.solution import compile_solution
from learn.lessons import LESSONS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.text import Text

    from learn.checking.verdict import Verdict

MAX_LINES = 5  # of what a rank printed
HEAD = 7  # columns of "wrong  ": what belongs to it is indented by as much
# What you have built once all functions of a lesson are right.
ENDS = {
    "ring": "Libraries such as gloo and NCCL have rings like yours for large tensors.",
    "data_parallel": "This is data parallelism. DDP does the same thing, only faster.",
    "rows": "Training sees the same batches on any number of ranks now, and no test row counts twice.",
    "buckets": "This is what DDP adds to data parallelism: few calls, hidden behind the backward pass.",
    "zero1": "This is ZeRO stage 1: plain Adam's weights with 1/N of its moments per rank. FSDP also shards the rest.",
    "tensor_parallel": "This is tensor parallelism as in Megatron-LM: two all-reduces per pair of layers.",
    "pipeline": "This is a pipeline in the order that Megatron-LM and torch.distributed.pipelining call 1F1B.",
}


def main() -> int:
    parser = OneLineParser(prog="python -m learn.check", description=__doc__)
    parser.add_argument("lesson", choices=LESSONS, metavar="LESSON", help=", ".join(LESSONS))
    yours = "your copy of learn/lessons/LESSON.py"
    parser.add_argument("solution", type=Path, metavar="FILE", help=yours)
    parser.add_argument(
        "--workers",
        type=positive,
        default=2,
        metavar="N",
        help=(
            "ranks to check on; one more is tried too, so that the number cannot be hard-coded "
            "(default: 2)"
        ),
    )
    options = parser.parse_args()
    if not 2 <= options.workers < MAX_RANKS:
        problem = f"must be 2 to {MAX_RANKS - 1}"
        raise UserError(f"--workers {options.workers}: {problem}", code="flag-value")
    compile_solution(options.solution)
    world_sizes = (options.workers, options.workers + 1)

    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    # In a terminal lines break between words; in a file or a pipe each stays whole.
    console.soft_wrap = not console.is_terminal
    sizes = " and ".join(map(str, world_sizes))
    how = f"each function is called on {sizes} ranks, in separate processes"
    console.print(f"{options.solution}: {how}\n")
    # Imported here because they import PyTorch, which takes seconds: --help, a wrong flag and a
    # file that is not there need not wait for it.
    with console.status("loading PyTorch ..."):
        from learn.checking.exercises import EXERCISES, functions_of
        from learn.checking.verdict import check_function

    verdicts = []
    for name in functions_of(options.lesson):
        with console.status(f"{name} ...") as status:
            show = partial(_show_progress, status, name)
            verdicts.append(check_function(options.solution, name, world_sizes, show=show))
        for line in describe(verdicts[-1], EXERCISES[name].promise).split(include_separator=False):
            console.print(hanging(line, console))
    num_right = sum(verdict.finding is None for verdict in verdicts)
    all_right = num_right == len(verdicts)
    end = f". {ENDS[options.lesson]}" if all_right else ""
    console.print(f"{num_right} of {len(verdicts)} right{end}")
    return 0 if all_right else 1


def _show_progress(status: Status, name: str, progress: str) -> None:
    status.update(f"{name}: {progress}")


def hanging(line: Text, console: Console) -> Text:
    """A line of a verdict, broken between words; what follows stands below its first word."""
    if not console.is_terminal:
        return line
    from rich.text import Text

    parts = line[HEAD:].wrap(console, max(1, console.width - HEAD))
    return Text.assemble(line[:HEAD], Text("\n" + " " * HEAD).join(parts))


def describe(verdict: Verdict, promise: str) -> Text:
    """A verdict as it is printed; if the function is right, a line says what it guarantees."""
    from rich.text import Text

    finding, name = verdict.finding, (verdict.name, "bold")
    if finding is None:
        return Text.assemble(("right  ", "bold green"), name, f": {promise}\n")
    if finding == NOT_WRITTEN:
        left = f": {finding.problem}; {finding.hint}\n"
        return Text.assemble(("to do  ", "bold yellow"), name, left)
    where = f", on {verdict.world_size} ranks: "
    text = Text.assemble(("wrong  ", "bold red"), name, where)
    text.append(f"{finding.problem}\n", "red")
    for line in finding.detail.splitlines():
        text.append(f"       {line}\n")
    text.append(f"       hint: {finding.hint}\n", "cyan")
    for rank, printed in verdict.printed.items():
        lines = printed.splitlines()
        for line in lines[:MAX_LINES]:
            text.append(f"       rank {rank} printed: {line}\n", "dim")
        if len(lines) > MAX_LINES:
            text.append(f"       rank {rank} printed more\n", "dim")
    return text


if __name__ == "__main__":
    run_command(main)
