"""What training/run_ddp.sh starts: torchrun without its own report about ranks that have printed their error."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

if not __package__:  # started by path: torch's imports must not find this folder's modules
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def launch() -> int:
    """Run torchrun with this process's flags; returns the exit code of the first rank that failed."""
    if "LOGLEVEL" not in os.environ:  # torchrun's variable: whoever sets it wants to read its log
        logging.disable(logging.ERROR)
    try:
        main()
    except ChildFailedError as failed:
        # A rank prints why it exits, unless it was killed.
        for rank, failure in failed.failures.items():
            if failure.exitcode < 0 and failure.signal_name() != "SIGTERM":  # that one torchrun sends itself
                print(
                    f"error: rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}; SIGKILL comes "
                    "from the kernel when memory runs out (dmesg shows it): lower --batch_size [rank-killed]",
                    file=sys.stderr,
                )
        return max(1, failed.get_first_failure()[1].exitcode)
    except SignalException as asked:
        return 128 + asked.sigval
    return 0


if __name__ == "__main__":
    sys.exit(launch())
