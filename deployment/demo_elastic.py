"""Show that a run outlives its processes: kill a rank, lose a machine, let another one join, and
compare the results.

python deployment/demo_elastic.py [--output_dir FOLDER]. Machines are launchers on this one; no
network is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from safetensors.numpy import load_file

from common.errors import TrainingFailure, UserError, run_command
from deployment.launchers import Cluster, kill, kill_tree, launch, usable_cores
from training.monitoring.events import read_events, read_metrics
from training.monitoring.run_folder import RunFolder, restart_split
from training.monitoring.status import read_statuses
from training.watch import draw, make_console

ROOT = Path(__file__).resolve().parents[1]
# 250 steps of 24 rows. The learning rate is low enough for rounding to stay rounding: sums over two
# ranks and over three differ in their last bits, which a high one would blow up over some hundred
# steps.
FLAGS = shlex.split(
    "--dataset sample --model tiny --device cpu --precision fp32 --deterministic "
    "--epochs 5 --batch_size 8 --learning_rate 3e-4 --save_every 20 --log_every 1"
)
STEPS_BETWEEN = 20
DEADLINE = 300.0  # seconds that any one thing may take
LOSSES_MAY_DIFFER, WEIGHTS_MAY_DIFFER = 1e-4, 1e-3
STAGES = ("detection", "rendezvous", "import", "group", "load", "first_step", "total")


@dataclass(frozen=True)
class Fault:
    """What was done to the run, when (Unix time), and after which optimizer step."""

    name: str
    time: float
    step: int


@dataclass(frozen=True)
class Start:
    """A start that reached its first step at ``time`` (Unix), on so many ranks, resuming after ``step``."""

    time: float
    world_size: int
    step: int


class Stage:
    """Shows the run and the faults injected into it: live in a terminal, otherwise one line per fault."""

    def __init__(self, run_dir: Path, console: Console) -> None:
        self.run_dir = run_dir
        self._console = console
        self._said: list[Text] = []
        self._began = time.monotonic()
        self._live: Live | None = None
        self._folder: RunFolder | None = None

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        before = len(self._said)
        # The live display has a screen of its own, which vanishes at the end: what was said
        # meanwhile is printed once more below.
        with Live(console=self._console, screen=True, auto_refresh=False) as self._live:
            yield
        self._live = None
        self._console.print(*self._said[before:], sep="\n")

    def say(self, text: str) -> None:
        line = Text(f"{time.monotonic() - self._began:6.1f} s  {text}")
        self._said.append(line)
        if self._live is None:
            self._console.print(line, soft_wrap=True)

    def redraw(self) -> None:
        if self._live is None:
            return
        if self._folder is None:
            with contextlib.suppress(UserError):  # it has not begun to write
                self._folder = RunFolder(self.run_dir)
        run = draw(self._folder.refresh()) if self._folder else Text("starting ...")
        self._live.update(Group(*self._said[-6:], Rule(style="dim"), run), refresh=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=ROOT / "checkpoints" / "demo_elastic",
        help="model folder: a new one, or that of an earlier demonstration, which is removed "
        "(default: %(default)s)",
    )
    options = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    output_dir: Path = options.output_dir.resolve()
    undisturbed = output_dir.with_name(output_dir.name + ".undisturbed")
    remove_earlier(output_dir, undisturbed)
    undisturbed.parent.mkdir(parents=True, exist_ok=True)
    console = make_console()
    stage = Stage(output_dir.with_name(output_dir.name + ".run"), console)
    stage.say("First an undisturbed run on 3 ranks ...")
    train_undisturbed(undisturbed)
    with contextlib.closing(Cluster(FLAGS, output_dir)) as cluster, stage.showing():
        faults = disturb(cluster, stage)
    stage.say("Both runs have ended.")
    console.print(recovery_table(faults, stage.run_dir, cluster.log("A").read_text()))
    return compare(output_dir, undisturbed, console)


def disturb(cluster: Cluster, stage: Stage) -> list[Fault]:
    """Train, and inject the faults that a cluster sees; returns them."""
    cores = usable_cores()
    faults: list[Fault] = []

    def wait_for_steps(name: str, since: float) -> None:
        """Wait until the ranks have taken a first step since then, and a few more."""
        wait_until(
            lambda: list_starts(stage.run_dir, since), f"a first step after: {name}", cluster, stage
        )
        start = list_starts(stage.run_dir, since)[-1]
        stage.say(f"{start.world_size} ranks train, from step {start.step} on.")
        # The next fault waits for a checkpoint of this start. Otherwise two faults could fall
        # between two checkpoints, and the second restart would begin before the first fault.
        due = start.step + STEPS_BETWEEN
        wait_until(
            lambda: last_saved_step(stage.run_dir) >= due,
            f"a checkpoint after: {name}",
            cluster,
            stage,
        )

    def do(name: str, deed: Callable[[], None]) -> None:
        fault = Fault(name, time.time(), current_step(stage.run_dir))
        stage.say(f"{name}, at step {fault.step} ...")
        deed()
        faults.append(fault)
        wait_for_steps(name, fault.time)

    stage.say("Then the same run on two machines: A with 2 ranks, B with 1 ...")
    cluster.start("A", 2, cores[:2])
    cluster.start("B", 1, cores[-1:])
    wait_for_steps("the start", since=0.0)
    # On two ranks the first sums would round differently already, and the comparison could not say
    # up to which step both runs are equal to the last bit.
    if list_starts(stage.run_dir)[0].world_size != 3:
        raise TrainingFailure(
            "machine B joined too late for the first start, perhaps because this machine is busy; "
            "try again",
            code="demo-failed",
        )
    # A dead rank is noticed at once by its launcher, a dead machine only by its silence, and a new
    # machine stops everybody: three ways into the same restart.
    do("Rank 1 is killed", lambda: kill([read_statuses(stage.run_dir)[1].pid]))
    do("Machine B is lost", lambda: cluster.lose("B"))
    do("Machine C joins", lambda: cluster.start("C", 1, cores[-1:]))
    launchers = cluster.machines.values()
    wait_until(
        lambda: all(launcher.poll() == 0 for launcher in launchers),
        "the end of the run",
        cluster,
        stage,
    )
    return faults


def wait_until(holds: Callable[[], object], what: str, cluster: Cluster, stage: Stage) -> None:
    """Poll four times per second.

    Raises:
        TrainingFailure: a machine failed, or it took too long.
    """
    end = time.monotonic() + DEADLINE
    while not holds():
        cluster.check()
        if time.monotonic() > end:
            raise TrainingFailure(
                f"{what}: not within {DEADLINE:.0f} s; see {cluster.log('A')}", code="demo-failed"
            )
        stage.redraw()
        time.sleep(0.25)


def train_undisturbed(output_dir: Path) -> None:
    log = undisturbed_log(output_dir)
    flags = (*FLAGS, "--output_dir", str(output_dir))
    # As training/launch.py does it, which keeps torchrun's own log back.
    private = tempfile.TemporaryDirectory(prefix="meeting_")
    meeting = (
        f"--rdzv_backend=c10d --rdzv_conf=store_type=file --rdzv_endpoint={private.name}/store"
    )
    launcher = launch((*meeting.split(), "--nproc_per_node=3"), flags, log, usable_cores()[:3])
    try:
        code = launcher.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        code = f"nothing within {DEADLINE:.0f} s"
    finally:
        kill_tree(launcher)
        private.cleanup()
    if code != 0:
        raise TrainingFailure(
            f"the undisturbed run ended with {code}; see {log}", code="demo-failed"
        )


def remove_earlier(output_dir: Path, undisturbed: Path) -> None:
    """Remove what an earlier demonstration left; anything else is refused."""
    folders = [
        path.with_name(path.name + ending)
        for path in (output_dir, undisturbed)
        for ending in ("", ".run")
    ]
    found = next((folder for folder in folders if folder.exists()), None)
    # The log of the undisturbed run is the mark: no other command writes it, so what lies beside it
    # may be removed.
    if found and not undisturbed_log(undisturbed).exists():
        raise UserError(
            f"--output_dir {output_dir}: {found} is not from an earlier demonstration; name a new "
            "folder",
            code="output-not-empty",
        )
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def undisturbed_log(undisturbed: Path) -> Path:
    return undisturbed.with_name(f"{undisturbed.name}.log")


def list_starts(run_dir: Path, since: float = 0.0) -> list[Start]:
    """The starts that reached a first step after ``since`` (Unix time)."""
    starts, begun = [], {}
    for event in read_events(run_dir):
        if event["kind"] == "start":
            begun = event
        elif event["kind"] == "first_step" and event["time"] > since:
            starts.append(Start(event["time"], begun["world_size"], begun["step"]))
    return starts


def current_step(run_dir: Path) -> int:
    return max((record["step"] for record in read_metrics(run_dir)), default=0)


def last_saved_step(run_dir: Path) -> int:
    return max(
        (event["step"] for event in read_events(run_dir) if event["kind"] == "checkpoint"),
        default=0,
    )


def recovery_table(faults: Sequence[Fault], run_dir: Path, launcher_log: str) -> Table:
    """Each fault, the steps it cost, and the seconds of each part of the recovery."""
    title = "\nSeconds from the last sign of life to the first step after it"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("what")
    for heading in ("at step", "on from", *(stage.replace("_", " ") for stage in STAGES)):
        table.add_column(heading, justify="right")
    splits = {split.stepped: split.seconds() for split in restart_split(run_dir, launcher_log)}
    for fault in faults:
        # The first start after it: where a machine came late to that one, there is a second.
        start = list_starts(run_dir, fault.time)[0]
        seconds = splits[start.time]
        shown = ("–" if np.isnan(seconds[stage]) else f"{seconds[stage]:.1f}" for stage in STAGES)
        table.add_row(fault.name, str(fault.step), str(start.step), *shown)
    return table


def compare(output_dir: Path, undisturbed: Path, console: Console) -> int:
    """Compare steps, losses and weights with the undisturbed run's; returns the exit code."""
    ours, theirs = (recorded_losses(folder) for folder in (output_dir, undisturbed))
    steps = range(1, max(theirs) + 1)
    # A step that was lost, or taken twice after a restart, shows here even if the losses look
    # alike.
    whole = sorted(ours) == sorted(theirs) == list(steps)
    same = next((step - 1 for step in steps if ours.get(step) != theirs.get(step)), len(steps))
    apart = max(abs(ours.get(step, np.inf) - theirs[step]) / theirs[step] for step in steps)
    farthest = largest_difference(output_dir, undisturbed)
    lines = (
        f"Each of the {len(steps)} steps was recorded exactly once: {'yes' if whole else 'NO'}.",
        f"Loss (mean over 24 rows): up to step {same} it equals the undisturbed run's to the last "
        "bit,",
        f"then it differs by at most {apart:.0e},",
        "because sums over 2 ranks round differently than over 3. A missing or repeated row would "
        "show.",
        f"The final weights differ by at most {farthest:.0e}.",
    )
    console.print("", *lines, sep="\n", soft_wrap=True)
    equal = whole and apart < LOSSES_MAY_DIFFER and farthest < WEIGHTS_MAY_DIFFER
    console.print(
        "The run ended as if nothing had happened." if equal else "error: the runs differ.",
        style="bold",
    )
    return 0 if equal else 1


def largest_difference(model: Path, other: Path) -> float:
    """By how much any weight of a model differs from the same one of another."""
    weights, expected = (load_file(folder / "model.safetensors") for folder in (model, other))
    return max(float(np.abs(weights[name] - expected[name]).max()) for name in expected)


def recorded_losses(output_dir: Path) -> dict[int, float]:
    """The recorded loss of each step; infinity for a step that was recorded twice."""
    losses: dict[int, float] = {}
    for record in read_metrics(output_dir.with_name(output_dir.name + ".run")):
        if record["kind"] == "step":
            # Infinity fails every comparison below, as a repeated step should.
            losses[record["step"]] = np.inf if record["step"] in losses else record["loss"]
    return losses


if __name__ == "__main__":
    run_command(main)
