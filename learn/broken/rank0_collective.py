"""A collective under `if rank == 0`: only rank 0 needs the sum of the losses, and asks for it.

    torchrun --standalone --nproc_per_node=2 learn/broken/rank0_collective.py
    torchrun --standalone --nproc_per_node=2 learn/broken/rank0_collective.py --fixed

It hangs in the fifth step. With ``--fixed`` every rank calls the reduction.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
STEPS, LOG_EVERY = 8, 4

dist.init_process_group("gloo", timeout=timedelta(seconds=10))  # the default is 30 minutes
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(STEPS, 32, 8)  # (steps, rows of all ranks, features): one seed, so all draw them
total = torch.zeros(())  # of this rank's losses since the last line

for step in range(STEPS):
    inputs = rows[step, rank::world_size]
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.detach()
    if (step + 1) % LOG_EVERY == 0:
        # A reduce needs all ranks: dst says who gets the sum, not who calls.
        if FIXED:
            dist.reduce(total, dst=0)
        # Broken: rank 0 waits in there, and the others for its gradients in their next step.
        if rank == 0:
            if not FIXED:
                dist.reduce(total, dst=0)
            print(f"step {step + 1}: mean loss {total / LOG_EVERY / world_size:.3f}", flush=True)
        total.zero_()

dist.destroy_process_group()
