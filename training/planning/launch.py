"""Launch: the command that trains with a planned layout, in this trainer's flags."""

from __future__ import annotations

import shlex

from training.planning.hardware import Cluster
from training.planning.shapes import Layout, ModelShape

SHORTEST, LONGEST = 8, 8192  # texts that the trainer takes, in tokens


def launch_command(shape: ModelShape, layout: Layout, cluster: Cluster) -> str | None:
    """The command line, the same on each node; ``$HEAD`` is the first node's name. None: see :func:`obstacle`."""
    if obstacle(shape, layout):
        return None
    return f"{_launcher(layout, cluster)} {shlex.join(training_flags(shape, layout))}"


def _launcher(layout: Layout, cluster: Cluster) -> str:
    if layout.ranks == 1:
        return "python training/train_single.py"
    here = min(layout.ranks, cluster.gpus_per_node)
    if layout.ranks == here:
        return f"torchrun --nproc_per_node={here} training/train_ddp.py"
    return (
        f"torchrun --nnodes={layout.ranks // here} --nproc_per_node={here} "
        "--rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500 training/train_ddp.py"
    )


def training_flags(shape: ModelShape, layout: Layout) -> list[str]:
    """The flags of a run, those left out that say nothing new."""
    flags = {
        "model": shape.source,
        "strategy": layout.strategy,
        **_degrees(layout),
        "batch_size": layout.micro_batch,
        "gradient_accumulation": layout.accumulation,
        "max_length": layout.seq_len,
        "precision": layout.precision,
    }
    if layout.activation_checkpointing != "none":
        flags["activation_checkpointing"] = layout.activation_checkpointing
    if layout.sequence_parallel:
        flags["sequence_parallel"] = "true"
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def _degrees(layout: Layout) -> dict[str, int | str]:
    flags: dict[str, int | str] = {}
    if layout.strategy in ("tp", "pp", "3d"):
        flags["dp"] = layout.dp
    if layout.strategy in ("zero2", "zero3", "3d") and layout.dp_replicate > 1:
        flags["dp_shard"] = layout.dp_shard
    if layout.strategy in ("tp", "3d"):
        flags["tp"] = layout.tp
    if layout.strategy in ("pp", "3d"):
        flags["pp"] = layout.pp
    if layout.pp > 1:
        flags["pp_schedule"] = layout.schedule
    return flags


def obstacle(shape: ModelShape, layout: Layout) -> str:
    """Why the trainer has no command for a plan, in a sentence; empty where it has."""
    if not shape.source:
        return (
            f"No command: of {shape.name} there are dimensions alone. With --model FOLDER, which holds a config.json "
            "and weights (safetensors), there is one."
        )
    if not SHORTEST <= layout.seq_len <= LONGEST:
        return f"No command: the trainer takes texts of {SHORTEST} to {LONGEST} tokens."
    return ""


def cautions(shape: ModelShape, layout: Layout) -> list[str]:
    """What stands between the plan and the command, or between the plan and what the command does, in sentences."""
    if said := obstacle(shape, layout):
        return [said]
    if shape.num_labels is None:
        return ["The command trains a classifier on these blocks; the plan counts a language model's head too."]
    return []
