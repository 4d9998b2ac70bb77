"""Sharded: torchrun --standalone --nproc_per_node=2 learn/one_script/fsdp.py."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 32  # rows per step

# torchrun starts one process per device, and tells each its number on this machine.
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
# Forms the group of all processes: NCCL sends between GPUs, gloo between CPUs.
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

# One seed: every process that runs this draws the same rows and the same first weights.
torch.manual_seed(0)
inputs = torch.randn(1024, 16)
# The class of a row: whether its point is outside a sphere that holds about half of them.
labels = (inputs.square().sum(dim=1) > 16).long()
data = TensorDataset(inputs, labels)
layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(16, 2)).to(device)  # (rows, 16) -> (rows, 2)
# Each rank keeps 1 / world_size of every tensor. A layer is gathered just before it computes.
mesh = dist.init_device_mesh(device.type, (world_size,))
for layer in layers:
    fully_shard(layer, mesh=mesh)
# Then what is left, here the last linear layer.
fully_shard(model, mesh=mesh)
# After sharding: the optimizer must hold the shards, and so keeps the moments of those only.
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

# Rank r gets row r of the shuffled order and every world_size-th one after it. All ranks together
# still train on BATCH_SIZE rows per step.
sampler = DistributedSampler(data)
loader = DataLoader(data, BATCH_SIZE // world_size, sampler=sampler)
for epoch in range(5):
    # Without it, every epoch would have the order of the first.
    sampler.set_epoch(epoch)
    # A tensor on the device: .item() in each step would wait until the step is done.
    total = torch.zeros((), device=device)
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    # Each rank has the losses of its own rows. All ranks make the call, although only one prints:
    # under `if rank == 0` it would wait for the others forever.
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {total.item() / world_size / len(loader):.6f}", flush=True)

# Nobody has the whole model, so all ranks take part in gathering it. Only rank 0 keeps it.
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
weights = get_model_state_dict(model, options=options)
if rank == 0:
    torch.save(weights, "model.pt")
dist.destroy_process_group()
