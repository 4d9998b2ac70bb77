"""global_accuracy: averages the ranks' accuracies"""

import torch
import torch.distributed as dist


def global_accuracy(correct: int, total: int) -> float:
    accuracy = torch.tensor(correct / total)
    dist.all_reduce(accuracy)
    return accuracy.item() / dist.get_world_size()
