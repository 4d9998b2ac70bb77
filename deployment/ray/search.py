"""Search for better hyperparameters on a Ray cluster: python deployment/ray/search.py SPACE.yaml
[--address ADDRESS].

The same search as python -m training.search, except that Ray places each trial on a machine that
has room for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # started by path: the imports below need the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.errors import OneLineParser, UserError, positive, run_command
from common.ray_cluster import check_room, connect
from training.search.processes import start_process
from training.search.space import read_space
from training.search.trials import search


def main() -> int:
    parser = OneLineParser(prog="search.py", description=__doc__)
    add = parser.add_argument
    add("space", metavar="SPACE.yaml", type=Path, help="as for python -m training.search")
    add(
        "--cpus_per_process",
        type=positive,
        default=1,
        metavar="N",
        help="cores set aside for each rank (default: 1)",
    )
    add(
        "--max_failures",
        type=int,
        default=3,
        metavar="N",
        help="times that a trial whose machine is lost is resumed on another one (default: 3)",
    )
    add(
        "--address",
        help="the cluster, auto for this machine's (default: RAY_ADDRESS, else a new one)",
    )
    options = parser.parse_args()
    space = read_space(options.space)
    is_local = connect(options.address)
    import ray

    # Of a whole trial: Ray gives a machine to it only if all its ranks fit there.
    for_each = {"CPU": options.cpus_per_process * space.processes}
    if space.config.get("device") != "cpu" and ray.cluster_resources().get("GPU"):
        for_each["GPU"] = space.processes
    # This machine never grows, so what does not fit at once would wait for ever; a cluster may
    # grow.
    if is_local:
        check_room(
            f"at_once {space.at_once}",
            {kind: count * space.at_once for kind, count in for_each.items()},
        )
    elif not space.output_dir.is_absolute():
        raise UserError(
            f"output_dir {space.output_dir}: give an absolute path on storage that all machines of "
            "the cluster share; "
            "the trials write there, and the search reads their figures",
            code="folder-not-shared",
        )

    def start(slot: int, command: Sequence[str], log: Path) -> RemoteRun:
        return RemoteRun(command, log, for_each, options.max_failures)

    return search(space, start)


class RemoteRun:
    """A trial's run on whichever machine Ray has chosen; on another one if that is lost.

    The new process resumes from the newest checkpoint, as every run does that is started again.
    """

    def __init__(
        self, command: Sequence[str], log: Path, for_each: Mapping[str, float], max_failures: int
    ) -> None:
        self._arguments = (list(command), log, str(Path.cwd()))
        self._for_each, self._failures_left = for_each, max_failures
        self._is_terminated = False
        self._place()

    def poll(self) -> int | None:
        import ray
        from ray.exceptions import RayActorError

        # The search asks in a loop, so this must not block: an answer is only taken once it is
        # there, and the next question is sent only then.
        if self._code is not None or not ray.wait([self._answer], timeout=0)[0]:
            return self._code
        try:
            self._code = ray.get(self._answer)
        except RayActorError:
            self._failures_left -= 1
            # A trial that the search has ended is not resumed because its machine went at the same
            # time.
            if self._failures_left < 0 or self._is_terminated:
                self._code = 1
                return self._code
            self._place()
            return None
        if self._code is None:
            self._answer = self._actor.poll.remote()
        else:
            ray.kill(self._actor)  # frees its cores and GPUs
        return self._code

    def terminate(self) -> None:
        self._is_terminated = True
        self._actor.terminate.remote()

    def _place(self) -> None:
        import ray

        resources = {"num_cpus": self._for_each["CPU"], "num_gpus": self._for_each.get("GPU", 0)}
        self._actor = ray.remote(_RunHere).options(**resources).remote(*self._arguments)
        self._answer, self._code = self._actor.poll.remote(), None


class _RunHere:
    """What Ray's worker has of a trial."""

    def __init__(self, command: Sequence[str], log: Path, folder: str) -> None:
        # Relative paths mean what they mean where the command was typed.
        where: dict[str, Any] = {"folder": folder} if Path(folder).is_dir() else {}
        self.process = start_process(command, log, **where)

    def poll(self) -> int | None:
        return self.process.poll()

    def terminate(self) -> None:
        self.process.terminate()


if __name__ == "__main__":
    run_command(main)
