"""global_accuracy: raised TypeError | A collective takes a tensor"""

import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    dist.all_reduce(correct)
    dist.all_reduce(total)
    return correct / total
