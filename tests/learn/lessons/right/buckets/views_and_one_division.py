"""Gradients become views of the buckets, as in DDP with gradient_as_bucket_view; sums are divided at the end."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Bucket:
    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.num_ready = 0

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)

    @property
    def size(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    def ready(self, _: torch.Tensor) -> None:
        self.num_ready += 1
        if self.num_ready == len(self.parameters):
            self.flat = torch.cat([parameter.grad.view(-1) for parameter in self.parameters])
            self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        self.work.wait()
        self.flat /= dist.get_world_size()
        start = 0
        for parameter in self.parameters:
            parameter.grad = self.flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self.num_ready = 0


def average_in_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> Callable[[], None]:
    buckets: list[Bucket] = []
    for parameter in parameters:
        needed = parameter.numel() * parameter.element_size()
        if not buckets or buckets[-1].size + needed > bucket_bytes:
            buckets.append(Bucket())
        buckets[-1].add(parameter)
        parameter.register_post_accumulate_grad_hook(buckets[-1].ready)

    def finish() -> None:
        for bucket in buckets:
            bucket.finish()

    return finish


def accumulate(replica: DistributedDataParallel, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        replica.require_backward_grad_sync = number == len(micro_batches)
        (replica(inputs) - targets).square().sum().backward()
    rows = torch.tensor(float(sum(len(inputs) for inputs, _ in micro_batches)))
    dist.all_reduce(rows, op=dist.ReduceOp.SUM)
    for parameter in replica.parameters():
        parameter.grad *= dist.get_world_size() / rows
