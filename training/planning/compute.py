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

    def attention_seconds(self, shape: ModelShape, rows: int, seq_len: int, tp: int) -> tuple[float, float]:
        """The attention of one block, forward and backward.

        A fused kernel leaves out the half above a causal diagonal, and computes the scores again in its backward pass:
        five products for the forward's two. Without one, every score goes to memory and back.
        """
        flops = 4 * rows * seq_len**2 * shape.query_width / tp
        if not self.calibration.score_passes:
            forward = flops * (0.5 if shape.causal else 1) / (self.peak * self.gpu.attention_share)
            return forward, 2.5 * forward
        scores = self.width * rows * seq_len**2 * shape.heads / tp
        products = flops / (self.peak * self.gpu.matrix_share)
        forward = products + self.bytes_seconds(self.calibration.score_passes * scores)
        return forward, 2 * forward

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
        attention, attention_backward = self.attention_seconds(shape, layout.micro_batch, layout.seq_len, layout.tp)
        elementwise = self.elementwise_seconds(shape, tokens, layout)
        forward = products + attention + elementwise
        again = {"none": 0.0, "selective": elementwise, "full": forward}
        backward = 2 * products + attention_backward + 2 * elementwise + again[layout.activation_checkpointing]
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
