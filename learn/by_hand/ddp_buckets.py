"""The life of a gradient in DDP: computed, put into a bucket, averaged while others are computed.

    torchrun --standalone --nproc_per_node=2 learn/by_hand/ddp_buckets.py

``average_gradients`` of ``data_parallel.py`` waits for the whole backward pass, then makes one call
per tensor. DDP puts gradients into buckets and launches a bucket's all-reduce when its last
gradient is there: fewer calls, hidden behind the rest of the backward pass. Buckets are launched
strictly one after the other, in the same order on every rank: a full one waits for those before it.
DDP learns the order of the gradients in the first backward pass, in which all of them are in one
bucket, and then assigns them to buckets.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.
"""

# No `from __future__ import annotations`: DDP checks a hook's annotations, which must be classes,
# not strings.

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
from training.distributed.ranks import Ranks

WIDTH, DEPTH = 512, 4
BUCKET_MB = 2  # the default of 25 is so large that this model would fill only one


class HeadFirst(nn.Module):
    """Four linear layers and a head, which is registered first but runs last.

    So its gradients come first: the order of registration is not that of the backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)
        # Each weight is (512, 512) in fp32, which is 1 MiB.
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, WIDTH) -> (batch, 1)."""
        return self.head(self.layers(x))


class Diary:
    """Records what happens to the gradients of a model on this rank, in order."""

    def __init__(self, replica: DistributedDataParallel) -> None:
        self.lines: list[str] = []
        self.num_done = 0
        self.names = {parameter: name for name, parameter in replica.module.named_parameters()}
        for parameter in self.names:
            # Called when the gradient is in `.grad`, and before DDP's own hook.
            parameter.register_post_accumulate_grad_hook(self._record_gradient)
        # Takes the place of DDP's own averaging, and is called once per bucket that is full.
        replica.register_comm_hook(None, self._average)

    def _record_gradient(self, parameter: torch.Tensor) -> None:
        self.num_done += 1
        self.lines.append(f"  {self.num_done:2}  {self.names[parameter]}")

    def _average(self, _: None, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average a full bucket, as PyTorch's own ``allreduce_hook`` does, and write it down."""
        # (elements of the bucket,): the gradients of all its parameters, one after the other.
        buffer, left = bucket.buffer(), len(self.names) - self.num_done
        size = f"{len(bucket.parameters())} gradients, {buffer.nbytes / 2**20:.2f} MiB"
        launched = f"all-reduce of bucket {bucket.index()} launched: {size}"
        self.lines.append(f"      {launched}; {left} still to be computed")
        buffer /= dist.get_world_size()
        # Not waited for here: the hook returns at once, and the backward pass continues while the
        # bucket is on its way. DDP waits for all buckets at the end of backward().
        reduced = dist.all_reduce(buffer, async_op=True).get_future()
        return reduced.then(lambda sent: sent.value()[0])

    def take_lines(self) -> list[str]:
        """The lines since the last call."""
        lines, self.lines, self.num_done = self.lines, [], 0
        return lines


def show(ranks: Ranks) -> None:
    """Print rank 0's diary of two steps, and of a third that begins in ``no_sync``."""
    print_once: Callable[[str], None] = print if ranks.is_first else lambda _: None
    torch.manual_seed(0)
    model = HeadFirst()
    replica = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    diary = Diary(replica)
    # (batch, WIDTH). Other rows on each rank, so that gradients differ until they are averaged.
    inputs = torch.randn(8, WIDTH) + ranks.rank
    for title, no_sync, whole in (
        ("step 1: one bucket, as the order is not known yet", False, True),
        ("step 2: buckets in the order that step 1 showed", False, True),
        ("step 3, first micro-batch, in no_sync(): nothing is sent", True, False),
        ("step 3, last micro-batch: the sum of both is sent", False, False),
    ):
        # DDP decides in the forward pass whether the backward pass will send, so both are in it.
        with replica.no_sync() if no_sync else nullcontext():
            replica(inputs).mean().backward()
        shown = [line for line in diary.take_lines() if whole or "bucket" in line]
        print_once("\n".join([title, *shown]))
        # Equal norms on all ranks: it was averaged. In no_sync each rank has its own.
        norms = ranks.gather(f"{model.layers[0].weight.grad.norm().item():.4f}")
        print_once(f"  norm of the gradient of layers.0.weight, by rank: {', '.join(norms)}\n")
        # Kept after no_sync: the next backward pass adds to .grad, and the sum of both is sent.
        if not no_sync:
            model.zero_grad()


if __name__ == "__main__":
    demonstrate("learn/by_hand/ddp_buckets.py", show)
