"""Run a script of several ranks and say what goes wrong between them. You can copy this file.

It needs only PyTorch. Put it between torchrun and your script:

    torchrun --standalone --nproc_per_node=2 diagnose.py --seconds 2 YOUR_SCRIPT.py ITS_FLAGS

Your script is not changed. A rank that waits in a collective cannot report that, because its main
thread is what waits. Here a second thread on each rank writes to torchrun's key-value store, which
is not a collective and so does not hang with the others. Rank 0's second thread compares what all
ranks wrote:

- the line that each rank is at. If no rank has moved for ``--seconds``, or one fails, all lines are
  printed and the run ends;
- the number of forward passes of ``DistributedDataParallel`` before each optimizer step: it differs
  if one rank skips a batch;
- a checksum of each parameter and buffer after each optimizer step: all replicas must stay equal;
- a checksum of each training batch: a shuffled loader does not give the same batch twice.

Only the first finding of each kind is printed. The exit code is 1 if the script raises, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import threading
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

LOOK_SECONDS = 0.2
ENDED, RAISED = "has ended", "raised"


class Rank:
    """What this rank writes for the others; on rank 0 also the comparison."""

    def __init__(self, script: Path, seconds: float) -> None:
        self.script, self.seconds = script, seconds
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # torchrun's store: every process of the run can reach it, and none has to be asked.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=False)
        self.outcome = ""  # of the script, once it has returned or raised
        self.num_forwards = self.num_steps = self.num_compared = 0
        self.repeated = ""
        self.script_globals: dict[str, Any] = {}
        # By rank, what it wrote last, and when rank 0 saw it first.
        self.heard: dict[int, tuple[bytes, float]] = {}
        self.model: torch.nn.Module | None = None
        self.batches: dict[int, int] = {}  # checksum -> number of the forward pass
        self.reported: set[str] = set()  # kinds of findings

    def before_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Count the batch and compare it with all before it."""
        if not isinstance(module, DistributedDataParallel) or not module.training:
            return
        self.model = module.module
        self.num_forwards += 1
        batch = b"".join(_bytes(tensor) for tensor in inputs if isinstance(tensor, torch.Tensor))
        first = self.num_forwards
        if batch:
            first = self.batches.setdefault(zlib.crc32(batch), self.num_forwards)
        if first != self.num_forwards and not self.repeated:
            whose = f"batch {self.num_forwards} of rank {self.rank}"
            self.repeated = f"{whose} is batch {first} again, in the same order"

    def after_step(self, *_: object) -> None:
        """Write this rank's checksums; no rank waits for another here."""
        self.num_steps += 1
        # After a step all replicas should be equal: the checksums are what rank 0 compares. They
        # are kept under the step's number, because ranks may be at different steps.
        state = self.model.state_dict() if self.model is not None else {}
        tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
        sums = {name: zlib.crc32(_bytes(tensor)) for name, tensor in tensors.items()}
        key = self._step_key(self.num_steps, self.rank)
        self.store.set(key, json.dumps([self.num_forwards, sums]))

    def watch(self) -> None:
        """Write where the main thread is until rank 0 ends the run; on rank 0, compare."""
        try:
            self._watch()
        except Exception:
            # Of this file: whatever it is, the other ranks must not wait for this one.
            traceback.print_exc()
            self.store.set("over", "")
        os._exit(self.outcome.startswith(RAISED))  # the main thread may wait forever

    def _watch(self) -> None:
        before, moved = None, time.monotonic()
        ranks = [f"rank {rank}" for rank in range(self.world_size)]
        while not self.store.check(["over"]):
            main = sys._current_frames()[threading.main_thread().ident]
            frames = list(traceback.walk_stack(main))
            # The same frames at the same instructions: the main thread has done nothing since the
            # last look.
            now = [(id(frame), frame.f_lasti) for frame, _ in frames]
            if now != before:
                before, moved = now, time.monotonic()
            extract = traceback.StackSummary.extract
            where = self.outcome or f"is at {self.place(extract(reversed(frames)))}"
            counts = f"{self.num_forwards} forward passes, {self.num_steps} optimizer steps"
            # How long it has not moved, and not since when: the machines' clocks may differ.
            found = [where, counts, time.monotonic() - moved, self.repeated]
            self.store.set(f"rank {self.rank}", json.dumps(found))
            # Rank 0 compares once it has heard of all.
            if self.rank == 0 and self.store.check(ranks):
                self.compare()
            time.sleep(LOOK_SECONDS)

    def place(self, frames: traceback.StackSummary) -> str:
        """The innermost line of the script, or of a file below its folder."""
        # A library's line says little: what the learner can look at is their own line that led
        # there, the last one below the script's folder.
        folder, found = self.script.resolve().parent, "a line outside the script's folder"
        for frame in frames:
            path = Path(frame.filename).resolve()
            is_own = path.is_relative_to(folder) and "site-packages" not in path.parts
            if is_own and path != Path(__file__).resolve():
                found = f"{os.path.relpath(path)}:{frame.lineno}: {frame.line}"
        return found

    def compare(self) -> None:
        """Report what differs between the ranks, and end the run if it is over or stuck."""
        wheres, counts, stills, repeated = self._hear()
        self._compare_steps()
        for line in filter(None, repeated):
            self.report("repeated", line)
        # A rank that has ended waits for nobody. Stuck are the others, if all of them stand still.
        running = [still for where, still in zip(wheres, stills, strict=True) if where != ENDED]
        failed = any(where.startswith(RAISED) for where in wheres)
        if failed or min(running, default=0) > self.seconds:
            why = "a rank failed" if failed else f"no rank has moved for {self.seconds:g} s"
            lines = [
                f"  rank {rank} {wheres[rank]}  ({counts[rank]})" for rank in range(self.world_size)
            ]
            self.report("stuck", "\n".join([why, *lines]))
        elif running:
            return
        if not self.reported:
            checked = f"{self.world_size} ranks in {self.num_compared} optimizer steps"
            self.report("none", f"nothing found on {checked}")
        self.store.set("over", "")

    def _hear(self) -> tuple[Any, ...]:
        """By rank: where each is, its counts, how long it has not moved, and what it repeated."""
        ranks, now = range(self.world_size), time.monotonic()
        for rank in ranks:
            written = self.store.get(f"rank {rank}")
            if written != self.heard.get(rank, (b"", 0.0))[0]:
                self.heard[rank] = written, now
        latest = [json.loads(self.heard[rank][0]) for rank in ranks]
        wheres, counts, stills, repeated = zip(*latest, strict=True)
        # A rank whose second thread writes nothing any more does not move either.
        stills = [max(still, now - self.heard[rank][1]) for rank, still in enumerate(stills)]
        return wheres, counts, stills, repeated

    def _compare_steps(self) -> None:
        # Steps that all ranks have done by now. Compared once, then deleted: a long run would fill
        # the store.
        while self.store.check(keys := self._step_keys(self.num_compared + 1)):
            self.num_compared += 1
            self._compare_step([json.loads(self.store.get(key)) for key in keys])
            for key in keys:
                self.store.delete_key(key)

    def _compare_step(self, by_rank: list[tuple[int, dict[str, int]]]) -> None:
        after, (num_forwards, sums) = f"after optimizer step {self.num_compared}", by_rank[0]
        for rank, (others_forwards, others_sums) in enumerate(by_rank):
            if others_forwards != num_forwards:
                counted = f"{others_forwards} forward passes, rank 0 {num_forwards}"
                self.report("forwards", f"{after}, rank {rank} has done {counted}")
            if differ := [name for name, value in sums.items() if others_sums.get(name) != value]:
                more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
                what = f"{differ[0]}{more} on rank {rank}"
                self.report("state", f"{after}, {what} is not that of rank 0")

    def report(self, kind: str, line: str) -> None:
        """Print the first finding of a kind."""
        if kind not in self.reported:
            self.reported.add(kind)
            print(f"diagnose: {line}", flush=True)

    def _step_keys(self, step: int) -> list[str]:
        return [self._step_key(step, rank) for rank in range(self.world_size)]

    @staticmethod
    def _step_key(step: int, rank: int) -> str:
        return f"step {step} of rank {rank}"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def main() -> None:
    what = "Run a script of several ranks and say what goes wrong between them."
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument(
        "--seconds",
        type=float,
        default=30,
        help="without progress on any rank, after which the script counts as stuck (30)",
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    rank = Rank(given.script, given.seconds)
    # PyTorch's global hooks, for every module and every optimizer: the script stays as it is.
    register_module_forward_pre_hook(rank.before_forward)
    register_optimizer_step_post_hook(rank.after_step)
    watcher = threading.Thread(target=rank.watch)
    watcher.start()
    sys.argv, sys.path[0] = [str(given.script), *given.flags], str(given.script.parent)
    try:
        # Kept: what is freed behind a process group that is already destroyed can wait for ever, in
        # this thread.
        rank.script_globals = runpy.run_path(str(given.script), run_name="__main__")
        rank.outcome = ENDED
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            rank.outcome = ENDED
        elif not rank.store.check(["over"]):
            # Otherwise the error comes from a rank that was ended before this one.
            traceback.print_exc()
            where = rank.place(traceback.extract_tb(error.__traceback__))
            rank.outcome = f"{RAISED} {type(error).__name__} at {where}"
    watcher.join()


if __name__ == "__main__":
    main()
