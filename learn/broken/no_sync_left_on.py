"""`no_sync` left on in the last micro-batch: each rank adds its own gradients after the average.

    torchrun --standalone --nproc_per_node=2 learn/broken/no_sync_left_on.py
    torchrun --standalone --nproc_per_node=2 learn/broken/no_sync_left_on.py --fixed

Nothing fails, and the loss falls. With ``--fixed`` the last micro-batch averages the sum.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
STEPS, ACCUMULATE = 8, 2

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(STEPS, ACCUMULATE, 16, 8)  # (steps, micro-batches, rows of all ranks, features)

for step in range(STEPS):
    # Once per step: the gradients of the micro-batches add up in .grad.
    optimizer.zero_grad()
    for micro_batch in range(ACCUMULATE):
        # The sum of the gradients must be averaged over the ranks in the last micro-batch. The
        # broken condition is true in the first one, so the gradients of the second stay as they are
        # on each rank.
        is_last = (micro_batch + 1) % ACCUMULATE == 0 if FIXED else micro_batch % ACCUMULATE == 0
        inputs = rows[step, micro_batch, rank::world_size]
        # In no_sync nothing is sent; the last backward pass then averages the whole sum. One
        # all-reduce per step instead of one per micro-batch.
        with nullcontext() if is_last else model.no_sync():
            # Divided, so that the sum of the micro-batches is a mean, as that of one large batch.
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)) / ACCUMULATE
            loss.backward()
    # If the last gradient was not averaged, each rank takes a step of its own here.
    optimizer.step()
    if rank == 0:
        print(f"step {step + 1}: loss {loss * ACCUMULATE:.3f}", flush=True)

# The loss does not show it: each rank's model fits its own rows. The weights do.
weights = [torch.empty_like(model.module.weight) for _ in range(world_size)]
dist.all_gather(weights, model.module.weight.detach())
if rank == 0:
    difference = max((w - weights[0]).abs().max() for w in weights)
    print(f"largest difference between the ranks' weights: {difference:.4f}")
dist.destroy_process_group()
