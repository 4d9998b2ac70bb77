"""Seconds of a step on the slowest rank, and which of its collectives the computation hides.

Computation follows a roofline (Williams, Waterman & Patterson, CACM 2009). Bubbles: GPipe, arXiv
1811.06965, section 2.3, and 1F1B: (p-1) micro-batches of m + p - 1; interleaved: the same divided
by the stages per rank, arXiv 2104.04473, section 2.2.2; zero-bubble: that of ZB-H1, arXiv
2401.10241, table 2, divided by the stages too, which is what PyTorch's orders give. Overlap: FSDP,
arXiv 2304.11277, section 3.3; DDP, arXiv 2006.15704, section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.planning.communication import Transfer, transfers
from training.planning.hardware import OPTIMIZER_BYTES, WEIGHT_BYTES, Cluster, Precision
from training.planning.layouts import (
    SPLIT_SCHEDULES,
    STAGES_PER_RANK,
    Layout,
    Stage,
    rank_parameters,
    representative_ranks,
)
from training.planning.models import ModelShape


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step; ``communication`` is the part that no computation hides."""

    compute: float
    communication: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.bubble + self.optimizer


class Roofline:
    """Seconds that a GPU takes for the parts of a network, in one precision."""

    def __init__(self, cluster: Cluster, precision: Precision) -> None:
        self.gpu = cluster.gpu
        self.calibration = cluster.calibration
        self.peak = cluster.gpu.peak_flops[precision]
        self.width = 4 if precision == "fp32" else 2

    def matrix_seconds(self, rows: float, inner: float, columns: float) -> float:
        """One product (rows, inner) x (inner, columns): its operations, or its bytes if they take
        longer.
        """
        smallest = min(rows, inner, columns)
        share = self.gpu.matrix_share * smallest / (smallest + self.calibration.half_dimension)
        moved = self.width * (rows * inner + inner * columns + rows * columns)
        return max(2 * rows * inner * columns / (self.peak * share), self.bytes_seconds(moved))

    def bytes_seconds(self, moved: float) -> float:
        return moved / (self.gpu.memory_bandwidth * self.calibration.memory_share)

    def attention_seconds(self, shape: ModelShape, layout: Layout) -> tuple[float, float]:
        """Attention of one block, without its matrices: (forward, backward)."""
        pairs = layout.micro_batch * layout.seq_len**2 / layout.tp
        flops = 4 * pairs * shape.query_width
        if not self.calibration.score_passes:
            # A fused kernel skips the half above a causal diagonal. Its backward pass computes the
            # scores again, so it has five products for the forward pass' two.
            computed = flops * (0.5 if shape.traits.causal else 1)
            forward = computed / (self.peak * self.gpu.attention_share)
            return forward, 2.5 * forward
        scores = self.width * pairs * shape.heads
        products = flops / (self.peak * self.gpu.matrix_share)
        forward = products + self.bytes_seconds(self.calibration.score_passes * scores)
        return forward, 2 * forward

    def block_seconds(self, shape: ModelShape, layout: Layout) -> tuple[float, float]:
        """One block's (forward, backward) pass over one micro-batch, including recomputation."""
        calibration, tp = self.calibration, layout.tp
        tokens, inner = layout.micro_batch * layout.seq_len, shape.intermediate / tp
        query, key_value = shape.query_width / tp, shape.key_value_width / tp
        products = (
            self.matrix_seconds(tokens, shape.hidden, query)
            + 2 * self.matrix_seconds(tokens, shape.hidden, key_value)
            + self.matrix_seconds(tokens, query, shape.hidden)
            + (2 if shape.traits.gated_ffn else 1)
            * self.matrix_seconds(tokens, shape.hidden, inner)
            + self.matrix_seconds(tokens, inner, shape.hidden)
        )
        attention, attention_backward = self.attention_seconds(shape, layout)

        # Norms, residuals, activations, dropout and casts. About half of the passes over the hidden
        # width are inside attention, where the heads are split; only sequence parallelism splits
        # the others.
        is_decoder = shape.traits.norm == "rmsnorm"
        passes = calibration.decoder_passes if is_decoder else calibration.encoder_passes
        hidden = passes * shape.hidden * (0.5 / (tp if layout.sequence_parallel else 1) + 0.5 / tp)
        values = tokens * (hidden + calibration.inner_passes * inner)
        elementwise = self.bytes_seconds(self.width * values)

        forward = products + attention + elementwise
        again = {"none": 0.0, "selective": elementwise, "full": forward}
        recomputed = again[layout.activation_checkpointing]
        backward = 2 * products + attention_backward + 2 * elementwise + recomputed
        # If the CPU cannot launch kernels as fast as the GPU runs them, the launches set the pace.
        launches = calibration.kernels_per_block * calibration.launch_seconds
        backward_launches = (2 if layout.activation_checkpointing == "none" else 3) * launches
        return max(forward, launches), max(backward, backward_launches)

    def head_seconds(self, shape: ModelShape, layout: Layout) -> tuple[float, float]:
        """A language model's head and loss, (forward, backward); a classifier's is negligible."""
        if shape.num_labels is not None:
            return 0.0, 0.0
        tokens = layout.micro_batch * layout.seq_len
        product = self.matrix_seconds(tokens, shape.hidden, shape.vocab / layout.tp)
        # Logits cast to fp32, their maximum, log-softmax and its gradient.
        loss = self.bytes_seconds(tokens * shape.vocab / layout.tp * 14)
        return product + loss, 2 * product + loss


def estimate_step(
    shape: ModelShape, layout: Layout, cluster: Cluster
) -> tuple[StepTime, list[Transfer]]:
    """Seconds of one optimizer step, and the collectives of the rank that takes the longest."""
    roofline = Roofline(cluster, layout.precision)
    block_forward, block_backward = roofline.block_seconds(shape, layout)
    # All ranks wait for the slowest one, so its time is the step's.
    estimates = []
    for stage in representative_ranks(shape, layout):
        parameters = rank_parameters(shape, layout, stage)
        head_forward = head_backward = 0.0
        if stage.last:
            head_forward, head_backward = roofline.head_seconds(shape, layout)
        blocks = float(stage.blocks)
        if stage.last:  # counts for less than one if it computes the first token only
            blocks -= 1 - shape.last_block_flops(layout.seq_len) / shape.block_flops(layout.seq_len)
        # Every micro-batch reads each weight in fp32 or gathered, writes its copy, and adds to its
        # gradient.
        weights = roofline.bytes_seconds(WEIGHT_BYTES[layout.precision] * parameters)
        forward = blocks * block_forward + head_forward + weights / 2
        backward = blocks * block_backward + head_backward + weights / 2

        # Computation waits for tensor-parallel collectives and for sends between stages.
        found = transfers(shape, layout, stage, cluster)
        waited = sum(transfer.seconds for transfer in found if transfer.dimension in ("tp", "pp"))
        updated = parameters / (layout.dp if layout.strategy == "zero1" else layout.dp_shard)
        exposed = _exposed_data_parallel(layout, stage, cluster, found, forward, backward)
        time = StepTime(
            compute=layout.accumulation * (forward + backward),
            communication=waited + exposed,
            bubble=bubble_seconds(layout, forward, backward, waited / layout.accumulation),
            optimizer=roofline.bytes_seconds(OPTIMIZER_BYTES * updated),
        )
        estimates.append((time, found))
    return max(estimates, key=lambda estimate: estimate[0].total)


def bubble_seconds(layout: Layout, forward: float, backward: float, waited: float) -> float:
    """Seconds that the slowest rank waits for the others at the beginning and at the end of a step.

    ``forward``, ``backward``, ``waited``: seconds per micro-batch, through all stages of a rank,
    and of the collectives that it waits for.
    """
    if layout.pp == 1:
        return 0.0
    wait = forward + backward
    if layout.schedule in SPLIT_SCHEDULES:
        # F + I - W with equal halves I and W of the backward pass, and no less than the next rank
        # takes for one half.
        wait = max(forward, backward / 2)
    bubble = (layout.pp - 1) * (wait + waited)
    if layout.schedule == "zbv":
        # Fewer micro-batches than 2p - 1 do not fill the V.
        bubble = max(bubble, (2 * layout.pp - 1 - layout.accumulation) * (backward + waited))
    return bubble / STAGES_PER_RANK[layout.schedule]


def _exposed_data_parallel(
    layout: Layout,
    stage: Stage,
    cluster: Cluster,
    found: list[Transfer],
    forward: float,
    backward: float,
) -> float:
    """Seconds of data-parallel collectives that the computation does not hide."""
    data_parallel = (transfer for transfer in found if transfer.dimension.startswith("dp"))
    seconds = {transfer.collective: transfer.seconds for transfer in data_parallel}
    reducing = seconds.get("all-reduce", 0.0)

    def exposed(communication: float, computation: float) -> float:
        # The first block's weights, and the last one's gradients, have no computation left that
        # could hide them.
        most = communication * (1 - 1 / (stage.blocks + 1))
        hidden = min(most, cluster.calibration.overlap_share * computation)
        return communication - (1 - cluster.calibration.contention) * hidden

    if not layout.is_fsdp:
        # zero1 broadcasts the updated weights after the step, when nothing computes.
        return exposed(reducing, backward) + seconds.get("broadcast", 0.0)
    rounds = 1 if layout.pp > 1 else layout.accumulation
    gathering, scattering = (
        seconds.get(name, 0.0) / rounds for name in ("all-gather", "reduce-scatter")
    )
    ahead, again = (gathering, 0.0) if layout.keeps_gathered else (gathering / 2, gathering / 2)
    # Each micro-batch gathers during its forward pass, then gathers again and scatters during its
    # backward pass. The replicas' gradients are summed once, during the last backward pass.
    last = exposed(again + scattering + reducing, backward)
    others = (rounds - 1) * exposed(again + scattering, backward)
    return rounds * exposed(ahead, forward) + others + last
