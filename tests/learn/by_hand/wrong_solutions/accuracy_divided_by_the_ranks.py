"""global_accuracy: divides by the number of ranks too"""

import torch
import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    counts = torch.tensor([correct, total])
    dist.all_reduce(counts)
    return (counts[0] / counts[1] / dist.get_world_size()).item()
