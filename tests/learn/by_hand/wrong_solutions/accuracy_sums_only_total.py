"""global_accuracy: sums total over the ranks, but not correct"""

import torch
import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    count = torch.tensor(total)
    dist.all_reduce(count)
    return correct / count.item()
