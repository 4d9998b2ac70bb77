"""The life of a gradient in DDP: computed, put into a bucket, averaged with the bucket while others are computed.

    torchrun --standalone --nproc_per_node=2 learn/by_hand/ddp_buckets.py

``average_gradients`` of ``data_parallel.py`` waits for the whole backward pass, then makes one call a tensor. DDP lays
gradients into buckets and launches a bucket's all-reduce as soon as its last gradient is there: fewer calls, hidden
behind the rest of the backward pass. Buckets are launched strictly one after the other, the same way on every rank: one
that is full waits for those before it. In which order gradients come DDP learns from the first backward pass, in which
all of them lie in one bucket; then it lays the buckets out.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.
"""

# No `from __future__ import annotations`: DDP reads a hook's annotations, and wants the classes themselves.

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from learn.by_hand.demonstration import demonstrate
from training.parallelism.distributed import Ranks

WIDTH, DEPTH = 512, 4
BUCKET_MB = 2  # 25 without it: too large for so small a model to fill two


class HeadFirst(nn.Module):
    """Four linear layers and a head; it is registered before them, and its gradients come first all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, WIDTH) -> (batch, 1)."""
        return self.head(self.layers(x))


class Diary:
    """Writes down what happens to the gradients of a model on this rank, in the order in which it happens."""

    def __init__(self, replica: DistributedDataParallel) -> None:
        self.lines: list[str] = []
        self.num_there = 0
        self.names = {parameter: name for name, parameter in replica.module.named_parameters()}
        for parameter in self.names:
            # Called once the gradient is in `.grad`, and before DDP hears of it.
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
        replica.register_comm_hook(None, self._average)

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        self.num_there += 1
        self.lines.append(f"  {self.num_there:2}  {self.names[parameter]}")

    def _average(self, _: None, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average a full bucket, as PyTorch's own ``allreduce_hook`` does, and write it down."""
        buffer, left = bucket.buffer(), len(self.names) - self.num_there
        size = f"{len(bucket.parameters())} gradients, {buffer.nbytes / 2**20:.2f} MiB"
        self.lines.append(f"      all-reduce of bucket {bucket.index()} launched: {size}; {left} still to be computed")
        buffer /= dist.get_world_size()
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda sent: sent.value()[0])

    def detach_buckets(self) -> list[str]:
        """The lines since the last call."""
        lines, self.lines, self.num_there = self.lines, [], 0
        return lines


def show(ranks: Ranks) -> None:
    """Print rank 0's diary of two steps, and what ``no_sync`` keeps back."""
    say: Callable[[str], None] = print if ranks.is_first else lambda _: None
    torch.manual_seed(0)
    model = HeadFirst()
    replica = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    diary = Diary(replica)
    inputs = torch.randn(8, WIDTH) + ranks.rank  # other rows on each rank
    for title, held_back, whole in (
        ("step 1: one bucket, as the order is not known yet", False, True),
        ("step 2: buckets in the order that step 1 showed", False, True),
        ("step 3, first micro-batch, in no_sync(): nothing is sent", True, False),
        ("step 3, last micro-batch: the sum of both is sent", False, False),
    ):
        with replica.no_sync() if held_back else nullcontext():
            replica(inputs).mean().backward()
        say("\n".join([title, *(line for line in diary.detach_buckets() if whole or "bucket" in line)]))
        norms = ranks.gather(f"{model.layers[0].weight.grad.norm().item():.4f}")
        say(f"  norm of the gradient of layers.0.weight, by rank: {', '.join(norms)}\n")
        if not held_back:
            model.zero_grad()


if __name__ == "__main__":
    demonstrate("learn/by_hand/ddp_buckets.py", show)
