"""Which rank writes which part of a state: each part once, all ranks about equally much.

A part that several ranks hold (a DDP replica, the replicas of hybrid sharding) is cut into pieces,
which are divided among the ranks that hold it. Every rank computes the same assignment on its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from training.distributed.ranks import Ranks

PIECE_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Chunk:
    """A box inside a tensor: its offsets, its own shape, and the shape of the whole tensor."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> list[Chunk]:
        """The chunk cut along its first dimension, into pieces of about ``PIECE_BYTES``."""
        if self.num_bytes <= PIECE_BYTES:
            return [self]
        rows = max(1, PIECE_BYTES * self.shape[0] // self.num_bytes)
        return [
            replace(
                self,
                offsets=(self.offsets[0] + start, *self.offsets[1:]),
                shape=(min(rows, self.shape[0] - start), *self.shape[1:]),
            )
            for start in range(0, self.shape[0], rows)
        ]

    def cut_from(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers of this chunk as a view of a tensor that holds at least them."""
        held = chunk_of(self.name, tensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if held.shape == self.shape:
            return local
        return local.narrow(0, self.offsets[0] - held.offsets[0], self.shape[0])


def chunk_of(name: str, tensor: torch.Tensor) -> Chunk:
    """The part of a tensor that this rank holds: of a plain one all, of a DTensor its shard."""
    shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        shape, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return Chunk(name, tuple(offsets), tuple(shape), tuple(tensor.shape), tensor.dtype)


def assign_pieces(held: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """Assign every piece to one of the ranks that hold it.

    ``held`` is what each rank holds; the result is what each rank writes.
    """
    # Equal chunks on several ranks are the same numbers: under DDP every rank holds everything,
    # under FSDP only its shard, and with hybrid sharding one rank per replica.
    holders: dict[Chunk, list[int]] = {}
    for rank, chunks in enumerate(held):
        for chunk in chunks:
            if chunk.num_bytes:  # an uneven split leaves the last ranks nothing
                holders.setdefault(chunk, []).append(rank)
    # Greedy, largest first, which comes close to the best balance. The order is fixed, so that all
    # ranks agree.
    loads, owned = [0] * len(held), [[] for _ in held]
    for chunk in sorted(holders, key=lambda chunk: _write_order(chunk, len(holders[chunk]))):
        for piece in chunk.pieces():
            rank = min(holders[chunk], key=loads.__getitem__)
            loads[rank] += piece.num_bytes
            owned[rank].append(piece)
    return owned


def _write_order(chunk: Chunk, num_holders: int) -> tuple[object, ...]:
    # Chunks that only one rank can write come first, so that the others can make up for them.
    return num_holders > 1, -chunk.num_bytes, chunk.name, chunk.offsets


class Ownership:
    """This rank's pieces of a state; the assignment is kept until any rank holds another part."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._held: list[Chunk] | None = None
        self._owned: list[Chunk] = []

    def pieces(self, tensors: Mapping[str, torch.Tensor]) -> list[Chunk]:
        """What this rank writes of ``tensors``; a collective call."""
        held = [chunk_of(name, tensor) for name, tensor in tensors.items()]
        # What the ranks hold never changes in most runs, so the assignment is computed at the first
        # save only.
        # Asked of all ranks, because the assignment is a collective, in which all take part.
        if self.ranks.any(held != self._held):
            self._held = held
            self._owned = assign_pieces(self.ranks.gather(held))[self.ranks.rank]
        return self._owned
