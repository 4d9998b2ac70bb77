"""Data parallel: torchrun --standalone --nproc_per_node=2 learn/one_script/ddp.py."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 32

local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
inputs = torch.randn(1024, 16)
labels = (inputs.square().sum(dim=1) > 16).long()
data = TensorDataset(inputs, labels)
layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(16, 2)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

sampler = DistributedSampler(data)
loader = DataLoader(data, BATCH_SIZE // world_size, sampler=sampler)
for epoch in range(5):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {total.item() / world_size / len(loader):.6f}", flush=True)

if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
