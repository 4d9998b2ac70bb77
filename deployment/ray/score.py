"""Classify rows on a Ray cluster: python deployment/ray/score.py IN OUT --model FOLDER
--num_workers 4.

All flags that are not Ray's are those of python -m inference.score.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started by path: the imports below need the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.errors import (
    EXIT_USER_ERROR,
    ForeseenError,
    OneLineParser,
    UserError,
    positive,
    run_command,
)
from common.processes import receive_when_parent_dies
from common.ray_cluster import check_room, connect

REPOSITORY = Path(__file__).resolve().parents[2]
_ERROR = re.compile(r"error: (?P<message>.+) \[(?P<code>[a-z0-9-]+)\]")


def main() -> None:
    options, flags = _parse(sys.argv[1:])
    is_local = connect(options.address)
    if is_local:
        wanted = {"CPU": options.cpus_per_worker, "GPU": options.gpus_per_worker}
        everything = {kind: count * options.num_workers for kind, count in wanted.items() if count}
        check_room(f"--num_workers {options.num_workers}", everything)
    for path in flags[:2]:
        if not is_local and "://" not in path and not Path(path).is_absolute():
            raise UserError(
                f"{path}: give an absolute path on storage that all machines of the cluster "
                "share; a copy that starts "
                "elsewhere finds it there",
                code="folder-not-shared",
            )
    score(flags, options)


def score(flags: Sequence[str], options: argparse.Namespace) -> None:
    """Run copies of the scorer as Ray's tasks, and wait for all of them. The copies share the rows
    through OUT.

    Ray starts a lost copy again, up to ``--max_failures`` times; the others meanwhile do what it
    has left behind.

    Raises:
        UserError: the copies cannot do what was asked, for a reason that is the same for all.
        ForeseenError: all were lost once more than allowed.
    """
    import ray
    from ray.exceptions import RayError

    copy = ray.remote(_score_in_worker).options(
        name="score",
        num_cpus=options.cpus_per_worker,
        num_gpus=options.gpus_per_worker,
        # Ray repeats a task whose worker died, and with the next line one whose copy died.
        max_retries=options.max_failures,
        retry_exceptions=[ChildProcessError],
    )
    waiting = [
        copy.remote(list(flags), options.cpus_per_worker, str(Path.cwd()))
        for _ in range(options.num_workers)
    ]
    lost, is_complete = "", False
    while waiting:
        # In the order in which they end: the first one that was refused ends the command, whichever
        # it is.
        [ended], waiting = ray.wait(waiting)
        try:
            error = ray.get(ended)
        except RayError as failure:
            lost = str(failure).strip().splitlines()[-1]
            continue
        # The others would fail the same way: their rows and flags are the same.
        if error:
            raise UserError(error["message"], code=error["code"])
        is_complete = True  # a copy succeeds once the output is complete, whichever copies wrote it
    if not is_complete:
        raise ForeseenError(
            f"every copy was lost more than {options.max_failures} times ({lost}); what is "
            "finished is safe: "
            "to resume, rerun the same command",
            code="ray-score-failed",
        )


def _score_in_worker(flags: list[str], threads: int, folder: str) -> dict[str, str] | None:
    """Run one copy to its end. Returns the error of a user, which another start would only repeat.

    Raises:
        ChildProcessError: the copy was killed, or failed for a reason that may be gone next time.
    """
    copy = subprocess.Popen(
        [sys.executable, "-m", "inference.score", *flags],
        # Relative paths mean what they mean where the command was typed.
        cwd=folder if Path(folder).is_dir() else None,
        # Ray counts cores but does not pin processes, so a copy is told how many it may use.
        env=os.environ
        | {
            "THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        },
        stderr=subprocess.PIPE,
        text=True,
        # A worker that is killed takes its copy along, which would otherwise go on beside the one
        # that replaces it.
        preexec_fn=lambda: receive_when_parent_dies(signal.SIGKILL),
    )
    last = _pass_on(copy)
    code = copy.wait()
    found = _ERROR.fullmatch(last)
    if code == EXIT_USER_ERROR and found:
        return found.groupdict()
    if code:
        raise ChildProcessError(f"exit code {code}: {last}" if last else f"exit code {code}")
    return None


def _pass_on(copy: subprocess.Popen[str]) -> str:
    """Print what a copy prints until it ends; returns its last line, which is the error, if any."""
    last = ""
    for line in copy.stderr or ():
        last = line.strip() or last
        if not last.startswith("error: "):  # which the command prints itself, once for all copies
            print(line, end="", file=sys.stderr, flush=True)
    return last


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take Ray's flags out; the others are those of inference.score."""
    parser = OneLineParser(
        usage="score.py IN OUT [flags of inference.score] [flags of Ray]", description=__doc__
    )
    add = parser.add_argument
    add("--num_workers", type=positive, default=2, metavar="N", help="copies (default: 2)")
    add(
        "--cpus_per_worker",
        type=positive,
        default=1,
        metavar="N",
        help="cores that each copy uses (default: 1)",
    )
    add(
        "--gpus_per_worker", type=int, default=0, metavar="N", help="GPUs of each copy (default: 0)"
    )
    add(
        "--max_failures",
        type=int,
        default=3,
        metavar="N",
        help="times that a lost copy is started again; 0 = never, -1 = always (default: 3)",
    )
    add(
        "--address",
        help="the cluster, auto for this machine's (default: RAY_ADDRESS, else a new one)",
    )
    options, flags = parser.parse_known_args(arguments)
    if len(flags) < 2 or flags[0].startswith("-") or flags[1].startswith("-"):
        raise UserError(
            "IN and OUT come first: score.py IN OUT --model FOLDER (see --help)", code="usage"
        )
    return options, flags


if __name__ == "__main__":
    run_command(main)
