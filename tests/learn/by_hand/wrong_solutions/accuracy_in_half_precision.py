"""global_accuracy: the accuracy is wrong | 23000 of 30000"""

import torch
import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    counts = torch.tensor([correct, total], dtype=torch.float16)
    dist.all_reduce(counts)
    return (counts[0].double() / counts[1].double()).item()
