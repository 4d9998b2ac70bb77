"""Gradient compression: hooks of DDP that put fewer bytes on the wire, and count them.

``fp16`` and ``bf16`` halve what is sent; ``powersgd:rank`` sends two thin matrices for each large one (Vogels et al.,
"PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", arXiv 1905.13727, algorithms 1 and 2).

PowerSGD is written out here, since torch's own hook (``powerSGD_hook``) lets each bucket's second and third all-reduce
start from a callback: over gloo two ranks may start them in another order, and the run dies. It also keeps its state by
bucket, which another bucket order cannot take up, and in the loss scale of the step before.
"""

# No `from __future__ import annotations`: DDP reads a hook's annotations, and wants the classes themselves.

from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from training.model.precision import DTYPES
from training.parallelism.distributed import Ranks
from training.parallelism.state import SavedState, StrategyState

DEFAULT_RANK = 4
# The gradients of the first steps turn fastest, and are the worst to approximate.
PLAIN_STEPS = 10
# A matrix is left as it is unless its two factors have less than half its numbers.
LEAST_RATIO = 2


class Traffic:
    """Bytes that a rank gives to all-reduces in a step: ``plain`` without compression, ``sent`` with it."""

    def __init__(self) -> None:
        self.plain = self.sent = 0
        self._plain = self._sent = 0

    def count(self, bucket: GradBucket, sent: int) -> None:
        """Add a bucket; the step's figures stand once its last one is in."""
        buffer = bucket.buffer()
        self._plain += buffer.numel() * buffer.element_size()
        self._sent += sent
        if bucket.is_last():
            self.plain, self.sent = self._plain, self._sent
            self._plain = self._sent = 0

    def __str__(self) -> str:
        if not self.sent:
            return ""
        ratio = self.plain / self.sent
        return f": {self.sent / 1e6:.3g} MB a step and rank, not {self.plain / 1e6:.3g} MB ({ratio:.1f}x less)"


class Compression(Protocol):
    """A way to average gradients over the ranks, in the place of DDP's own."""

    traffic: Traffic

    def attach(self, replica: DistributedDataParallel) -> None:
        """Become the hook of ``replica``, whose buckets must have been put in their final order."""

    def begin_step(self, loss_scale: float | None) -> None:
        """Tell the factor on all gradients of the coming step; None where there is no loss scale."""

    def end_step(self, finite: torch.Tensor) -> None:
        """Tell whether the step counts, (): one whose gradient norm is not finite leaves no trace."""

    def state_dict(self, ranks: Ranks) -> StrategyState:
        """What this rank holds of what a checkpoint must keep."""

    def load_state_dict(self, saved: SavedState, ranks: Ranks) -> None:
        """Take up what :meth:`state_dict` gave, on any number of ranks; start anew where nothing was saved."""


def build_compression(asked: str) -> Compression | None:
    """What ``--compress`` names; None for ``none``."""
    if asked == "none":
        return None
    if asked in DTYPES:
        return Cast(DTYPES[asked])
    return PowerSGD(int(asked.partition(":")[2] or DEFAULT_RANK))


class Cast:
    """Gradients averaged in another dtype. fp16 loses what is below 6e-8, bf16 all but 8 bits of each number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.traffic = Traffic()

    def attach(self, replica: DistributedDataParallel) -> None:
        """See :class:`Compression`."""
        replica.register_comm_hook(None, self._average)

    def _average(self, _: None, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        # Divided first: the sum of ranks could exceed the range of fp16.
        cast = buffer.div_(dist.get_world_size()).to(self.dtype)
        self.traffic.count(bucket, cast.numel() * cast.element_size())
        return dist.all_reduce(cast, async_op=True).get_future().then(lambda sent: buffer.copy_(sent.value()[0]))

    def begin_step(self, loss_scale: float | None) -> None:
        """Nothing to do: an overflow is infinite on all ranks, and the norm shows it."""

    def end_step(self, finite: torch.Tensor) -> None:
        """Nothing to forget."""

    def state_dict(self, ranks: Ranks) -> StrategyState:
        """No state."""
        return StrategyState({}, {})

    def load_state_dict(self, saved: SavedState, ranks: Ranks) -> None:
        """No state."""


class PowerSGD:
    """Each gradient matrix M (n, m) averaged as P Q^T, with P (n, rank) and Q (m, rank).

    What the approximation leaves out is added to the next step's gradient (error feedback), each rank its own part, and
    Q starts the next approximation. Both are kept by parameter name, the errors without the loss scale. A run that goes
    on with another number of ranks gives each the mean of the errors: their mean is all that training sees.

    Args:
        rank: columns of P and Q; more are closer to the gradient and more to send.
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
        """See :class:`Compression`."""
        self._names = {parameter: name for name, parameter in replica.module.named_parameters()}
        replica.register_comm_hook(None, self._average)

    def begin_step(self, loss_scale: float | None) -> None:
        """See :class:`Compression`."""
        self._loss_scale = loss_scale or 1.0

    def end_step(self, finite: torch.Tensor) -> None:
        """See :class:`Compression`; on a GPU nobody waits for the answer."""
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
        """Average in place; returns the bytes this took."""
        for name, matrix in matrices.items():
            # Both are replaced in a step, never changed in place: holding the old ones is enough to go back.
            error = self.errors[name] if name in self.errors else torch.zeros_like(matrix)
            self._before[name] = self._last_query(name, matrix), error
            matrix.add_(error, alpha=self._loss_scale)
        ps = [matrix @ torch.linalg.qr(self.queries[name]).Q for name, matrix in matrices.items()]
        sent = _average_together([*ps, *others])
        ps = [torch.linalg.qr(p).Q for p in ps]
        qs = [matrix.T @ p for matrix, p in zip(matrices.values(), ps, strict=True)]
        sent += _average_together(qs)
        for (name, matrix), p, q in zip(matrices.items(), ps, qs, strict=True):
            approximation = p @ q.T
            self.errors[name] = (matrix - approximation).div_(self._loss_scale)
            self.queries[name] = q
            matrix.copy_(approximation)
        return sent

    def _last_query(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Q (m, rank) of the last step, or at first a random one, the same on all ranks."""
        if name not in self.queries:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            self.queries[name] = torch.randn(self._query_shape(matrix), generator=generator).to(matrix)
        return self.queries[name]

    def _query_shape(self, matrix: torch.Tensor) -> tuple[int, int]:
        return matrix.shape[1], min(self.rank, *matrix.shape)

    def state_dict(self, ranks: Ranks) -> StrategyState:
        """See :class:`Compression`; the errors of all ranks are as large as the gradients times the ranks."""
        tensors = {f"compression/queries/{name}": query for name, query in self.queries.items()}
        tensors |= {f"compression/errors/{ranks.rank}/{name}": error for name, error in self.errors.items()}
        plain = {"steps": self.steps, "ranks": ranks.world_size, "columns": self.rank}
        return StrategyState(tensors, {"powersgd": plain})

    def load_state_dict(self, saved: SavedState, ranks: Ranks) -> None:
        """See :class:`Compression`; of queries for another number of columns nothing is taken up."""
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
    """Average tensors over the ranks in place, by one all-reduce; returns its bytes."""
    if not tensors:
        return 0
    flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(dist.get_world_size())
    dist.all_reduce(flat)
    for tensor, averaged in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(averaged.view_as(tensor))
    return flat.numel() * flat.element_size()


def _done(buffer: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future
