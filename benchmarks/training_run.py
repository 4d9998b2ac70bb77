"""A whole training run as a measurement: in a temporary folder, with what came of it on each rank."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import harness
from benchmarks.processes import Layout, run_ranks
from common.errors import TrainingFailure
from common.hardware import usable_cpus
from training.config import parse_config
from training.data.dataset import Rows
from training.distributed.group import join_ranks
from training.monitoring.events import read_metrics
from training.run.trainer import Trainer


def train_rank(flags: list[str], slowdown: int = 1) -> dict[str, Any]:
    """One rank's part of a run. The last rank is made ``slowdown`` times slower by real work.

    Returns:
        Among others ``sent`` and ``uncompressed``, the bytes per step that this rank gave to
        all-reduces and would have given without compression; ``records``, rank 0's metrics.jsonl;
        and the most memory that the process held.
    """
    config = parse_config(flags)
    with join_ranks(config.device) as ranks:
        trainer = Trainer(config, ranks)
        strategy = trainer.context.strategy
        if ranks.rank == ranks.world_size - 1 and slowdown > 1:
            compute_repeatedly(strategy.parts[0], slowdown)
        trainer.fit()
        traffic = strategy.compression.traffic if strategy.compression else None
        # Gradients are sent in fp32, four bytes each, unless they are compressed.
        gradients = sum(parameter.numel() * 4 for parameter in strategy.parameters.values())
        return {
            "global_batch": trainer.context.plan.global_batch_size,
            "steps_per_epoch": len(trainer.context.sampler),
            "rows_per_epoch": len(trainer.context.data.train_index),
            "speeds": trainer.context.balance.speeds,
            "uncompressed": traffic.uncompressed if traffic else gradients,
            "sent": traffic.sent if traffic else gradients,
            "records": read_metrics(config.run_dir) if ranks.is_first else [],
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "device_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }


def compute_repeatedly(model: nn.Module, times: int) -> None:
    """Make a model compute each row of a training batch ``times`` times, forward and backward, and learn from one."""

    def repeat(
        module: nn.Module, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        # There is no attention mask if nothing is padded.
        repeated = tuple(None if tensor is None else tensor.repeat(times, 1) for tensor in inputs)
        return repeated if module.training else inputs

    def keep_first(
        module: nn.Module, inputs: tuple[torch.Tensor, ...], logits: torch.Tensor
    ) -> torch.Tensor:
        # (times * rows, labels) to (rows, labels). The backward pass still computes all copies:
        # their gradient is zero, but the products are the same size.
        return logits[: len(logits) // times] if module.training else logits

    model.register_forward_pre_hook(repeat)
    model.register_forward_hook(keep_first)


def train(
    layout: Layout,
    rank_function: Callable[..., Any] = train_rank,
    *,
    pin: bool = True,
    slowdown: int = 0,
    **flags: Any,
) -> list[dict[str, Any]]:
    """Train with these flags in a temporary folder; returns what the function found on each rank."""
    arguments = {"slowdown": slowdown} if slowdown else {}
    with tempfile.TemporaryDirectory(prefix="training-") as folder:
        # No checkpoints unless a benchmark asks for them: writing them would be in the time of its
        # steps.
        flags = {"save_every": 0, "output_dir": f"{folder}/model"} | flags
        return run_ranks(rank_function, layout, pin=pin, flags=words_of(flags), **arguments)


def write_rows(folder: Path, label_names: Sequence[str], **splits: Rows) -> Path:
    """Write rows where training reads them; returns the folder."""
    folder.mkdir(exist_ok=True)
    for name, rows in splits.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for text, label in zip(rows.texts, rows.labels, strict=True):
                file.write(json.dumps({"text": text, "label": label_names[label]}) + "\n")
    return folder


def words_of(flags: Mapping[str, Any]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def train_as_a_user(flags: Sequence[str], output: Path) -> tuple[float, dict[str, Any], str]:
    """Start ``training/run_ddp.sh``, one process per core, and wait for it.

    Returns:
        The seconds of the whole command, the results on the test rows, and what the command
        printed.
    """
    launcher = harness.ROOT / "training" / "run_ddp.sh"
    command = [str(launcher), str(usable_cpus()), *flags, "--output_dir", str(output)]
    began = time.monotonic()
    # One thread per process, because there is a process for each core: more would compete for them.
    printed = run_program(command, {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})
    seconds = time.monotonic() - began
    return seconds, json.loads((output / "metrics.json").read_text(encoding="utf-8")), printed


def run_program(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Run a program of this project; returns what it printed, errors included.

    Raises:
        TrainingFailure: it failed.
    """
    environment = os.environ | (environment or {})
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(
        command, env=environment, cwd=harness.ROOT, text=True, check=False, **told
    )
    if done.returncode:
        raise TrainingFailure(
            f"{' '.join(command)} failed: {done.stdout.strip()[-500:]}", code="benchmark-failed"
        )
    return done.stdout
