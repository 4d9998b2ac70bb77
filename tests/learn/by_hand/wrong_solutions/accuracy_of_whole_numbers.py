"""global_accuracy: the accuracy is wrong"""

import torch
import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    counts = torch.tensor([correct, total])
    dist.all_reduce(counts)
    return float(counts[0].item() // counts[1].item())
