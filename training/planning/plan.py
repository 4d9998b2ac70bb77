"""Plan: everything that is predicted for one layout on one cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.planning.calibration import FRAGMENTATION, RESERVED_BYTES
from training.planning.hardware import GIB, Cluster
from training.planning.launch import launch_command
from training.planning.memory import estimate_memory
from training.planning.shapes import Layout, MemoryEstimate, ModelShape, StepTime, Transfer
from training.planning.step_time import estimate_step


@dataclass(frozen=True)
class Plan:
    """A layout, what it needs and what it gives; every figure is simulated.

    ``available``: bytes of the GPU that a run can fill. ``mfu``: of the peak, what the model's own operations take,
    recomputation not counted (PaLM, arXiv 2204.02311, appendix B). ``efficiency``: tokens a second a GPU over those of
    one such GPU with memory enough, which needs neither communication nor recomputation. ``reason``: why it does not
    fit, in words; empty where it does.
    """

    shape: ModelShape
    layout: Layout
    cluster: Cluster
    memory: MemoryEstimate
    transfers: tuple[Transfer, ...]
    time: StepTime
    tokens_per_second: float
    mfu: float
    efficiency: float
    available: float
    reason: str

    @property
    def fits(self) -> bool:
        """Whether the memory is enough."""
        return not self.reason

    @property
    def launch(self) -> str:
        """The command that trains with this layout."""
        return launch_command(self.shape, self.layout, self.cluster)

    def days(self, tokens: float) -> float:
        """Days to train on ``tokens``."""
        return tokens / self.tokens_per_second / 86_400


def make_plan(shape: ModelShape, layout: Layout, cluster: Cluster) -> Plan:
    """Predict memory, traffic and time of a layout."""
    memory = estimate_memory(shape, layout, fused_attention=cluster.gpu.name != "cpu" or not shape.dropout)
    time, transfers = estimate_step(shape, layout, cluster)
    tokens_per_second = layout.tokens_per_step / time.total
    per_gpu = tokens_per_second / layout.ranks
    peak = cluster.gpu.peak_flops[layout.precision]
    available = (cluster.gpu.memory_bytes - RESERVED_BYTES) / (1 + FRAGMENTATION)
    return Plan(
        shape,
        layout,
        cluster,
        memory,
        tuple(transfers),
        time,
        tokens_per_second,
        mfu=per_gpu * 3 * shape.forward_flops(layout.seq_len) / layout.seq_len / peak,
        efficiency=per_gpu / single_gpu_speed(shape, layout, cluster),
        available=available,
        reason=_missing(memory, available),
    )


def single_gpu_speed(shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Tokens a second of one GPU with memory enough, on this layout's rows a GPU and in its micro-batches."""
    alone = replace(
        layout,
        strategy="ddp",
        pp=1,
        dp_replicate=1,
        dp_shard=1,
        tp=1,
        accumulation=max(1, round(layout.accumulation * layout.dp / layout.ranks)),
        activation_checkpointing="none",
        sequence_parallel=False,
    )
    time, _ = estimate_step(shape, alone, cluster)
    return alone.tokens_per_step / time.total


def _missing(memory: MemoryEstimate, available: float) -> str:
    if memory.total <= available:
        return ""
    parts = {
        "weights": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        "gathered weights and buffers": memory.communication,
    }
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"needs {memory.total / GIB:,.0f} GiB of {available / GIB:,.0f}; "
        f"{largest} alone take {parts[largest] / GIB:,.0f}"
    )
