"""One device: python learn/one_script/single.py."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

BATCH_SIZE = 32  # rows per step

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# One seed: every process that runs this draws the same rows and the same first weights.
torch.manual_seed(0)
inputs = torch.randn(1024, 16)
# The class of a row: whether its point is outside a sphere that holds about half of them.
labels = (inputs.square().sum(dim=1) > 16).long()
data = TensorDataset(inputs, labels)
layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(16, 2)).to(device)  # (rows, 16) -> (rows, 2)

optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

# The order of the rows depends on the epoch only, so that it can be the same on several ranks.
order = torch.Generator()
sampler = RandomSampler(data, generator=order)
loader = DataLoader(data, BATCH_SIZE, sampler=sampler)
for epoch in range(5):
    order.manual_seed(epoch)
    # A tensor on the device: .item() in each step would wait until the step is done.
    total = torch.zeros((), device=device)
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    print(f"epoch {epoch}: loss {total.item() / len(loader):.6f}", flush=True)

torch.save(model.state_dict(), "model.pt")
