"""Calibration: what hardware reaches of its peak. Every constant that is neither a data sheet's nor a formula's.

These and the shares in ``hardware.py`` were set by hand, with Megatron-LM's table of A100s (arXiv 2104.04473) and
TorchTitan's rows of 8 billion parameters (arXiv 2410.06511) in sight, and fitted to none. Every other published run in
``benchmarks/planner_accuracy.md`` was held out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Shares that real kernels and links reach; the defaults are those of NVIDIA's GPUs under PyTorch.

    ``half_dimension``: a product reaches s / (s + half_dimension) of its GPU's ``matrix_share``, where s is the
    smallest of its three dimensions. ``memory_share``: of the memory bandwidth. ``encoder_passes``, ``decoder_passes``,
    ``inner_passes``: how often the element-wise kernels of a block read or write its hidden and its feed-forward's
    width, forward, in 16 bits; counted in transformers' modules, whose RMSNorm and rotary embedding take many kernels.
    ``score_passes``: how often attention reads or writes each of its scores, forward; 0 = never, in a fused kernel;
    6.5 = masked, softmaxed and dropped out in fp16, as was done before FlashAttention.
    ``overlap_share``: of computation, beside which collectives can run; ``contention``: seconds that each second of
    such a collective costs the computation. ``link_share``, ``network_share``: of a link's bandwidth, for large
    messages (nccl-tests: doc/PERFORMANCE.md explains the bus bandwidth that is meant).
    ``kernels_per_block``, ``launch_seconds``: launched forward, and the processor's time for each.
    """

    half_dimension: float = 128
    memory_share: float = 0.8
    encoder_passes: float = 20
    decoder_passes: float = 56
    inner_passes: float = 5
    score_passes: float = 0
    overlap_share: float = 0.9
    contention: float = 0.1
    link_share: float = 0.75
    network_share: float = 0.8
    kernels_per_block: float = 40
    launch_seconds: float = 6e-6


DEFAULT = Calibration()

# Bytes of every local parameter that clipping, AdamW and zeroing read and write: 4 + 28 + 4.
OPTIMIZER_BYTES = 36
# Of the memory: CUDA's context, NCCL's buffers and cuBLAS' workspaces, and the share lost to fragmentation.
RESERVED_BYTES = 2 * 2**30
FRAGMENTATION = 0.04
# Of a checkpoint, bytes per second: from a GPU to the machine's memory, from a machine to shared storage, and through
# SHA-256 on one core.
COPY_BANDWIDTH = 5e9
STORAGE_BANDWIDTH = 2e9
HASH_BANDWIDTH = 1.5e9
# Bytes that each micro-batch moves for each whole parameter outside the products: casts or copies of gathered weights,
# and gradients that are cast and added up.
WEIGHT_BYTES = {"fp32": 12, "bf16": 14, "fp16": 14}
