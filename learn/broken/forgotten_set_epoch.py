"""A forgotten `set_epoch`: the sampler shuffles, but in the same way in each epoch.

    torchrun --standalone --nproc_per_node=2 learn/broken/forgotten_set_epoch.py
    torchrun --standalone --nproc_per_node=2 learn/broken/forgotten_set_epoch.py --fixed

Nothing fails, and the loss falls. With ``--fixed`` each epoch has its own order.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv
EPOCHS, ROWS, BATCH = 3, 24, 6

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(ROWS, 8)
# With each row's number, to see which rows a batch has.
data = TensorDataset(torch.arange(ROWS), inputs, inputs.sum(1, keepdim=True))
# Its order follows from seed + epoch, so that all ranks shuffle alike without communication. But
# a sampler does not notice that an epoch is over: it has to be told.
sampler = DistributedSampler(data, shuffle=True, seed=0)
loader = DataLoader(data, BATCH, sampler=sampler)

for epoch in range(EPOCHS):
    if FIXED:
        sampler.set_epoch(epoch)
    order, total = [], 0.0
    for numbers, batch, targets in loader:
        loss = nn.functional.mse_loss(model(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        order += numbers.tolist()
        total += loss.item()
    # Of rank 0 only. Rank 1 has the other half of the rows, in every epoch if the order stays.
    if rank == 0:
        found = f"loss {total / len(loader):.3f}, first rows {order[:BATCH]}"
        print(f"epoch {epoch}: {found}", flush=True)

dist.destroy_process_group()
