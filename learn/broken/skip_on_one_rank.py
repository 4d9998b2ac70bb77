"""A batch that only one rank skips, as its loss is not finite: then the ranks are one batch apart.

    torchrun --standalone --nproc_per_node=2 learn/broken/skip_on_one_rank.py
    torchrun --standalone --nproc_per_node=2 learn/broken/skip_on_one_rank.py --fixed

It hangs many steps after the mistake. With ``--fixed`` all ranks skip the batch if one has to.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
STEPS = 8

dist.init_process_group("gloo", timeout=timedelta(seconds=10))  # the default is 30 minutes
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(STEPS, 32, 8)
rows[2, 1, 0] = torch.inf  # a broken row in the third batch of rank 1

for step in range(STEPS):
    inputs = rows[step, rank::world_size]
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    finite = loss.detach().isfinite()
    if not finite:
        print(f"rank {rank}: the loss of step {step + 1} is not finite", flush=True)
    # Each rank sees only its own loss, but they must decide together: a rank that skips makes no
    # all-reduce in this step, and the others' call is then matched with its next one.
    if FIXED:
        finite = finite.float()
        dist.all_reduce(finite, dist.ReduceOp.MIN)  # 0 on every rank if it is 0 on one of them
    if not finite:
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# The broken rank is here one step early, while the other is in an all-reduce: both wait.
dist.barrier()
weights = [None] * world_size
dist.all_gather_object(weights, f"{model.module.weight[0, 0]:.4f}")
if rank == 0:
    print(f"trained; the first weight by rank: {', '.join(weights)}", flush=True)
dist.destroy_process_group()
