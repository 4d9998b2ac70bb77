"""Dry run: one rank of a layout goes through a step on fake tensors, and every byte that it would hold is counted.

What runs is what training runs: FSDP2, tensor parallelism and activation checkpointing of ``training.parallelism``, in
a process group of the full size that sends nothing. Only shapes are computed, so that 32 ranks of a model of 13 billion
parameters take seconds on a laptop. It runs in a process of its own, so that whatever goes wrong there, or takes
too long, costs the plan no more than this figure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Literal

from training.planning.shapes import Layout, MemoryEstimate, ModelShape

Device = Literal["gpu", "cpu"]
SECONDS_LIMIT = 150  # of all dry runs of an answer together
HOST_BYTES_LIMIT = 7 * 2**30  # of each, and two run at a time


class NoDryRun(Exception):
    """A dry run could not be made; the message says why."""


@dataclass(frozen=True)
class DryRun:
    """What one rank of a layout holds when it holds most.

    ``memory``: bytes by kind; its activations include ``temporary``: what the backward pass makes and drops, with what
    is computed again. ``stage``: the pipeline rank that needs most. ``seconds``, ``host_bytes``: what the dry run took.
    """

    memory: MemoryEstimate
    temporary: float
    stage: int
    seconds: float
    host_bytes: int


def dry_run(
    shape: ModelShape, layout: Layout, world_size: int, device: Device = "gpu", seconds: float = SECONDS_LIMIT
) -> DryRun:
    """Count the memory of the rank that needs most.

    Args:
        world_size: the layout's ranks.
        device: whose kernels say what is kept for the backward pass.
        seconds: what it may take.

    Raises:
        NoDryRun: it failed, or took more than ``seconds`` or 7 GiB.
    """
    if world_size != layout.ranks:
        raise NoDryRun(f"the layout is of {layout.ranks} ranks, not {world_size}")
    if seconds <= 0:
        raise NoDryRun("those before it took all the time there is")
    asked = json.dumps({"shape": asdict(shape), "layout": asdict(layout), "device": device})
    command = [sys.executable, "-m", "training.planning.fake_step"]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoDryRun(f"stopped after {seconds:.0f} seconds") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise NoDryRun(last[:300])
    found = json.loads(done.stdout.splitlines()[-1])
    return DryRun(**found | {"memory": MemoryEstimate(**found["memory"])})
