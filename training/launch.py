"""torchrun, without its own report about ranks, and with exit codes that say more than 1.

Started by training/run_ddp.sh, by a search, and by each pod of a training Job on Kubernetes.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

if not __package__:  # started by path: torch's imports must not find this folder's modules
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import parse_args, parse_min_max_nnodes, run

from common.errors import EXIT_USER_ERROR, LostRank, in_one_line, run_command
from training.config import TrainConfig, parse_config
from training.distributed.restarts import BEGUN

TRAIN = "train_ddp.py"
# What a rank ends with that has not failed itself: another rank is lost, it was asked to stop, or
# torchrun ended it because another one on its node had failed.
CONSEQUENCES = (LostRank.exit_code, os.EX_TEMPFAIL, -signal.SIGTERM)


def launch() -> int:
    """Run torchrun with this process's flags; returns the exit code of the first rank that failed.

    If other nodes take part, the code says whether it is worth starting this node again:

    - 2: the run was refused (a wrong flag, missing data) and has not made a step yet. No node would
      do better.
    - 75: nothing failed here. Other nodes are gone, or the run was asked to stop; it resumes with
      the same command.
    - 128 + signal: this launcher was asked to stop.
    - Everything else: this node failed.
    """
    # torchrun's own variable: if it is set, somebody wants to read its log.
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    args = parse_args(sys.argv[1:])
    is_shared = parse_min_max_nnodes(args.nnodes)[1] > 1
    # Checked before the rendezvous, which may wait an hour for a node.
    is_training = Path(args.training_script).name == TRAIN
    config = parse_config(args.training_script_args) if is_shared and is_training else None
    _name_host(args)
    with contextlib.ExitStack() as stack:
        # The folder is made here and not by torchrun, because files of its attempts are still read
        # after torchrun has ended: those say whether the ranks had begun.
        args.log_dir = args.log_dir or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="torchrun_")
        )
        if args.standalone:
            # Hidden, because run_ddp.sh looks for torchrun's own folder; its mode is 0700.
            private = tempfile.TemporaryDirectory(prefix=".rendezvous_", dir=args.log_dir)
            _meet_in_file(args, f"{stack.enter_context(private)}/store")
        try:
            run(args)
        except ChildFailedError as failed:
            return _exit_code(_explain(failed), Path(args.log_dir), config, is_shared=is_shared)
        except SignalException as asked:
            return 128 + asked.sigval
        except (RendezvousError, DistError) as error:
            print(
                "error: the other nodes are out of reach at "
                f"{args.rdzv_endpoint or args.master_addr}: "
                f"{type(error).__name__}: {in_one_line(error)} [rendezvous-lost]",
                file=sys.stderr,
            )
            return os.EX_TEMPFAIL
    return 0


def _is_host() -> bool:
    """Whether this node hosts the rendezvous: of the pods of an Indexed Job, the first one does."""
    return os.environ.get("JOB_COMPLETION_INDEX", "0") == "0"


def _name_host(args: argparse.Namespace) -> None:
    # Otherwise torchrun compares addresses, and the pod's own name may not resolve yet.
    if args.rdzv_backend == "c10d" and "JOB_COMPLETION_INDEX" in os.environ:
        args.rdzv_conf = ",".join(filter(None, (args.rdzv_conf, f"is_host={int(_is_host())}")))


def _exit_code(code: int, log_dir: Path, config: TrainConfig | None, *, is_shared: bool) -> int:
    """What to end with after a rank has ended with ``code``; see :func:`launch`."""
    if is_shared and code in CONSEQUENCES:
        # If the ranks never met, the network between the nodes may be at fault, which has to
        # count. It counts for the host alone: others may have joined a host that was about to end.
        have_met = any(log_dir.glob(f"*/{BEGUN}"))
        return os.EX_TEMPFAIL if have_met or not _is_host() else 1
    # Once steps have been made, the flags were right: what is refused now may be due to this
    # machine, or to a lock that a lost one still holds.
    if code == EXIT_USER_ERROR and config and (config.run_dir / "metrics.jsonl").exists():
        return 1
    return max(1, code)


def _meet_in_file(args: argparse.Namespace, file: str) -> None:
    """What --standalone does, without a port.

    torchrun's own store listens on every interface, and torchrun unpickles what it finds there, so
    anyone who reaches the port could run code as this user.
    """
    args.standalone = False
    args.rdzv_backend, args.rdzv_id, args.rdzv_endpoint = "c10d", "one", file
    # The file grows with each heartbeat, which tells other nodes that this one lives.
    args.rdzv_conf = "store_type=file,keep_alive_interval=86400"
    # Otherwise torchrun opens a port for the ranks; they meet in a file, too.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def _explain(failed: ChildFailedError) -> int:
    """Print what ranks could not; returns the exit code of the first that failed by itself."""
    # A rank prints why it exits, unless it was killed.
    for rank, failure in failed.failures.items():
        if failure.exitcode < 0 and failure.signal_name() != "SIGTERM":
            print(
                f"error: rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}; "
                "SIGKILL comes from the kernel when memory runs out (dmesg shows it): lower "
                "--batch_size [rank-killed]",
                file=sys.stderr,
            )
    # Ranks that were stopped because of another one say nothing about the cause, so they count only
    # if there are no others. The clock tells which one failed first.
    causes = [
        failure for failure in failed.failures.values() if failure.exitcode not in CONSEQUENCES
    ]
    return min(causes or failed.failures.values(), key=lambda failure: failure.timestamp).exitcode


if __name__ == "__main__":
    run_command(launch)
