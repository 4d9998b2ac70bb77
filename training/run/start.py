"""Start a run: from a script or a notebook, and from the command line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.config import TrainConfig
from training.distributed.group import join_ranks
from training.distributed.restarts import begin
from training.fault_tolerance.interruption import Interruption
from training.model.own import MakeNetwork, Metric, Own, RowLoss
from training.monitoring.events import Subscriber
from training.run.finish import export_model
from training.run.trainer import Trainer


@dataclass(frozen=True)
class Result:
    """What a run left behind.

    ``model_folder``: None if the run was stopped; start it again to resume. ``metrics``: those of
    metrics.json.
    """

    model_folder: Path | None
    metrics: dict[str, Any]


def train(
    config: TrainConfig,
    *,
    network: MakeNetwork | None = None,
    loss: RowLoss | None = None,
    metric: Metric | None = None,
    subscribers: Sequence[Subscriber] = (),
    use_process_group: bool = True,
) -> Result:
    """Train, evaluate and write one model, as ``training/train_ddp.py`` does.

    Under torchrun every process calls it with the same arguments; elsewhere, as in a notebook, it
    trains on one process. A run that was interrupted resumes when it is called again.

    Args:
        network: builds a network of your own; wins over ``config.network``, which names one by its
            import path.
        loss, metric: of your own, likewise.
        subscribers: read the run's events while it runs, as the project's own do; the same ones on
            every rank.
        use_process_group: join the group that torchrun describes.

    Raises:
        UserError: the run cannot start as asked; nothing has been written.
        TrainingFailure: a non-finite loss, no memory, a lost rank, a full disk.
    """
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(
            join_ranks(
                config.device,
                use_process_group=use_process_group,
                also_on_cpu=config.cpu_offload,
                collective_timeout=config.collective_timeout,
            )
        )
        interruption = stack.enter_context(
            Interruption(config.not_saved_exit_code, is_first=ranks.is_first)
        )
        own = ranks.run_on_all_ranks(lambda: Own.of(config, network, loss, metric))
        trainer = Trainer(config, ranks, interruption, own, subscribers)
        # From here on a refusal is not final for the launcher: flags, data and machine have been
        # accepted once, so what is missing in a later attempt may come back.
        begin()
        model_folder = trainer.fit()
        # Rank 0 exports, and the others wait in this call: if it fails, all end with its error.
        if model_folder and config.export:
            ranks.run_on_all_ranks(lambda: export_model(config) if ranks.is_first else None)
    metrics = (
        json.loads((model_folder / "metrics.json").read_text(encoding="utf-8"))
        if model_folder
        else {}
    )
    return Result(model_folder, metrics)
