"""Train on a Ray cluster: python deployment/ray/train.py --num_workers 2 [flags of training/train_ddp.py]."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # started by path: the imports below need the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.errors import OneLineParser, TrainingFailure, UserError, positive, run_command
from common.ray_cluster import check_room, connect
from training.config import TrainConfig, parse_config
from training.distributed.group import group_backend, join_ranks, start_timeout
from training.run.trainer import Trainer


def main() -> None:
    options, config = _parse(sys.argv[1:])
    is_local = connect(options.address, dashboard=True)
    use_gpu = _uses_gpus(config, options.num_workers)
    for_each = {"CPU": options.cpus_per_worker} | ({"GPU": 1} if use_gpu else {})
    if is_local:
        everything = {kind: count * options.num_workers for kind, count in for_each.items()}
        check_room(f"--num_workers {options.num_workers}", everything)
    elif not config.output_dir.is_absolute():
        raise UserError(
            f"--output_dir {config.output_dir}: give an absolute path on storage that all machines "
            "of the cluster "
            "share; a worker that starts elsewhere finds its checkpoints there",
            code="folder-not-shared",
        )
    scaling = {
        "num_workers": options.num_workers,
        "use_gpu": use_gpu,
        "resources_per_worker": for_each,
    }
    metrics = fit(config, scaling, options.max_failures)
    metric = config.task_facts.metrics[0]
    print(f"{config.output_dir}: {metric} {metrics['test'][metric]:.4f} on the test rows")


def fit(config: TrainConfig, scaling: dict[str, Any], max_failures: int) -> dict[str, Any]:
    """Run the Trainer in Ray's workers, restarting them up to ``max_failures`` times from the
    newest checkpoint.

    ``scaling``: the fields of Ray's ScalingConfig. Returns the model folder's ``metrics.json``.

    Raises:
        UserError: the run cannot start as asked.
        TrainingFailure: it failed once more.
    """
    from ray.train import (
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
        TrainingFailedError,
    )
    from ray.train.torch import TorchConfig, TorchTrainer

    device = "cuda" if scaling["use_gpu"] else "cpu"
    backend = group_backend(device, also_on_cpu=config.cpu_offload)
    # Ray's own notes on the run: it wants them where all machines see them, as the checkpoints are.
    notes = config.output_dir.absolute().with_name(config.output_dir.name + ".ray")
    trainer = TorchTrainer(
        _train_in_worker,
        train_loop_config={"config": config, "device": device, "folder": str(Path.cwd())},
        # Ray forms the process group and would choose backend and timeout by itself: the run's own
        # are given, so that it behaves as under torchrun.
        torch_config=TorchConfig(backend, timeout_s=int(start_timeout(config.collective_timeout))),
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(
            storage_path=str(notes),
            failure_config=FailureConfig(max_failures=max_failures),
            logging_config=LoggingConfig("ERROR"),
        ),
    )
    try:
        outcome = trainer.fit().return_value
    except TrainingFailedError as error:
        raise TrainingFailure(_last_words(error), code="ray-train-failed") from None
    finally:
        # Nothing of Ray's is resumed from: the run's own checkpoints are.
        shutil.rmtree(notes, ignore_errors=True)
    if "error" in outcome:
        raise UserError(outcome["error"], code=outcome["code"])
    return outcome


def _train_in_worker(task: dict[str, Any]) -> dict[str, Any]:
    config: TrainConfig = task["config"]
    # Relative paths mean what they mean where the command was typed.
    if Path(task["folder"]).is_dir():
        os.chdir(task["folder"])
    with join_ranks(task["device"]) as ranks:
        try:
            folder = Trainer(config, ranks).fit()
        except UserError as error:
            # All ranks agree on it, and another start would end the same: an answer, no failure to
            # recover from.
            return {"error": str(error), "code": error.code}
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def _uses_gpus(config: TrainConfig, num_workers: int) -> bool:
    import ray

    if config.device == "auto":
        # The cluster is asked and not PyTorch: the machine on which the command was typed may have
        # no GPU.
        return ray.cluster_resources().get("GPU", 0) >= num_workers
    return config.device == "cuda"


def _last_words(error: Exception) -> str:
    """The error of the first rank that failed, in one line."""
    failures = getattr(error, "worker_failures", {}) or {0: error}
    rank, failure = min(failures.items())
    line = str(failure).strip().splitlines()[-1]
    # Ray quotes the rank's traceback, whose last line begins with the error's own type.
    own = f"{TrainingFailure.__module__}.TrainingFailure: "
    if line.startswith(own):
        return line.removeprefix(own)
    return f"rank {rank}: {line}; the last checkpoint is safe: to resume, rerun the same command"


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, TrainConfig]:
    """Take Ray's flags out; the others are those of training/train_ddp.py."""
    parser = OneLineParser(
        usage="train.py [flags of Ray] [flags of training]", add_help=False, allow_abbrev=False
    )
    group = parser.add_argument_group("flags of Ray")
    group.add_argument(
        "--num_workers", "--num-workers", type=positive, default=2, help="processes (default: 2)"
    )
    group.add_argument(
        "--cpus_per_worker",
        "--cpus-per-worker",
        type=positive,
        default=1,
        help="cores set aside for each (default: 1)",
    )
    group.add_argument(
        "--max_failures",
        "--max-failures",
        type=int,
        default=3,
        help="times that lost workers are started again; 0 = never, -1 = always (default: 3)",
    )
    group.add_argument(
        "--address",
        help="the cluster, auto for this machine's (default: RAY_ADDRESS, else a new one)",
    )
    # Ray's flags first; `parse_config` then shows its own and ends.
    if {"-h", "--help"} & set(arguments):
        print(parser.format_help())
    options, rest = parser.parse_known_args(arguments)
    return options, parse_config(rest, description=__doc__)


if __name__ == "__main__":
    run_command(main)
