"""Train on one device, with no process group: python training/train_single.py [flags]."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from training.distributed.restarts import end_on_ctrl_c

# Before anything else is loaded, which takes seconds: Ctrl-C ends the process with one line.
if __name__ == "__main__":
    end_on_ctrl_c()

from common.errors import run_command
from training.config import parse_config
from training.data.hub_access import refuse_missing


def main() -> int:
    config = parse_config(sys.argv[1:], description=__doc__)
    # PyTorch takes seconds to import, so check the flags and the path of the data first.
    refuse_missing(config.dataset)
    from training.run.start import train

    result = train(config, use_process_group=False)
    return 0 if result.model_folder else config.stopped_exit_code


if __name__ == "__main__":
    run_command(main)
