"""Hardware: what a GPU and a cluster can do, by the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from common.errors import UserError
from training.planning.calibration import DEFAULT, Calibration
from training.planning.shapes import Precision

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """One accelerator.

    ``memory_bytes``: what CUDA reports, less than on the box; ``peak_flops``: dense, per second, in each
    precision that it has; ``memory_bandwidth``, ``link_bandwidth`` (to other GPUs of the node, one direction),
    ``network_bandwidth`` (its share of the node's network, one direction): bytes per second. ``matrix_share``,
    ``attention_share``: of the peak, what large matrix products and fused attention reach; see :data:`GPUS`.
    """

    name: str
    memory_bytes: float
    peak_flops: dict[Precision, float]
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int
    matrix_share: float
    attention_share: float


@dataclass(frozen=True)
class Cluster:
    """``nodes`` machines of ``gpus_per_node`` equal GPUs.

    ``link_latency``, ``network_latency``: seconds that a message takes to the next GPU, in the node and outside.
    """

    gpu: GPU
    nodes: int
    gpus_per_node: int
    link_latency: float = 3e-6
    network_latency: float = 10e-6
    calibration: Calibration = DEFAULT

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def name(self) -> str:
        """Such as "4 x 8 a100-80gb"."""
        return f"{self.nodes} x {self.gpus_per_node} {self.gpu.name}"


def _tflops(**peaks: float) -> dict[Precision, float]:
    return {precision: peak * 1e12 for precision, peak in peaks.items()}


# NVIDIA's data sheets: T4, V100 SXM2, A100 SXM4, H100 SXM5, H200 SXM; AWS' page of G5 for the A10G. Half-precision
# peaks are dense (half of what is printed "with sparsity"); fp32 is without TF32, which torch leaves off.
# The network is that of the node they are usually sold in: g4dn.12xlarge and g5.12xlarge (50 and 40 Gb/s for 4 GPUs),
# DGX-1 (4 x 100 Gb/s for 8), DGX A100 (8 x 200 Gb/s), DGX H100 and H200 (8 x 400 Gb/s).
# The two shares are not the vendors': GEMMs of a training step in bf16 reach three quarters of an A100's peak, and
# power limits an H100 to less; attention is FlashAttention-2's (arXiv 2307.08691, figures 4 to 7).
# cpu: one process on a core or two, a nominal machine; benchmarks/planner_accuracy.py measures the real one.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("t4-16gb", 14.6 * GIB, _tflops(fp32=8.1, fp16=65), 320e9, 12e9, 1.56e9, 4, 0.4, 0.25),
        GPU("v100-32gb", 31.7 * GIB, _tflops(fp32=15.7, fp16=125), 900e9, 150e9, 6.25e9, 8, 0.72, 0.4),
        GPU("a10g-24gb", 22.1 * GIB, _tflops(fp32=35, fp16=70, bf16=70), 600e9, 24e9, 1.25e9, 4, 0.7, 0.45),
        GPU("a100-40gb", 39.4 * GIB, _tflops(fp32=19.5, fp16=312, bf16=312), 1555e9, 300e9, 25e9, 8, 0.75, 0.55),
        GPU("a100-80gb", 79.1 * GIB, _tflops(fp32=19.5, fp16=312, bf16=312), 2039e9, 300e9, 25e9, 8, 0.75, 0.55),
        GPU("h100-80gb", 79.1 * GIB, _tflops(fp32=67, fp16=989, bf16=989), 3350e9, 450e9, 50e9, 8, 0.62, 0.35),
        GPU("h200-141gb", 139.8 * GIB, _tflops(fp32=67, fp16=989, bf16=989), 4800e9, 450e9, 50e9, 8, 0.62, 0.35),
        GPU("cpu", 16 * GIB, _tflops(fp32=0.1), 15e9, 2e9, 1.25e9, 8, 0.8, 0.4),
    )
}


def find_gpu(name: str) -> GPU:
    """The GPU called ``name``.

    Raises:
        UserError: there is none.
    """
    if name in GPUS:
        return GPUS[name]
    near = get_close_matches(name.lower(), GPUS, n=2, cutoff=0.3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(GPUS)}"
    raise UserError(f"--gpu {name}: not known; {hint}", code="gpu-unknown")


def build_cluster(gpu: GPU, gpus: int, nodes: int | None) -> Cluster:
    """A cluster of ``gpus`` GPUs on ``nodes`` machines; None: as few as the GPU is usually sold in.

    Raises:
        UserError: the GPUs do not divide over the nodes.
    """
    if nodes is None:
        nodes = -(-gpus // gpu.gpus_per_node)
    if gpus % nodes:
        raise UserError(
            f"--gpus {gpus} on --nodes {nodes}: not divisible; take {nodes * max(1, gpus // nodes)} GPUs",
            code="uneven-split",
        )
    return Cluster(gpu, nodes, gpus // nodes)
