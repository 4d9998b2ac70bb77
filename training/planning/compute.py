"""Compute: seconds that one GPU takes for a block, by a roofline.

Matrix products take their operations over a share of the peak (Williams, Waterman & Patterson, "Roofline", CACM 2009),
or their bytes over the memory bandwidth where that is longer; element-wise kernels take their bytes. Where the
processor cannot launch kernels as fast as the GPU runs them, it sets the pace.
"""

from __future__ import annotations

from training.planning.hardware import Cluster
from training.planning.shapes import Layout, ModelShape, Precision


class Roofline:
    """What a GPU takes for the parts of a network, in one precision."""

    def __init__(self, cluster: Cluster, precision: Precision) -> None:
        self.gpu = cluster.gpu
        self.calibration = cluster.calibration
        self.peak = cluster.gpu.peak_flops[precision]
        self.width = 4 if precision == "fp32" else 2

    def matrix_seconds(self, rows: float, inner: float, columns: float) -> float:
        """One product (rows, inner) x (inner, columns)."""
        smallest = min(rows, inner, columns)
        share = self.gpu.matrix_share * smallest / (smallest + self.calibration.half_dimension)
        moved = self.width * (rows * inner + inner * columns + rows * columns)
        return max(2 * rows * inner * columns / (self.peak * share), self.bytes_seconds(moved))

    def bytes_seconds(self, moved: float) -> float:
        """Reading and writing ``moved`` bytes."""
        return moved / (self.gpu.memory_bandwidth * self.calibration.memory_share)

    def products_seconds(self, shape: ModelShape, tokens: float, tp: int) -> float:
        """The matrix products of one block, forward."""
        query, key_value = shape.query_width / tp, shape.key_value_width / tp
        inner = shape.intermediate / tp
        attention = (
            self.matrix_seconds(tokens, shape.hidden, query)
            + 2 * self.matrix_seconds(tokens, shape.hidden, key_value)
            + self.matrix_seconds(tokens, query, shape.hidden)
        )
        into_ffn = (2 if shape.gated_ffn else 1) * self.matrix_seconds(tokens, shape.hidden, inner)
        return attention + into_ffn + self.matrix_seconds(tokens, inner, shape.hidden)

    def attention_seconds(self, shape: ModelShape, rows: int, seq_len: int, tp: int) -> float:
        """The attention of one block, forward: the half above a causal diagonal is not computed."""
        flops = 4 * rows * seq_len**2 * shape.query_width / tp * (0.5 if shape.causal else 1)
        return flops / (self.peak * self.gpu.attention_share)

    def elementwise_seconds(self, shape: ModelShape, tokens: float, layout: Layout) -> float:
        """Norms, residuals, activations, dropout and casts of one block, forward."""
        tp = layout.tp
        whole = tp if layout.sequence_parallel else 1
        passes = self.calibration.decoder_passes if shape.norm == "rmsnorm" else self.calibration.encoder_passes
        # About half of them lie inside attention, whose heads are split.
        hidden = passes * shape.hidden * (0.5 / whole + 0.5 / tp)
        return self.bytes_seconds(
            self.width * tokens * (hidden + self.calibration.inner_passes * shape.intermediate / tp)
        )

    def block_seconds(self, shape: ModelShape, layout: Layout) -> tuple[float, float]:
        """One block's forward and backward pass over one micro-batch, recomputation included."""
        tokens = layout.micro_batch * layout.seq_len
        products = self.products_seconds(shape, tokens, layout.tp)
        attention = self.attention_seconds(shape, layout.micro_batch, layout.seq_len, layout.tp)
        elementwise = self.elementwise_seconds(shape, tokens, layout)
        again = {"none": 0.0, "selective": elementwise, "full": products + attention + elementwise}
        forward = products + attention + elementwise
        # A fused attention kernel computes the scores again in its backward pass: 5 products for the forward's 2.
        backward = 2 * products + 2.5 * attention + 2 * elementwise + again[layout.activation_checkpointing]
        launches = self.calibration.kernels_per_block * self.calibration.launch_seconds
        repeats = 1 if layout.activation_checkpointing == "none" else 2
        return max(forward, launches), max(backward, (1 + repeats) * launches)

    def head_seconds(self, shape: ModelShape, layout: Layout) -> tuple[float, float]:
        """A language model's head and loss, forward and backward; a classifier's is nothing beside its blocks."""
        if shape.num_labels is not None:
            return 0.0, 0.0
        tokens = layout.micro_batch * layout.seq_len
        product = self.matrix_seconds(tokens, shape.hidden, shape.vocab / layout.tp)
        # Logits cast to fp32, their maximum, log-softmax and its gradient.
        loss = self.bytes_seconds(tokens * shape.vocab / layout.tp * 14)
        return product + loss, 2 * product + loss
