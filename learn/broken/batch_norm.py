"""BatchNorm on ranks with different rows: each normalizes by its own, and rank 0's statistics stay.

    torchrun --standalone --nproc_per_node=2 learn/broken/batch_norm.py
    torchrun --standalone --nproc_per_node=2 learn/broken/batch_norm.py --fixed

Nothing fails. With ``--fixed`` all ranks normalize by the rows of all ranks.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
STEPS, WIDTH = 100, 32


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        # Of a copy: x belongs to the forward pass, and the collective writes into its argument.
        dist.all_reduce(x := x.clone())
        return x

    # Each rank's loss depends on every rank's x, so the gradients are summed too.
    backward = forward


class SyncedBatchNorm(nn.BatchNorm1d):
    """BatchNorm over all ranks' rows; ``nn.SyncBatchNorm`` takes GPU tensors only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (rows, features)
        if not self.training:
            return super().forward(x)
        # (2, features): the means of x and of x squared over this rank's rows, summed over the
        # ranks. All ranks have the same number of rows, so dividing gives the mean over all rows.
        sums = SumOverRanks.apply(torch.stack([x.mean(0), (x * x).mean(0)]))
        mean, mean_square = sums / dist.get_world_size()
        # From the squares, because it needs no second exchange: nobody has to know the mean first.
        variance = mean_square - mean * mean
        # Kept for evaluation, which must not depend on the batch.
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
norm = SyncedBatchNorm(WIDTH) if FIXED else nn.BatchNorm1d(WIDTH)
layers = nn.Sequential(nn.Linear(2, WIDTH), norm, nn.ReLU(), nn.Linear(WIDTH, 2))
model = DistributedDataParallel(layers)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
rows = torch.randn(STEPS + 1, 256, 2)  # (steps and a last batch for the test, rows, features)
labels = (rows[..., 1] > 0).long()
rows[:, 128:] += 4  # the second half is from another source, such as a brighter camera

for step in range(STEPS):
    # Not shuffled: of two ranks, rank 0 gets all rows of one source and rank 1 all of the other.
    x, y = rows[step].chunk(world_size)[rank], labels[step].chunk(world_size)[rank]
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.module.eval()  # rank 0's model is what would be saved
losses = [None] * world_size
dist.all_gather_object(losses, f"{loss:.2f}")
if rank == 0:
    print(f"last training loss by rank: {', '.join(losses)}")
    sources = zip(rows[-1].chunk(2), labels[-1].chunk(2), strict=True)
    for source, (x, y) in enumerate(sources):
        # A row or two depend on rounding.
        accuracy = round((model.module(x).argmax(1) == y).float().mean().item(), 1)
        where = f"rank 0's model on new rows of source {source}"
        print(f"accuracy of {where}: about {accuracy:.0%}", flush=True)
dist.destroy_process_group()
