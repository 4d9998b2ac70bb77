"""global_accuracy: returns Tensor, not float"""

import torch
import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    counts = torch.tensor([correct, total])
    dist.all_reduce(counts)
    return counts[0] / counts[1]
