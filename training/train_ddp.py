"""Train on many processes: torchrun --nproc_per_node=2 training/train_ddp.py [flags]."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from training.distributed.restarts import (
    end_on_ctrl_c,
    exit_if_already_failed,
    finalize_exit_code,
    stop_with_launcher,
    stopped_exit_code,
)

# Before anything else is loaded, which takes seconds: Ctrl-C ends the process with one line, the
# launcher's death reaches it, and an attempt that would only fail again is not made.
if __name__ == "__main__":
    end_on_ctrl_c()
    stop_with_launcher()
    exit_if_already_failed()

from common.errors import rank0_only_output, run_command
from training.config import TrainConfig, parse_config
from training.data.hub_access import refuse_missing
from training.fault_tolerance.interruption import run_rank


def main() -> int:
    # DeepSpeed's launcher adds a flag that repeats the environment.
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank=")]
    with finalize_exit_code():
        # All ranks read the same flags, so what is wrong with them is said once.
        with rank0_only_output():
            config = parse_config(arguments, description=__doc__)
            refuse_missing(config.dataset)
        # PyTorch takes seconds to import, so check the flags and the path of the data first.
        from torch.distributed.elastic.multiprocessing.errors import record

        # torchrun shows the error that `record` writes for it.
        is_finished = record(train)(config)
    return 0 if is_finished else stopped_exit_code(config.stopped_exit_code)


def train(config: TrainConfig) -> bool:
    """Join the process group and train; returns whether the run is finished, not stopped."""
    from training.run import start

    return start.train(config).model_folder is not None


if __name__ == "__main__":
    run_rank(lambda: run_command(main))
