"""train_ddp.py with faults: torchrun ... tests/training/faults/fault_injection.py FLAGS.

The program itself is unchanged. It is watched from outside, by Python's audit events (files opened, renamed, removed)
and by the phases of the run; at each of these moments a fault may be injected. Every rank also notes the rows that it
trains on, and the weights and moments that it ends with.

FAULT_INJECTIONS (JSON) lists the injections, FAULT_FOLDER is where all is noted, FAULT_LAUNCH counts starts. With
FAULT_LEAVES_OUT (JSON) the batches of those ``steps`` and those ``rows`` are left out: what a run comes to that never
had them.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from training.monitoring.phases import Phases

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = Path(os.environ["FAULT_FOLDER"])
RANK, RESTART = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
LAUNCH = int(os.environ.get("FAULT_LAUNCH", 0))
BUSY = threading.local()


RETRY_SECONDS = 5.0  # before a failed save is tried again: longer than a few steps, shorter than the run's own minute


class Injections:
    """The faults to inject into this process, each once in the whole life of the run."""

    def __init__(self, listed: list[dict[str, Any]]) -> None:
        fallen = _found_by_this_attempt()["injections"]
        self.left = {
            number: injection
            for number, injection in enumerate(listed)
            if injection["rank"] == RANK and injection["turn"] in (None, fallen)
        }
        self.phases: Phases | None = None
        self.seen: dict[int, int] = {}

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.phases.step if self.phases else 0

    def look(self, kind: str, what: str) -> None:
        """Inject a fault, if this is its moment."""
        if getattr(BUSY, "injecting", False):  # what an injection itself opens does not count
            return
        for number, injection in list(self.left.items()):
            moment, pattern = injection["on"].split(" ", 1)
            if moment == kind and fnmatch(what, pattern) and injection["after"] in (None, self.step):
                self.seen[number] = self.seen.get(number, 0) + 1
                if self.seen[number] == injection["count"]:
                    self._inject(number, self.left.pop(number)["do"])

    def _inject(self, number: int, do: str) -> None:
        BUSY.injecting = True
        try:
            with (FOLDER / f"injection_{number:03d}.json").open("x") as file:
                json.dump({"time": time.time(), "step": self.step, "pid": os.getpid()}, file)
        except FileExistsError:
            return
        finally:
            BUSY.injecting = False
        if do in ACTS:
            ACTS[do]()
        else:
            _shell(do)


def _found_by_this_attempt() -> dict[str, Any]:
    """How many faults were injected so far, and the steps of the checkpoints that exist.

    The same for all ranks of an attempt: the first of them to come counts.
    """
    attempt = FOLDER / f"attempt_{LAUNCH}_{RESTART}"
    mine = attempt.with_name(f"{attempt.name}.{os.getpid()}")
    # Each got its name by the rename that made it a checkpoint.
    saved = {int(path.name[5:13]) for path in Path(os.environ.get("CHECKPOINTS", FOLDER)).glob("step_????????*")}
    mine.write_text(json.dumps({"injections": len(list(FOLDER.glob("injection_*.json"))), "saved": sorted(saved)}))
    with suppress(FileExistsError):
        os.link(mine, attempt)
    mine.unlink()
    return json.loads(attempt.read_text())


def _shell(command: str) -> None:
    BUSY.injecting = True
    places = {"PID": os.getpid(), "LAUNCHER": os.getppid(), "PYTHON": shlex.quote(sys.executable)}
    named = os.environ | {name: str(value) for name, value in places.items()}
    # In a session of its own, where the launcher's signals to the ranks do not reach it.
    subprocess.run(["bash", "-c", command], env=named, check=True, start_new_session=True)
    BUSY.injecting = False


def _spoil_a_loss() -> None:
    """Make one output of the model's next linear layer not a number."""
    from torch.nn.modules.module import register_module_forward_hook

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        if type(module).__name__ != "Linear":
            return None
        hook.remove()
        return output * float("nan")

    hook = register_module_forward_hook(spoil)


def _shift_the_clock() -> None:
    """From here on this process's time of day is a day behind."""
    real = time.time
    time.time = lambda: real() - 86_400.0


def _slow_down() -> None:
    """From here on compute each linear layer of a forward pass twenty times."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    def repeat(module: Any, inputs: Any, output: Any) -> None:
        if type(module).__name__ == "Linear":
            with torch.no_grad():
                for _ in range(19):
                    torch.nn.functional.linear(inputs[0], module.weight)

    register_module_forward_hook(repeat)


def _hold_on() -> None:
    """Be stuck here for good, as a reader is whose disk does not answer."""
    threading.Event().wait()


ACTS: dict[str, Callable[[], None]] = {
    "a loss that is not a number": _spoil_a_loss,
    "a clock set back by a day": _shift_the_clock,
    "each linear layer twenty times": _slow_down,
    "waiting without end": _hold_on,
}
INJECTIONS = Injections(json.loads(os.environ.get("FAULT_INJECTIONS", "[]")))
WRITING = os.O_WRONLY | os.O_RDWR


def _audited(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and not isinstance(arguments[0], int):
        INJECTIONS.look("writes" if arguments[2] & WRITING else "reads", str(arguments[0]))
    elif event == "os.rename":
        INJECTIONS.look("renames", str(arguments[1]))
    elif event in ("os.remove", "shutil.rmtree"):
        INJECTIONS.look("removes", str(arguments[0]))
    elif event == "import":
        INJECTIONS.look("imports", arguments[0])


def _watch_phases() -> None:
    enter, begin = Phases.__call__, Phases.__init__

    @contextmanager
    def entered(self: Phases, name: str) -> Iterator[None]:
        with enter(self, name):
            INJECTIONS.look("phase", name)
            yield

    def begun(self: Phases) -> None:
        begin(self)
        if INJECTIONS.phases is None:  # the first are the Trainer's, and by now all of the program is imported
            INJECTIONS.phases = self
            _note_rows()
            _note_end()
            _retry_soon()
            if left_out := json.loads(os.environ.get("FAULT_LEAVES_OUT", "{}")):
                _leave_out(**left_out)

    Phases.__call__, Phases.__init__ = entered, begun  # type: ignore[method-assign]


def _note_rows() -> None:
    """Have every step append the rows that this rank computed to a file of its own."""
    from training.run.step import StepLog

    add, first = StepLog.add, []
    place = {"launch": LAUNCH, "restart": RESTART}
    place["world_size"] = int(os.environ["WORLD_SIZE"])

    def noted(self: StepLog, record: Any) -> None:
        add(self, record)
        first.append(record.step)
        rows = [int(row) for row in record.local_rows if row >= 0]
        note = {"time": time.monotonic(), "first_step": first[0], "step": record.step, "epoch": record.epoch}
        with (FOLDER / f"rows_{RANK}.jsonl").open("a") as file:
            file.write(json.dumps(place | note | {"rows": rows}) + "\n")

    StepLog.add = noted  # type: ignore[method-assign]


def _note_end() -> None:
    """Have the end of training note a hash of this rank's weights and moments."""
    from training.run import trainer

    finish = trainer.finish_run

    def noted(context: Any) -> Path:
        tensors = context.strategy.state_dict().tensors
        digest = sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()
        (FOLDER / f"state_{RANK}").write_text(digest)
        return finish(context)

    trainer.finish_run = noted


def _retry_soon() -> None:
    from training.run import checkpoints

    checkpoints.Saver = partial(checkpoints.Saver, retry_seconds=RETRY_SECONDS)


def _leave_out(steps: list[int], rows: list[int]) -> None:
    import numpy as np

    from training.run.trainer import Trainer

    take = Trainer._train_step

    def shortened(self: Trainer, epoch: int, batch: Any) -> None:
        kept = batch[~np.isin(batch, rows)]
        take(self, epoch, kept[:0] if self.context.state.step + 1 in steps else kept)

    Trainer._train_step = shortened  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.addaudithook(_audited)
    _watch_phases()
    INJECTIONS.look("starts", "")
    runpy.run_path(str(REPOSITORY / "training" / "train_ddp.py"), run_name="__main__")
