"""A whole training run on the ranks that `run_on_ranks` starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import torch

from training.config import parse_config
from training.distributed.group import join_ranks
from training.run.trainer import Trainer


def train_on_ranks(flags: Sequence[str], restart: int = 0, dies_in_step: int = 0) -> None:
    """Train on this rank as train_ddp.py does.

    In step ``dies_in_step`` (0 for none) rank 1 gets SIGKILL, once the first checkpoint is complete.
    """
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart)
    config = parse_config(flags, {})
    with join_ranks(config.device) as here:
        torch.set_num_threads(1)
        trainer = Trainer(config, here)
        begin_step = trainer.context.strategy.begin_step

        def begin_or_die(learning_rate: float) -> None:
            if here.rank == 1 and trainer.context.state.step + 1 == dies_in_step:
                while not list(config.run_dir.glob("checkpoints/step_*/manifest.json")):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            begin_step(learning_rate)

        trainer.context.strategy.begin_step = begin_or_die
        trainer.fit()
