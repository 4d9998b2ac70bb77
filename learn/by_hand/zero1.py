"""ZeRO stage 1 by hand: the optimizer's state, sharded over the ranks.

    torchrun --standalone --nproc_per_node=4 learn/by_hand/zero1.py

Adam keeps two moments for every parameter, in fp32 twice the model's size, and data parallelism
keeps them on every rank: N equal copies, though each weight needs only one. So each rank owns 1/N
of the weights, as one flat vector:

- reduce-scatter the gradients: each rank gets only the sum for its own share;
- it steps its share, so it needs only the moments of that share;
- all-gather the weights: each rank has the whole model again.

Adam updates every weight independently of the others, so sharding does not change the result. The
two collectives are the halves of an all-reduce (see ``ring_all_reduce.py``): NCCL sends no more
than before. Gloo builds its reduce-scatter from all-reduces.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.1 (P_os) and 7.2.1 (what it sends).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from learn.by_hand.demonstration import demonstrate, largest_gap
from training.distributed.ranks import Ranks


def create_sharded_adam(
    parameters: Sequence[nn.Parameter],
    learning_rate: float,
) -> torch.optim.Adam:
    # One vector instead of whole parameters: any weight can be at the border of two shares, so all
    # shares are of one size, however different the parameters are.
    weights = _flatten([parameter.detach() for parameter in parameters])
    share = weights.chunk(dist.get_world_size())[dist.get_rank()]  # (padded weights / ranks,)
    # Adam creates its moments for what it holds: two tensors as large as the share, not as the
    # model. The share is copied, because a view would keep all weights in memory.
    return torch.optim.Adam([nn.Parameter(share.clone())], lr=learning_rate)


def reduce_scatter_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The mean over the ranks of this rank's share of the gradients."""
    gradients = _flatten([parameter.grad for parameter in parameters])
    shares = list(gradients.chunk(dist.get_world_size()))
    mean = torch.empty_like(shares[0])
    # shares[r] of all ranks are summed on rank r. This rank's share is complete here; the others
    # are complete elsewhere, and nobody has the whole mean gradient.
    dist.reduce_scatter(mean, shares)
    # A sum of N means over rows: divided by N it is the mean over the global batch.
    return mean / dist.get_world_size()


def zero1_step(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Adam) -> None:
    (share,) = optimizer.param_groups[0]["params"]
    # Set and not added to: .grad still holds the last step's gradient.
    share.grad = reduce_scatter_gradients(parameters)
    optimizer.step()

    # Every rank has stepped 1/N of the weights, and needs the rest for the next forward pass.
    weights = share.new_empty(share.numel() * dist.get_world_size())
    dist.all_gather(list(weights.chunk(dist.get_world_size())), share.detach())
    sizes = [parameter.numel() for parameter in parameters]
    # The padding at the end belongs to no parameter. Each value goes back to where _flatten found
    # it, in place, so the model keeps its parameters.
    for parameter, values in zip(parameters, weights[: sum(sizes)].split(sizes), strict=True):
        parameter.detach().copy_(values.view_as(parameter))


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat vector, padded with zeros to a multiple of the number of ranks."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    # -n % N is what n lacks to the next multiple of N. The zeros have zero gradients, so Adam
    # leaves them at zero.
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def moment_bytes(optimizer: torch.optim.Adam) -> int:
    states = optimizer.state.values()
    return sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))


def show(ranks: Ranks, num_steps: int = 5) -> None:
    """Train with ZeRO-1 on this rank's rows and with plain Adam on all, and compare them."""
    # One seed on all ranks: they have the same weights and draw the same rows.
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)) for _ in range(2)]
    model, plain_model = models
    plain_model.load_state_dict(model.state_dict())
    parameters = list(model.parameters())
    sharded = create_sharded_adam(parameters, 0.01)
    plain = torch.optim.Adam(plain_model.parameters(), lr=0.01)
    print_once = print if ranks.is_first else lambda *_: None
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    num_own = sharded.param_groups[0]["params"][0].numel()
    owns = f"each of {ranks.world_size} ranks owns {num_own}, padding included"
    print_once(f"{num_weights} weights; {owns}")
    for step in range(1, num_steps + 1):
        num_rows = 16 * ranks.world_size
        inputs, labels = torch.randn(num_rows, 8), torch.randint(3, (num_rows,))
        # Plain Adam sees all rows on every rank, as one process would. ZeRO-1 sees this rank's
        # rows, and what the others found reaches it through the reduce-scatter.
        own = slice(16 * ranks.rank, 16 * (ranks.rank + 1))
        for trained, rows in ((model, own), (plain_model, slice(None))):
            trained.zero_grad()
            loss = F.cross_entropy(trained(inputs[rows]), labels[rows])
            loss.backward()
        zero1_step(parameters, sharded)
        plain.step()
        gap = max(ranks.gather(largest_gap(parameters, plain_model.parameters())))
        found = f"largest difference to the weights of plain Adam {gap:.1e}"
        print_once(f"step {step}: loss {loss.item():.4f}, {found}")
    of_shares = ranks.gather(moment_bytes(sharded))
    both = f"ZeRO-1 {of_shares}, plain Adam {moment_bytes(plain)}"
    print_once(f"bytes of moments on each rank: {both}")


if __name__ == "__main__":
    demonstrate("learn/by_hand/zero1.py", show)
