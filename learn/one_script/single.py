"""One device: python learn/one_script/single.py."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

BATCH_SIZE = 32

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
inputs = torch.randn(1024, 16)
labels = (inputs.square().sum(dim=1) > 16).long()
data = TensorDataset(inputs, labels)
layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(16, 2)).to(device)

optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

order = torch.Generator()
sampler = RandomSampler(data, generator=order)
loader = DataLoader(data, BATCH_SIZE, sampler=sampler)
for epoch in range(5):
    order.manual_seed(epoch)
    total = torch.zeros((), device=device)
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    print(f"epoch {epoch}: loss {total.item() / len(loader):.6f}", flush=True)

torch.save(model.state_dict(), "model.pt")
