"""Step time: what a step takes on the slowest rank, and which of its collectives computation hides.

Bubbles: GPipe, arXiv 1811.06965, section 2.3, and 1F1B, (p-1) micro-batches of m + p - 1; interleaved: that over the
stages a rank holds, arXiv 2104.04473, section 2.2.2; zero-bubble: that of ZB-H1, arXiv 2401.10241, table 2, over the
stages too, which is what torch's orders give. Overlap: FSDP, arXiv 2304.11277, section 3.3; DDP, arXiv 2006.15704,
section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.planning.calibration import OPTIMIZER_BYTES, WEIGHT_BYTES
from training.planning.communication import transfers
from training.planning.compute import Roofline
from training.planning.hardware import Cluster
from training.planning.memory import is_gathered, keeps_gathered
from training.planning.partition import SPLIT_SCHEDULES, STAGES_PER_RANK, Stage, rank_parameters, representative_ranks
from training.planning.shapes import Layout, ModelShape, StepTime, Transfer


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch on one stage."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward


def estimate_step(shape: ModelShape, layout: Layout, cluster: Cluster) -> tuple[StepTime, list[Transfer]]:
    """Seconds of one optimizer step, and the collectives of the rank that takes the longest."""
    estimates = []
    for stage in representative_ranks(shape, layout):
        found = transfers(shape, layout, stage, cluster)
        estimates.append((_stage_time(shape, layout, stage, cluster, found), found))
    return max(estimates, key=lambda estimate: estimate[0].total)


def _stage_time(shape: ModelShape, layout: Layout, stage: Stage, cluster: Cluster, found: list[Transfer]) -> StepTime:
    roofline = Roofline(cluster, layout.precision)
    passes = _passes(shape, layout, stage, roofline)
    along = sum(transfer.seconds for transfer in found if transfer.dimension in ("tp", "pp"))
    return StepTime(
        compute=layout.accumulation * passes.total,
        communication=along + _exposed_data_parallel(layout, stage, cluster, found, passes),
        bubble=bubble_seconds(layout, passes, along / layout.accumulation),
        optimizer=_optimizer_seconds(shape, layout, stage, roofline),
    )


def _passes(shape: ModelShape, layout: Layout, stage: Stage, roofline: Roofline) -> Passes:
    forward, backward = roofline.block_seconds(shape, layout)
    blocks = float(stage.blocks)
    if stage.last:
        blocks -= 1 - shape.last_block_flops(layout.seq_len) / shape.block_flops(layout.seq_len)
    head_forward, head_backward = roofline.head_seconds(shape, layout) if stage.last else (0.0, 0.0)
    # Every micro-batch reads each weight in fp32 or gathered, writes its copy, and adds to its gradient.
    weights = roofline.bytes_seconds(WEIGHT_BYTES[layout.precision] * rank_parameters(shape, layout, stage))
    return Passes(blocks * forward + head_forward + weights / 2, blocks * backward + head_backward + weights / 2)


def bubble_seconds(layout: Layout, passes: Passes, along: float) -> float:
    """Seconds that the slowest stage waits for the others to begin and to end.

    Args:
        layout: its schedule, stages and micro-batches.
        passes: of one micro-batch through all stages of a rank; half the backward pass is for weights.
        along: collectives of one micro-batch that its stage waits for.
    """
    if layout.pp == 1:
        return 0.0
    wait = passes.total
    if layout.schedule in SPLIT_SCHEDULES:
        # F + I - W with halves of the backward pass that are equal, and no less than the next rank takes for one.
        wait = max(passes.forward, passes.backward / 2)
    bubble = (layout.pp - 1) * (wait + along)
    if layout.schedule == "zbv":
        # Fewer micro-batches than 2p - 1 do not fill the V.
        bubble = max(bubble, (2 * layout.pp - 1 - layout.accumulation) * (passes.backward + along))
    return bubble / STAGES_PER_RANK[layout.schedule]


def _exposed_data_parallel(
    layout: Layout, stage: Stage, cluster: Cluster, found: list[Transfer], passes: Passes
) -> float:
    """Seconds of data-parallel collectives that stick out behind the computation they run beside."""
    seconds = {transfer.collective: transfer.seconds for transfer in found if transfer.dimension.startswith("dp")}
    reducing = seconds.get("all-reduce", 0.0)

    def exposed(communication: float, window: float) -> float:
        # The first block's weights, or the last one's gradients, have nothing to run beside.
        hidden = min(communication * (1 - 1 / (stage.blocks + 1)), cluster.calibration.overlap_share * window)
        return communication - (1 - cluster.calibration.contention) * hidden

    if not is_gathered(layout):
        # The broadcast of updated weights comes after the step.
        return exposed(reducing, passes.backward) + seconds.get("broadcast", 0.0)
    rounds = 1 if layout.pp > 1 else layout.accumulation
    gathering, scattering = (seconds.get(name, 0.0) / rounds for name in ("all-gather", "reduce-scatter"))
    ahead, again = (gathering, 0.0) if keeps_gathered(layout) else (gathering / 2, gathering / 2)
    # Copies are added up once, behind the last backward pass.
    last = exposed(again + scattering + reducing, passes.backward)
    each = exposed(ahead, passes.forward)
    return rounds * each + (rounds - 1) * exposed(again + scattering, passes.backward) + last


def _optimizer_seconds(shape: ModelShape, layout: Layout, stage: Stage, roofline: Roofline) -> float:
    shared_by = layout.dp if layout.strategy == "zero1" else layout.dp_shard
    return roofline.bytes_seconds(OPTIMIZER_BYTES * rank_parameters(shape, layout, stage) / shared_by)
