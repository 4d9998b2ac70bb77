"""global_accuracy: returns NoneType, not a number | rank 1 printed: 0.7666"""

import torch
import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    counts = torch.tensor([correct, total])
    dist.all_reduce(counts)
    print(counts[0].item() / counts[1].item())
