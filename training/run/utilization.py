"""How much of the machine training uses.

MFU, model FLOPs utilization, is for language models: the operations that the model's tokens need,
over those that the devices could do in the same time (Chowdhery et al., "PaLM", arXiv 2204.02311,
appendix B). What is computed twice, such as checkpointed activations, counts once.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from training.distributed.ranks import Ranks
from training.model.classifier import NewsClassifier
from training.model.precision import DTYPES
from training.planning.hardware import GPUS
from training.tasks import MASKED_SHARE, MaskedLanguageModel

# Of a device whose data sheet is not known, the best product of square matrices of this size counts
# as the peak.
MATRIX, TRIES = 1024, 5


def flops_per_token(model: NewsClassifier, length: int) -> float:
    """Operations per token, forward and backward, in blocks of ``length`` tokens."""
    # Each weight of a matrix is multiplied once forward and twice backward. A lookup multiplies
    # nothing, unless the head is the same table.
    network, head = model.network, model.network.get_output_embeddings()
    tables = {module.weight for module in network.modules() if isinstance(module, nn.Embedding)}
    multiplied = (
        {weight for weight in network.parameters() if weight.dim() > 1} - tables - {head.weight}
    )
    # A masked language model only computes the vocabulary for the tokens that it predicts.
    share = MASKED_SHARE if isinstance(model.task, MaskedLanguageModel) else 1.0
    weights = sum(weight.numel() for weight in multiplied) + share * head.weight.numel()
    # Attention has no weights to count: each token is compared with all of its block, and their
    # values are added up. That is 2 x 2 x hidden x length operations in a layer, twice as many
    # backward, so 12 x hidden x length in all.
    config = model.config
    return 6.0 * weights + 12.0 * config.num_hidden_layers * config.hidden_size * length


def peak_flops(ranks: Ranks, precision: str) -> float:
    """Operations per second of all ranks' devices together; a collective call."""
    return sum(ranks.gather(peak_of_device(ranks.device, precision)))


def gpu_utilization(device: torch.device) -> float | None:
    """The share of the last second in which this rank's GPU computed anything, 0 to 1.

    None on a CPU, and if NVML does not tell: its Python package nvidia-ml-py is missing, or the GPU
    is divided.
    """
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (
        Exception
    ):  # that of a package which may not be there has no name here; training must not fail by it
        return None


def peak_of_device(device: torch.device, precision: str) -> float:
    """Operations per second of its matrix products: from the data sheet, if it is known."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower()
        for gpu in GPUS.values():
            if gpu.name.split("-")[0] in name and precision in gpu.peak_flops:
                return gpu.peak_flops[precision]
    left, right = (
        torch.randn(MATRIX, MATRIX, device=device, dtype=DTYPES[precision]) for _ in range(2)
    )
    best = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * MATRIX**3 / best
