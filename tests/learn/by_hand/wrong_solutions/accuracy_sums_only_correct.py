"""global_accuracy: sums correct over the ranks, but not total"""

import torch
import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    count = torch.tensor(correct)
    dist.all_reduce(count)
    return count.item() / total
