"""Gradient compression: DDP communication hooks that send fewer bytes, and count them.

``fp16`` and ``bf16`` halve what is sent; ``powersgd:rank`` sends two thin matrices for each large
one (Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", arXiv 1905.13727, algorithms 1 and 2).

PowerSGD is implemented here because torch's own hook (``powerSGD_hook``) starts each bucket's
second and third all- reduce from a callback. Over gloo, two ranks may start them in different
orders, and the run dies. Its state is also kept per bucket, which does not survive another bucket
order, and in the previous step's loss scale.
"""

# No `from __future__ import annotations`: DDP reads a hook's annotations and needs the classes
# themselves.

from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from training.distributed.ranks import Ranks
from training.model.precision import DTYPES
from training.parallelism.state import SavedState, StrategyState

DEFAULT_RANK = 4
# The gradients of the first steps change direction fastest and are the hardest to approximate.
PLAIN_STEPS = 10
# A matrix is sent as it is unless its two factors have less than half its numbers.
LEAST_RATIO = 2


class Traffic:
    """Bytes that a rank passes to all-reduces per step: ``uncompressed`` and what was ``sent``."""

    def __init__(self) -> None:
        self.uncompressed = self.sent = 0
        self._uncompressed = self._sent = 0

    def count(self, bucket: GradBucket, sent: int) -> None:
        """The figures of a step are final once its last bucket is counted."""
        buffer = bucket.buffer()
        self._uncompressed += buffer.numel() * buffer.element_size()
        self._sent += sent
        if bucket.is_last():
            self.uncompressed, self.sent = self._uncompressed, self._sent
            self._uncompressed = self._sent = 0

    def __str__(self) -> str:
        if not self.sent:
            return ""
        ratio = self.uncompressed / self.sent
        return (
            f": {self.sent / 1e6:.3g} MB per step and rank instead of "
            f"{self.uncompressed / 1e6:.3g} MB "
            f"({ratio:.1f}x less)"
        )


class Compression(Protocol):
    """A way to average gradients over the ranks in place of DDP's own."""

    traffic: Traffic

    def attach(self, replica: DistributedDataParallel) -> None:
        """Register the hook. The buckets of ``replica`` must be in their final order."""

    def begin_step(self, loss_scale: float | None) -> None:
        """``loss_scale``: the factor on all gradients of the coming step, if any."""

    def end_step(self, finite: torch.Tensor) -> None:
        """Called with whether the gradient norm is finite, (); a step that is not must leave no trace."""

    def state_dict(self, ranks: Ranks) -> StrategyState: ...

    def load_state_dict(self, saved: SavedState, ranks: Ranks) -> None:
        """Restore on any number of ranks; if the checkpoint has no such state, start without."""


def build_compression(asked: str) -> Compression | None:
    if asked == "none":
        return None
    if asked in DTYPES:
        return Cast(DTYPES[asked])
    return PowerSGD(int(asked.partition(":")[2] or DEFAULT_RANK))


class Cast:
    """Gradients averaged in another dtype. fp16 loses values below 6e-8, bf16 all but 8 bits of each number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.traffic = Traffic()

    def attach(self, replica: DistributedDataParallel) -> None:
        replica.register_comm_hook(None, self._average)

    def _average(self, _: None, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        # Divided first, because the sum over ranks could exceed the range of fp16.
        cast = buffer.div_(dist.get_world_size()).to(self.dtype)
        self.traffic.count(bucket, cast.numel() * cast.element_size())
        return (
            dist.all_reduce(cast, async_op=True)
            .get_future()
            .then(lambda sent: buffer.copy_(sent.value()[0]))
        )

    def begin_step(self, loss_scale: float | None) -> None:
        """Nothing to do: an overflow is infinite on all ranks, and the norm shows it."""

    def end_step(self, finite: torch.Tensor) -> None: ...

    def state_dict(self, ranks: Ranks) -> StrategyState:
        return StrategyState({}, {})

    def load_state_dict(self, saved: SavedState, ranks: Ranks) -> None: ...


class PowerSGD:
    """Averages each gradient matrix M (n, m) as P Q^T, with P (n, rank) and Q (m, rank).

    What the approximation leaves out is added to the next step's gradient (error feedback), on each
    rank its own part, and Q is the start of the next approximation. Both are kept by parameter
    name, errors without the loss scale. After a resume on another number of ranks every rank gets
    the mean of the errors, since training only depends on their mean.

    Args:
        rank: columns of P and Q; more approximate better and send more.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps = 0
        self.queries: dict[str, torch.Tensor] = {}
        self.errors: dict[str, torch.Tensor] = {}
        self.traffic = Traffic()
        self._names: dict[torch.Tensor, str] = {}
        self._loss_scale = 1.0
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def attach(self, replica: DistributedDataParallel) -> None:
        self._names = {parameter: name for name, parameter in replica.module.named_parameters()}
        replica.register_comm_hook(None, self._average)

    def begin_step(self, loss_scale: float | None) -> None:
        self._loss_scale = loss_scale or 1.0

    def end_step(self, finite: torch.Tensor) -> None:
        """Undoes a step that is not finite; on a GPU this does not synchronize."""
        if finite.is_cuda or not finite:
            for name, (query, error) in self._before.items():
                self.queries[name] = torch.where(finite, self.queries[name], query)
                self.errors[name] = torch.where(finite, self.errors[name], error)
        self._before = {}

    @torch.no_grad()
    def _average(self, _: None, bucket: GradBucket) -> Future[torch.Tensor]:
        matrices, others = {}, []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self.steps >= PLAIN_STEPS and self._pays(gradient):
                matrices[self._names[parameter]] = gradient.view(len(gradient), -1)
            else:
                others.append(gradient)
        sent = self._average_both(matrices, others)
        self.traffic.count(bucket, sent)
        self.steps += bucket.is_last()
        return _done(bucket.buffer())

    def _pays(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2:
            return False
        rows, columns = len(gradient), gradient.numel() // len(gradient)
        return (rows + columns) * min(self.rank, rows, columns) * LEAST_RATIO < rows * columns

    def _average_both(self, matrices: dict[str, torch.Tensor], others: list[torch.Tensor]) -> int:
        """Average in place; returns the bytes sent."""
        # 1. Add what earlier steps left out (error feedback).
        for name, matrix in matrices.items():
            # Both are replaced in a step and never changed in place, so keeping the old ones is
            # enough to undo the step.
            error = self.errors[name] if name in self.errors else torch.zeros_like(matrix)
            self._before[name] = self._last_query(name, matrix), error
            matrix.add_(error, alpha=self._loss_scale)
        # 2. P = M Q, averaged over the ranks. That is a power iteration: Q of the last step already
        # points close to the largest singular vectors. Gradients that are not compressed travel in
        # the same all-reduce.
        ps = [matrix @ torch.linalg.qr(self.queries[name]).Q for name, matrix in matrices.items()]
        sent = _average_together([*ps, *others])
        # 3. Q = M^T P with orthonormal P, averaged as well. M is approximated by P Q^T on every
        # rank alike.
        ps = [torch.linalg.qr(p).Q for p in ps]
        qs = [matrix.T @ p for matrix, p in zip(matrices.values(), ps, strict=True)]
        sent += _average_together(qs)
        # 4. What this rank's gradient had and the approximation lacks is kept for the next step.
        for (name, matrix), p, q in zip(matrices.items(), ps, qs, strict=True):
            approximation = p @ q.T
            self.errors[name] = (matrix - approximation).div_(self._loss_scale)
            self.queries[name] = q
            matrix.copy_(approximation)
        return sent

    def _last_query(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Q (m, rank) of the last step; before the first, a random one that is the same on all ranks."""
        if name not in self.queries:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            self.queries[name] = torch.randn(self._query_shape(matrix), generator=generator).to(
                matrix
            )
        return self.queries[name]

    def _query_shape(self, matrix: torch.Tensor) -> tuple[int, int]:
        return matrix.shape[1], min(self.rank, *matrix.shape)

    def state_dict(self, ranks: Ranks) -> StrategyState:
        """Errors differ between ranks, so all of them together take the gradients' size times the number of ranks."""
        tensors = {f"compression/queries/{name}": query for name, query in self.queries.items()}
        tensors |= {
            f"compression/errors/{ranks.rank}/{name}": error for name, error in self.errors.items()
        }
        plain = {"steps": self.steps, "ranks": ranks.world_size, "columns": self.rank}
        return StrategyState(tensors, {"powersgd": plain})

    def load_state_dict(self, saved: SavedState, ranks: Ranks) -> None:
        """Queries saved for another number of columns are dropped."""
        if (plain := saved.plain.get("powersgd")) is None:
            return
        self.steps, self.queries, self.errors = plain["steps"], {}, {}
        for parameter, name in self._names.items():
            if f"compression/errors/0/{name}" not in saved.tensors:
                continue
            matrix = torch.empty_like(parameter, requires_grad=False).view(len(parameter), -1)
            self.errors[name] = self._read_error(saved, name, matrix, plain["ranks"], ranks)
            if plain["columns"] == self.rank:
                self.queries[name] = matrix.new_empty(self._query_shape(matrix))
                saved.read({f"compression/queries/{name}": self.queries[name]})

    def _read_error(
        self, saved: SavedState, name: str, error: torch.Tensor, num_saved: int, ranks: Ranks
    ) -> torch.Tensor:
        if num_saved == ranks.world_size:
            saved.read({f"compression/errors/{ranks.rank}/{name}": error})
            return error
        mean = torch.zeros_like(error)
        for rank in range(num_saved):
            saved.read({f"compression/errors/{rank}/{name}": error})
            mean += error / num_saved
        return mean


def _average_together(tensors: list[torch.Tensor]) -> int:
    """One all-reduce, in place; returns its bytes."""
    if not tensors:
        return 0
    flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(dist.get_world_size())
    dist.all_reduce(flat)
    for tensor, averaged in zip(
        tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(averaged.view_as(tensor))
    return flat.numel() * flat.element_size()


def _done(buffer: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future
