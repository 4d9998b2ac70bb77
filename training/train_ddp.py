"""Train on many processes: torchrun --nproc_per_node=2 training/train_ddp.py [flags]."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from training.resilience.restarts import (
    begin,
    end_on_ctrl_c,
    leave_if_settled,
    settled,
    stop_with_launcher,
    stopped_exit_code,
)

if __name__ == "__main__":  # before the other imports, which take seconds
    end_on_ctrl_c()
    stop_with_launcher()
    leave_if_settled()

from torch.distributed.elastic.multiprocessing.errors import record

from training.config import parse_config
from training.distributed import one_voice, ranks
from training.errors import run_command
from training.resilience.interruption import Interruption, run_rank
from training.trainer import Trainer


def train() -> int:
    """Parse, join the process group, train; returns the exit code."""
    # DeepSpeed's launcher adds a flag for what the environment says too.
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank=")]
    with settled():
        with one_voice():
            config = parse_config(arguments, description=__doc__)
        with (
            ranks(config.device, also_on_cpu=config.cpu_offload, collective_timeout=config.collective_timeout) as mine,
            Interruption(config.not_saved_exit_code, is_first=mine.is_first) as interruption,
        ):
            trainer = Trainer(config, mine, interruption)
            begin()
            model_folder = trainer.fit()
    return 0 if model_folder else stopped_exit_code(config.stopped_exit_code)


@record
def main() -> None:
    """Run under torchrun, which shows the error that :func:`record` writes down for it."""
    run_command(train)


if __name__ == "__main__":
    run_rank(main)
