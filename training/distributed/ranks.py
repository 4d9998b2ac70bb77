"""Ranks: this process among those of a run, and the few collectives that data and metrics need."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.errors import ForeseenError, TrainingFailure

T = TypeVar("T")
# What gloo, NCCL and the store say when a connection ends or nothing comes in time, in lower case.
# Any other error is this rank's own and is printed as it is: no shared memory, an interface that
# does not exist, a GPU used twice.
_SIGNS_OF_A_LOST_PEER = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "ncclremoteerror",
    "remote process exited",
    "remote process has terminated",
)


@dataclass(frozen=True)
class Ranks:
    """This process's place among the processes of a run, and its device."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str  # "nccl", "gloo", or "none" for a run without a process group
    restart: int = 0  # how often torchrun has started the processes of this run again
    milestones: dict[str, float] = field(default_factory=dict)  # Unix times: imported, group_formed

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.backend != "none"

    def barrier(self) -> None:
        if self.is_distributed:
            # With NCCL a collective only queues work on the device: reading the result makes the
            # host wait for it.
            self.sum_(torch.zeros(1, device=self.device)).item()

    def any(self, flag: bool) -> bool:
        return self.sum_(torch.tensor(float(flag), device=self.device)).item() > 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_distributed:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank. Values are pickled: small ones only."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        if not self.is_distributed:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; if it fails for a foreseen reason on any, all raise that
        error.

        Raises:
            UserError, HubUnavailable: the first failing rank's error; ``quiet`` on all ranks but
                rank 0.
        """
        result, failure = None, None
        try:
            result = work()
        except TrainingFailure:  # such as a lost rank, which would never receive it
            raise
        except ForeseenError as error:
            failure = type(error), str(error), error.code
        failed = [
            (rank, *found) for rank, found in enumerate(self.gather(failure)) if found is not None
        ]
        if failed:
            rank, kind, text, code = failed[0]
            raise kind(
                text if rank == 0 else f"rank {rank}: {text}", code=code, quiet=not self.is_first
            )
        return result

    def from_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on rank 0, on every rank. Pickled: small values only.

        Raises:
            UserError: as :meth:`run_on_all_ranks`.
        """
        return self.broadcast(self.run_on_all_ranks(lambda: work() if self.is_first else None))

    @contextmanager
    def probing(self, put: Callable[[str], None], remove: Callable[[str], None]) -> Iterator[str]:
        """The name of a small file that rank 0 ``put``, for all ranks to look for; removed after.

        Raises:
            UserError: as :meth:`run_on_all_ranks`, from ``put``.
        """
        # A new name each time: runs that start together in one folder must not remove each
        # other's file, and NFS remembers for a while that a name was absent.
        name = self.broadcast(f".distrinews-{secrets.token_hex(8)}")
        self.run_on_all_ranks(lambda: put(name) if self.is_first else None)
        try:
            yield name
        finally:
            if self.is_first:
                with suppress(OSError):
                    remove(name)

    def local_rank0_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the first rank of each machine, then on the others, who find its cached
        result.

        Raises:
            UserError: as :meth:`run_on_all_ranks`, from the first ranks or from the others.
        """
        first = self.run_on_all_ranks(lambda: work() if self.local_rank == 0 else None)
        rest = self.run_on_all_ranks(lambda: work() if self.local_rank != 0 else None)
        return first if self.local_rank == 0 else rest


def is_lost_rank(error: BaseException | None) -> bool:
    """Whether an error of a collective says that another rank is gone, or did not come."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed torch on every device; with ``deterministic``, refuse operations that are not reproducible bit for bit."""
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS reads it when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
