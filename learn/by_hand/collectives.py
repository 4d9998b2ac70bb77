"""The collectives on small numbers: what every rank holds before and after each.

    torchrun --standalone --nproc_per_node=4 learn/by_hand/collectives.py

A collective is a call that every rank of a group makes, in the same order. Distributed training
uses only the few below. Rank r holds 1 to N, times 10^r, so that the digits of a sum tell which
ranks are in it. Each function is a generator: it yields what this rank holds before, makes the
call, and yields what it holds after.

Source: the MPI standard, chapter "Collective Communication".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist

from learn.by_hand.demonstration import demonstrate
from training.distributed.ranks import Ranks

Held = Iterator[torch.Tensor]  # what this rank holds before, and then after
NOTHING = torch.empty(0)  # printed as -

# In each function, row has the shape (N,), and own has the shape (1,): one number per rank.


def broadcast(row: torch.Tensor) -> Held:
    """All get what rank 0 has. This is how replicas start equal."""
    yield row
    # All ranks make the same call. src says who gives, not who calls: rank 0 sends from this
    # tensor, and on the others it is overwritten.
    dist.broadcast(row, src=0)
    yield row


def reduce(row: torch.Tensor) -> Held:
    """Rank 0 gets the sum; what the others hold afterwards is undefined. A loss that only rank 0
    logs.
    """
    yield row
    # Cheaper than an all-reduce, because the result goes to one rank only. The others take part
    # all the same: a reduce that only rank 0 calls waits forever.
    dist.reduce(row, dst=0)
    # A backend may use the other ranks' tensors for partial sums: nobody may read them any more.
    yield row if dist.get_rank() == 0 else NOTHING


def all_reduce(row: torch.Tensor) -> Held:
    """All get the sum. This is how data parallelism averages gradients."""
    yield row
    # The result is a reduce and a broadcast in one. A library does better than one after the
    # other, with rings or trees (see ring_all_reduce.py).
    dist.all_reduce(row)
    yield row


def scatter(row: torch.Tensor) -> Held:
    """Rank 0 hands out its numbers, for example rows that it has read."""
    is_first, own = dist.get_rank() == 0, torch.empty_like(row[:1])
    yield row if is_first else NOTHING
    # Only rank 0 has anything to give, so only rank 0 passes a list: its r-th part is for rank r.
    parts = list(row.chunk(len(row))) if is_first else None
    dist.scatter(own, parts, src=0)
    yield own


def gather(row: torch.Tensor) -> Held:
    """Rank 0 collects one number of each. The whole model, to be written to a file."""
    # The reverse of scatter.
    is_first, own, gathered = dist.get_rank() == 0, row[:1], torch.empty_like(row)
    yield own
    # The parts are views of one tensor, so what arrives is in order without another copy. Rank 0
    # needs memory for N parts: for a large model that is what makes a gather expensive.
    parts = list(gathered.chunk(len(row))) if is_first else None
    dist.gather(own, parts, dst=0)
    yield gathered if is_first else NOTHING


def all_gather(row: torch.Tensor) -> Held:
    """All collect one number of each. This is how FSDP puts a block's weights together just before
    it runs.
    """
    own, gathered = row[:1], torch.empty_like(row)
    yield own
    # A gather whose result is on every rank. Nothing is computed: bytes are only copied.
    dist.all_gather(list(gathered.chunk(len(row))), own)
    yield gathered


def reduce_scatter(row: torch.Tensor) -> Held:
    """Each gets its part of the sum. This is how FSDP leaves each rank the gradients of its
    shard.
    """
    own = torch.empty_like(row[:1])
    yield row
    # The r-th parts of all ranks are summed, and the sum is on rank r only. Followed by an
    # all-gather it would be an all-reduce; ZeRO and FSDP do something between the two halves.
    dist.reduce_scatter(own, list(row.chunk(len(row))))
    yield own


def all_to_all(row: torch.Tensor) -> Held:
    """Each sends a number to each: rows become columns. This is how tokens travel to their
    experts.
    """
    columns = torch.empty_like(row)
    yield row
    # The r-th number of this row goes to rank r, and the r-th number of `columns` comes from rank
    # r: if you write the ranks' rows below each other, it is a transposition.
    dist.all_to_all_single(columns, row)
    yield columns


def send_and_receive(row: torch.Tensor) -> Held:
    """Each sends to the next rank: not a collective, as two ranks take part. Pipeline stages talk
    like this.
    """
    rank, size, received = dist.get_rank(), dist.get_world_size(), torch.empty_like(row)
    yield row
    # Both are started before either is waited for. With a blocking send first, every rank might
    # wait for a receiver, and none would be one.
    for transfer in (dist.isend(row, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)):
        transfer.wait()
    yield received


COLLECTIVES = (
    *(broadcast, reduce, all_reduce),
    *(scatter, gather, all_gather, reduce_scatter),
    *(all_to_all, send_and_receive),
)


def show(ranks: Ranks) -> None:
    """Run each and print what the ranks held; the gather is only for printing."""
    size, width = ranks.world_size, ranks.world_size + 1
    for collective in COLLECTIVES:
        row = torch.arange(1, size + 1) * 10**ranks.rank
        rows = ranks.gather([held.tolist() for held in collective(row)])
        if not ranks.is_first:
            continue
        print(f"{collective.__name__}: {' '.join(collective.__doc__.split())}")
        for rank, states in enumerate(rows):
            before, after = ("".join(f"{one:{width}}" for one in held) or " -" for held in states)
            print(f"  rank {rank} |{before:{size * width}}  ->  {after}".rstrip())
        print()


if __name__ == "__main__":
    demonstrate("learn/by_hand/collectives.py", show)
