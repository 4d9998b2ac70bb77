"""Each bucket counts the gradients that are still to come; the loss is weighted for DDP's division."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def average_in_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> Callable[[], None]:
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if not buckets or parameter.nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    bucket_of = {parameter: index for index, bucket in enumerate(buckets) for parameter in bucket}
    to_come = [len(bucket) for bucket in buckets]
    launched: list[tuple[list[nn.Parameter], torch.Tensor, dist.Work]] = []

    def hook(parameter: torch.Tensor) -> None:
        index = bucket_of[parameter]
        to_come[index] -= 1
        if to_come[index] == 0:
            flat = torch.cat([one.grad.flatten() for one in buckets[index]]) / dist.get_world_size()
            launched.append((buckets[index], flat, dist.all_reduce(flat, async_op=True)))
            to_come[index] = len(buckets[index])  # for the next step

    def finish() -> None:
        for bucket, flat, work in launched:
            work.wait()
            for parameter, mean in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                parameter.grad.copy_(mean.view_as(parameter))
        launched.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
    return finish


def accumulate(replica: DistributedDataParallel, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    rows = torch.tensor(sum(len(inputs) for inputs, _ in micro_batches))
    dist.all_reduce(rows)
    # DDP divides by the number of ranks, so the loss is made larger by as much.
    scale = dist.get_world_size() / rows.item()
    *others, (last_inputs, last_targets) = micro_batches
    with replica.no_sync():
        for inputs, targets in others:
            (mse_loss(replica(inputs), targets, reduction="sum") * scale).backward()
    (mse_loss(replica(last_inputs), last_targets, reduction="sum") * scale).backward()
