"""A SLURM cluster of two nodes on this machine: the real daemons, in a folder of their own, for this user."""

from __future__ import annotations

import getpass
import os
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.processes import wait_until

NODES = ("node0", "node1")
DEADLINE = 300.0  # seconds after which what was to happen counts as never happening
SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

# Jobs of the partition `urgent` push those of `normal` out; a requeued job may start again after `cred_expire` seconds.
# Jobs count from a number that is this cluster's own, since their launchers meet at a port derived from it.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
FirstJobId={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=6
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node0 NodeHostname=localhost Port={ports[1]} CPUs=1
NodeName=node1 NodeHostname=localhost Port={ports[2]} CPUs=1
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """The commands of a user of the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": SYSTEM_PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, command: str, cwd: Path | None = None, **variables: str) -> str:
        """Run shell commands to their end and return what they printed."""
        environment = {**self.environment, **variables}
        ended = subprocess.run(
            ["bash", "-ec", command], cwd=cwd or self.folder, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}\n{self.logs()}"
        return ended.stdout

    def job(self, number: int | str) -> dict[str, str]:
        """What SLURM knows of a job, or of a task of an array (`7_0`): JobState, Restarts, ExitCode and so on."""
        shown = self.run(f"scontrol show job {number} --oneliner")
        return dict(field.split("=", 1) for field in shlex.split(shown) if "=" in field)

    def wait_for_end(self, number: int | str) -> dict[str, str]:
        """Wait until a job will not run again, and return what SLURM knows of it."""
        wait_until(
            lambda: self.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"),
            DEADLINE,
            lambda: f"{self.job(number)}\n{self.logs()}",
        )
        return self.job(number)

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        return "\n".join("\n".join(log.read_text().splitlines()[-20:]) for log in self.folder.glob("*.log"))


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Start the daemons, wait until both nodes are idle; in the end no job and no daemon is left."""
    cores = sorted(os.sched_getaffinity(0))
    # A short path: the daemons' sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        mine = Cluster(Path(name))
        (mine.folder / "state").mkdir()
        settings = CONFIGURATION.format(ports=_free_ports(3), user=getpass.getuser(), folder=mine.folder)
        (mine.folder / "slurm.conf").write_text(settings)
        daemons = [["slurmctld", "-D"]]
        # A core for each node: its ranks see no other, as on machines of their own.
        daemons += [
            ["taskset", "-c", str(cores[i % len(cores)]), "slurmd", "-D", "-N", node] for i, node in enumerate(NODES)
        ]
        for command in daemons:
            stack.enter_context(_running(command, mine))
        wait_until(
            lambda: mine.run("sinfo --noheader --format=%D,%T --partition=normal") == "2,idle\n", DEADLINE, mine.logs
        )
        try:
            yield mine
        finally:
            mine.run("scancel --user=$(id -un); scancel --signal=KILL --full --user=$(id -un)")
            wait_until(lambda: not mine.run("squeue --noheader"), DEADLINE, mine.logs)


@contextmanager
def _running(command: list[str], mine: Cluster) -> Iterator[None]:
    with (mine.folder / f"{command[-1]}.out").open("w") as out:
        process = subprocess.Popen(command, env=mine.environment, stdout=out, stderr=out, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            process.wait(DEADLINE)
