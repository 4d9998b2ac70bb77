"""Plan: everything that is predicted for one layout on one cluster."""

from __future__ import annotations

from dataclasses import dataclass

from training.planning.calibration import FRAGMENTATION, RESERVED_BYTES
from training.planning.hardware import GIB, Cluster
from training.planning.launch import launch_command
from training.planning.memory import estimate_memory
from training.planning.shapes import Layout, MemoryEstimate, ModelShape, StepTime, Transfer
from training.planning.step_time import estimate_step


@dataclass(frozen=True)
class Plan:
    """A layout, what it needs and what it gives; every figure is simulated.

    ``transfers``: those of the slowest stage. ``available``: bytes of the GPU that a run can fill. ``reason``: why it
    does not fit, in words; empty where it does.
    """

    shape: ModelShape
    layout: Layout
    cluster: Cluster
    memory: MemoryEstimate
    transfers: tuple[Transfer, ...]
    time: StepTime
    available: float
    reason: str

    @property
    def fits(self) -> bool:
        """Whether the memory is enough."""
        return not self.reason

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.layout.tokens_per_step / self.time.total

    @property
    def mfu(self) -> float:
        """Share of the peak that the model's own operations take, recomputation not counted.

        Source: PaLM, arXiv 2204.02311, appendix B.
        """
        flops = 3 * self.shape.forward_flops(self.layout.seq_len) / self.layout.seq_len
        peak = self.cluster.gpu.peak_flops[self.layout.precision]
        return self.tokens_per_second / self.layout.ranks * flops / peak

    @property
    def share_of_ideal(self) -> float:
        """Tokens per second over those of as many ideal GPUs.

        An ideal GPU has memory for the whole model, takes all its rows at once, communicates and recomputes nothing,
        and updates only its share of the weights. Whatever is missing is the cost of the layout. This is not the
        efficiency against one real GPU, which updates all weights: see ``Answer.efficiency``.
        """
        rows = self.layout.tokens_per_step / self.layout.seq_len / self.layout.ranks
        alone = Layout(
            "ddp", micro_batch=max(1, round(rows)), seq_len=self.layout.seq_len, precision=self.layout.precision
        )
        time, _ = estimate_step(self.shape, alone, self.cluster)
        ideal = alone.tokens_per_step / (time.compute + time.optimizer / self.layout.ranks)
        return self.tokens_per_second / self.layout.ranks / ideal

    @property
    def launch(self) -> str | None:
        """The command that trains with this layout; None where the trainer has none."""
        return launch_command(self.shape, self.layout, self.cluster)

    def days(self, tokens: float) -> float:
        """Days to train on ``tokens``."""
        return tokens / self.tokens_per_second / 86_400


def make_plan(shape: ModelShape, layout: Layout, cluster: Cluster) -> Plan:
    """Predict memory, traffic and time of a layout."""
    memory = plan_memory(shape, layout, cluster)
    time, transfers = estimate_step(shape, layout, cluster)
    available = usable_memory(cluster)
    return Plan(shape, layout, cluster, memory, tuple(transfers), time, available, _missing(memory, available))


def plan_memory(shape: ModelShape, layout: Layout, cluster: Cluster) -> MemoryEstimate:
    """Memory with this hardware's kernels: CPUs write attention scores out where they drop some."""
    return estimate_memory(shape, layout, fused_attention=cluster.gpu.name != "cpu" or not shape.dropout)


def usable_memory(cluster: Cluster) -> float:
    """Bytes of a GPU that tensors can fill."""
    return (cluster.gpu.memory_bytes - RESERVED_BYTES) / (1 + FRAGMENTATION)


def _missing(memory: MemoryEstimate, available: float) -> str:
    if memory.total <= available:
        return ""
    parts = {
        "weights": memory.parameters,
        "gradients": memory.gradients,
        "the optimizer": memory.optimizer,
        "activations": memory.activations,
        "gathered weights and buffers": memory.communication,
    }
    largest = max(parts, key=lambda part: parts[part])
    needs = f"needs {memory.total / GIB:,.1f} GiB of {available / GIB:,.1f}"
    return f"{needs}, {parts[largest] / GIB:,.1f} of them for {largest}"
