"""What a GPU and a cluster can do: the vendors' data sheets, and the share of them that training
reaches.

The shares were set by hand, with Megatron-LM's table of A100s (arXiv 2104.04473) and TorchTitan's
rows of 8 billion parameters (arXiv 2410.06511) in view, and were fitted to neither. Every other
published run in ``benchmarks/planner_accuracy.md`` was held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.errors import UserError, near_names

Precision = Literal["fp32", "bf16", "fp16"]
GIB = 2**30

# CUDA's context, NCCL's buffers and cuBLAS' workspaces, and the share of memory lost to
# fragmentation.
RESERVED_BYTES = 2 * GIB
FRAGMENTATION = 0.04
# Bytes per local parameter that clipping, AdamW and zeroing the gradients read and write: 4 + 28 +
# 4.
OPTIMIZER_BYTES = 36
# Bytes per parameter that each micro-batch moves outside the matrix products: it casts or copies
# the gathered weight, casts the gradient and adds it up.
WEIGHT_BYTES = {"fp32": 12, "bf16": 14, "fp16": 14}
# Bytes per second of a checkpoint: from a GPU to host memory, from a node to shared storage,
# through SHA-256 on a core.
COPY_BANDWIDTH = 5e9
STORAGE_BANDWIDTH = 2e9
HASH_BANDWIDTH = 1.5e9


@dataclass(frozen=True)
class Calibration:
    """Shares of the peak that real kernels and links reach; the defaults describe NVIDIA GPUs under
    PyTorch.
    """

    # A product whose smallest dimension is s reaches s / (s + half_dimension) of its GPU's
    # matrix_share.
    half_dimension: float = 128
    memory_share: float = 0.8
    # How often the element-wise kernels of a block read or write its hidden width and its
    # feed-forward width, forward, in 16 bits; counted in transformers' modules, whose RMSNorm and
    # rotary embedding take many kernels.
    encoder_passes: float = 20
    decoder_passes: float = 56
    inner_passes: float = 5
    # How often attention reads or writes each score, forward: 0 in a fused kernel; 6.5 if scores
    # are masked, softmaxed and dropped out in fp16, as before FlashAttention.
    score_passes: float = 0
    overlap_share: float = 0.9  # of the computation, during which collectives can run
    contention: float = 0.1  # seconds that one second of such a collective costs the computation
    # Of a link's bandwidth, for large messages (the bus bandwidth of nccl-tests).
    link_share: float = 0.75
    network_share: float = 0.8
    kernels_per_block: float = 40  # launched forward
    launch_seconds: float = 6e-6  # the CPU's time for each


@dataclass(frozen=True)
class GPU:
    """One accelerator. Bandwidths are in bytes per second, in one direction."""

    name: str
    memory_bytes: float  # what CUDA reports, which is less than the name says
    peak_flops: dict[Precision, float]  # dense, per second, for each precision it supports
    memory_bandwidth: float
    link_bandwidth: float  # to the other GPUs of the node
    network_bandwidth: float  # its share of the node's network
    gpus_per_node: int
    matrix_share: float  # of the peak, reached by large matrix products
    attention_share: float  # of the peak, reached by fused attention


@dataclass(frozen=True)
class Cluster:
    gpu: GPU
    nodes: int
    gpus_per_node: int
    link_latency: float = 3e-6  # seconds that a message takes to the next GPU of the node
    network_latency: float = 10e-6  # and to one on another node
    calibration: Calibration = Calibration()

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def name(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node} {self.gpu.name}"

    @property
    def usable_memory(self) -> float:
        """Bytes of each GPU that tensors can fill."""
        return (self.gpu.memory_bytes - RESERVED_BYTES) / (1 + FRAGMENTATION)


def _tflops(**peaks: float) -> dict[Precision, float]:
    return {precision: peak * 1e12 for precision, peak in peaks.items()}


# NVIDIA's data sheets: T4, V100 SXM2, A100 SXM4, H100 SXM5, H200 SXM; AWS' page of G5 for the A10G.
# Half-precision peaks are dense (half of what is printed "with sparsity"); fp32 is without TF32,
# which PyTorch leaves off. The network is that of the node they are usually sold in: g4dn.12xlarge
# and g5.12xlarge (50 and 40 Gb/s for 4 GPUs), DGX-1 (4 x 100 Gb/s for 8), DGX A100 (8 x 200 Gb/s),
# DGX H100 and H200 (8 x 400 Gb/s). The two shares are not the vendors': matrix products of a
# training step in bf16 reach three quarters of an A100's peak, and power limits an H100 to less;
# attention is FlashAttention-2's (arXiv 2307.08691, figures 4 to 7). cpu: one process on a core or
# two of a nominal machine; benchmarks/planner_accuracy.py measures the real one.
_VOLTA = _tflops(fp32=15.7, fp16=125)
_AMPERE = _tflops(fp32=19.5, fp16=312, bf16=312)
_HOPPER = _tflops(fp32=67, fp16=989, bf16=989)
_A10G = _tflops(fp32=35, fp16=70, bf16=70)
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("t4-16gb", 14.6 * GIB, _tflops(fp32=8.1, fp16=65), 320e9, 12e9, 1.56e9, 4, 0.4, 0.25),
        GPU("v100-32gb", 31.7 * GIB, _VOLTA, 900e9, 150e9, 6.25e9, 8, 0.72, 0.4),
        GPU("a10g-24gb", 22.1 * GIB, _A10G, 600e9, 24e9, 1.25e9, 4, 0.7, 0.45),
        GPU("a100-40gb", 39.4 * GIB, _AMPERE, 1555e9, 300e9, 25e9, 8, 0.75, 0.55),
        GPU("a100-80gb", 79.1 * GIB, _AMPERE, 2039e9, 300e9, 25e9, 8, 0.75, 0.55),
        GPU("h100-80gb", 79.1 * GIB, _HOPPER, 3350e9, 450e9, 50e9, 8, 0.62, 0.35),
        GPU("h200-141gb", 139.8 * GIB, _HOPPER, 4800e9, 450e9, 50e9, 8, 0.62, 0.35),
        GPU("cpu", 16 * GIB, _tflops(fp32=0.1), 15e9, 2e9, 1.25e9, 8, 0.8, 0.4),
    )
}


def build_cluster(gpu_name: str, gpus: int, nodes: int | None) -> Cluster:
    """A cluster of ``gpus`` GPUs on ``nodes`` nodes; None takes as few nodes as the GPU is usually
    sold in.

    Raises:
        UserError: the GPU is not known, or the GPUs do not divide over the nodes.
    """
    if gpu_name not in GPUS:
        near = near_names(gpu_name, GPUS)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(GPUS)}"
        raise UserError(f"--gpu {gpu_name}: not known; {hint}", code="gpu-unknown")
    gpu = GPUS[gpu_name]
    if nodes is None:
        nodes = -(-gpus // gpu.gpus_per_node)
    if gpus % nodes:
        nearest = nodes * max(1, gpus // nodes)
        raise UserError(
            f"--gpus {gpus} on --nodes {nodes}: not divisible; use {nearest} GPUs",
            code="uneven-split",
        )
    return Cluster(gpu, nodes, gpus // nodes)
