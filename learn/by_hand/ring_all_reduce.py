"""All-reduce by hand, as a ring of sends and receives.

    torchrun --standalone --nproc_per_node=4 learn/by_hand/ring_all_reduce.py

Every rank holds a tensor as large as the others' and wants the sum of all. If each sent its whole
tensor to every other, N - 1 times the tensor would leave every rank. Instead the tensor is cut into
N chunks, and every rank only ever sends to the next one, around the ring:

- reduce-scatter, N - 1 steps: a chunk travels from rank to rank and each adds its own part. At the
  end every rank holds one chunk that is the sum of all.
- all-gather, N - 1 steps: the summed chunks travel around once more and replace what each rank had.

2 (N - 1) steps of 1/N of the tensor: 2 (N - 1) / N of it leave each rank, nearly the same for 4
ranks as for 4,000. If only the ranks can add, no all-reduce sends less; a switch that adds (SHARP)
needs about half. But each step also costs the latency of a message, 2 (N - 1) of them one after the
other: for small tensors on many ranks NCCL sends along trees. Each chunk is summed hop by hop, then
copied: all ranks hold the same bits.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist

from learn.by_hand.demonstration import demonstrate
from training.distributed.ranks import Ranks

REDUCE_SCATTER, ALL_GATHER = "reduce-scatter", "all-gather"


@dataclass(frozen=True)
class Step:
    """What one rank did in one step: the chunks by their number, and the bytes that it sent."""

    phase: str
    sent: int
    received: int
    num_bytes: int


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Sum a contiguous tensor over all ranks, in place, as ``dist.all_reduce`` does.

    Returns:
        The bytes that this rank has sent.
    """
    return sum(step.num_bytes for step in ring_steps(tensor))


def ring_steps(tensor: torch.Tensor) -> Iterator[Step]:
    """The same as a generator that does one step per ``next``: 2 (N - 1) steps on N ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # Views: writing into a chunk writes into the tensor. If N does not divide the tensor, the first
    # chunks have one element more; if it has fewer than N elements, the last chunks are empty.
    # `view` and not `reshape`, which would silently copy a tensor that is not contiguous.
    chunks = tensor.detach().view(-1).tensor_split(size)
    # Every rank begins with the chunk of its own number, so that all N links are busy in each step
    # and each carries another chunk. In the next step a rank passes on what it has just received
    # and added to. On 4 ranks, the chunks that rank 0 sends are 0, 3 and 2.
    for step in range(size - 1):
        yield _pass_on(chunks, REDUCE_SCATTER, (rank - step) % size)
    # A chunk has now visited all ranks, after N - 1 hops. Chunk rank + 1 holds the whole sum on
    # this rank, so that is the first one to pass on.
    for step in range(size - 1):
        yield _pass_on(chunks, ALL_GATHER, (rank + 1 - step) % size)


def _pass_on(chunks: Sequence[torch.Tensor], phase: str, sent: int) -> Step:
    """Send a chunk to the next rank while the chunk before it comes from the previous rank."""
    rank, size = dist.get_rank(), len(chunks)
    # The previous rank sends the chunk whose number is one less, because all ranks count the same
    # way. Nobody has to say which chunk is on its way.
    received = (sent - 1) % size
    # A buffer of its own: the chunk still holds this rank's part, which the arriving one is added
    # to.
    incoming = torch.empty_like(chunks[received])
    # Start both before waiting for either: if every rank first waited for its send, none would ever
    # receive.
    send = dist.isend(chunks[sent], (rank + 1) % size)
    receive = dist.irecv(incoming, (rank - 1) % size)
    for transfer in (send, receive):
        transfer.wait()
    if phase == REDUCE_SCATTER:
        chunks[received].add_(incoming)  # a partial sum: now this rank's part is in it, too
    else:
        chunks[received].copy_(incoming)  # the whole sum: it replaces what this rank had
    return Step(phase, sent, received, chunks[sent].nbytes)


def show(ranks: Ranks) -> None:
    """Print what every rank holds after each step; the gather is only for printing."""
    # Nine elements: only 3 and 9 ranks divide them, so most runs show chunks of two sizes.
    size, tensor = ranks.world_size, torch.arange(1, 10) * 10**ranks.rank
    expected = tensor.clone()
    dist.all_reduce(expected)

    print_once = print if ranks.is_first else lambda *_: None
    digits = "Rank r holds 1 to 9, times 10^r: the digits of a sum tell which ranks are in it."
    print_once(f"{digits} {size} ranks, {size} chunks.")
    print_once("\nbefore")
    _print_rows(ranks, tensor, received=None)
    sent_bytes = 0
    for number, step in enumerate(ring_steps(tensor)):
        sent_bytes += step.num_bytes
        verb = "adds" if step.phase == REDUCE_SCATTER else "takes"
        place = f"{step.phase}, step {number % (size - 1) + 1} of {size - 1}"
        print_once(f"\n{place}: each rank {verb} the chunk marked *")
        _print_rows(ranks, tensor, step.received)

    print_once(f"\nbytes sent by each rank: {ranks.gather(sent_bytes)}")
    limit = 2 * (size - 1) / size * tensor.nbytes
    print_once(f"2 (N - 1) / N of the tensor's {tensor.nbytes} bytes: {limit:g}")
    equal = ranks.gather(torch.equal(tensor, expected))
    print_once(f"equal to dist.all_reduce, rank by rank: {equal}")


def _print_rows(ranks: Ranks, tensor: torch.Tensor, received: int | None) -> None:
    # As wide as the largest sum has digits, one per rank, and a space.
    width = ranks.world_size + 1
    # The gather is a collective, so every rank makes it, although only rank 0 prints.
    for rank, (held, marked) in enumerate(ranks.gather((tensor, received))):
        cells = [
            (" *"[index == marked]) + "".join(f"{value:{width}}" for value in chunk.tolist())
            for index, chunk in enumerate(held.tensor_split(ranks.world_size))
        ]
        if ranks.is_first:
            print(f"  rank {rank} |" + " |".join(cells))


if __name__ == "__main__":
    demonstrate("learn/by_hand/ring_all_reduce.py", show)
