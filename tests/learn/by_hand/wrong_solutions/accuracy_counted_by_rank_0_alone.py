"""global_accuracy: hangs | rank 1 has returned"""

import torch
import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    counts = torch.tensor([correct, total])
    if dist.get_rank() == 0:
        dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()
