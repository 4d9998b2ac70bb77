"""With calls that wait: no deadlock, because the odd ranks receive first."""

from itertools import pairwise

import torch
import torch.distributed as dist


def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank % 2 == 0:
        dist.send(sent, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
    else:
        dist.recv(received, (rank - 1) % size)
        dist.send(sent, (rank + 1) % size)


def ring_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = [tensor.numel() * index // size for index in range(size + 1)]
    chunks = [tensor.view(-1)[first:end] for first, end in pairwise(ends)]
    for step in range(2 * (size - 1)):
        received = chunks[(rank - 2 - step) % size]
        incoming = torch.empty_like(received)
        exchange(chunks[(rank - 1 - step) % size], incoming)
        if step < size - 1:
            received += incoming
        else:
            received[:] = incoming
    return tensor
