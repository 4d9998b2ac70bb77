"""Uneven batches: of 81 rows rank 0 has 41 and rank 1 has 40, so rank 0 has one batch more.

    torchrun --standalone --nproc_per_node=2 learn/broken/uneven_batches.py
    torchrun --standalone --nproc_per_node=2 learn/broken/uneven_batches.py --fixed

It hangs at the end of the epoch. With ``--fixed`` rank 1 waits until rank 0 is done too.
"""

import sys
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
ROWS, BATCH = 81, 8

dist.init_process_group("gloo", timeout=timedelta(seconds=10))  # the default is 30 minutes
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(ROWS, 8)
# Every world_size-th row: 41 make six batches of up to 8, and 40 make five.
batches = rows[rank::world_size].split(BATCH)
if rank == 0:
    counts = [len(rows[r::world_size].split(BATCH)) for r in range(world_size)]
    print(f"batches by rank: {counts}", flush=True)

# In `join`, a rank without batches answers the others' collectives with zeros. The flag is for the
# last gradient: it is divided by 1, the number of ranks that still have a batch, and not by 2.
with model.join(divide_by_initial_world_size=False) if FIXED else nullcontext():
    # Each backward pass has an all-reduce, so the ranks must make the same number of them.
    for inputs in batches:
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

dist.barrier()
weights = [None] * world_size
dist.all_gather_object(weights, f"{model.module.weight[0, 0]:.4f}")
if rank == 0:
    print(f"trained; the first weight by rank: {', '.join(weights)}", flush=True)
dist.destroy_process_group()
