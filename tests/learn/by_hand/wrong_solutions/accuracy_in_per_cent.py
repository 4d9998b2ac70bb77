"""global_accuracy: returns per cent"""

import torch
import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    counts = torch.tensor([correct, total])
    dist.all_reduce(counts)
    return 100 * counts[0].item() / counts[1].item()
