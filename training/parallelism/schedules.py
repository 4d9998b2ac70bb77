"""Pipeline schedules: in which order the ranks of a pipeline run the forward and backward passes of
its stages.

=========== ================================================================
==================================== gpipe       all forward passes, then all backward passes
             Huang et al., arXiv 1811.06965 1f1b        forward and backward in turn: fewer
activations kept             Narayanan et al., arXiv 2104.04473 interleaved 1f1b with several
smaller stages a rank: a smaller bubble        arXiv 2104.04473, section 2.2 zero_bubble
interleaved, and gradients of weights fill what is left of it    Qi et al., arXiv 2401.10241 zbv
    the same, on stages that go down the ranks and up again          arXiv 2401.10241, section 6
=========== ================================================================
====================================
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import get_schedule_class

from common.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """A schedule: its name in torch, the stages per rank, whether they are placed as a V, and its name for users."""

    torch_name: str
    stages_per_rank: int
    title: str
    is_v: bool = False
    splits_backward: bool = False

    @property
    def is_looped(self) -> bool:
        """Whether a rank holds several stages."""
        return self.stages_per_rank > 1


SCHEDULES = {
    "gpipe": Schedule("GPipe", 1, "GPipe"),
    "1f1b": Schedule("1F1B", 1, "1F1B"),
    "interleaved": Schedule("Interleaved1F1B", 2, "Interleaved 1F1B"),
    "zero_bubble": Schedule(
        "InterleavedZeroBubble", 2, "Interleaved zero-bubble", splits_backward=True
    ),
    "zbv": Schedule("ZBVZeroBubble", 2, "Zero-bubble V", is_v=True, splits_backward=True),
}


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage.

    ``kind``: F forward, B backward, or its halves: I for the gradients of inputs, W for those of
    weights.
    """

    stage: int
    kind: str
    micro_batch: int


def stages_of(
    schedule: str, rank: int, num_ranks: int, stages_per_rank: int | None = None
) -> list[int]:
    """The numbers of the stages that a rank holds, in model order."""
    count = stages_per_rank or SCHEDULES[schedule].stages_per_rank
    if SCHEDULES[schedule].is_v:
        # A V: down the ranks with the first half of the stages, and back up with the second. So the
        # first and last stage are on rank 0, and a micro-batch turns around on the last rank
        # without a transfer.
        return [rank, 2 * num_ranks - 1 - rank]
    # Round-robin: with 2 ranks and 4 stages, rank 0 holds 0 and 2, rank 1 holds 1 and 3.
    return [rank + turn * num_ranks for turn in range(count)]


def check_micro_batches(schedule: str, num_ranks: int, micro_batches: int, flag: str) -> None:
    """Check that a schedule can run this many micro-batches, the number that ``flag`` sets.

    Raises:
        UserError: there are too few of them, or not a multiple of the ranks.
    """
    where = f"{flag} {micro_batches}: the {schedule} schedule over {num_ranks} ranks"
    if schedule != "gpipe" and micro_batches < num_ranks:
        raise UserError(
            f"{where} needs at least {num_ranks} micro-batches (gpipe takes any number, but is "
            "idle most of the time)",
            code="uneven-split",
        )
    rounds = max(1, micro_batches // num_ranks)
    if schedule in ("interleaved", "zero_bubble") and micro_batches % rounds:
        raise UserError(
            f"{where} runs in {rounds} rounds of equal size; use a multiple of {num_ranks}",
            code="uneven-split",
        )


def order_of_actions(
    schedule: str, num_ranks: int, micro_batches: int, stages_per_rank: int | None = None
) -> list[list[Action]]:
    """What each rank computes, in order."""
    check_micro_batches(schedule, num_ranks, micro_batches, "--micro_batches")
    kind = SCHEDULES[schedule]
    if not kind.is_looped:
        return [
            _one_stage_order(schedule, rank, num_ranks, micro_batches) for rank in range(num_ranks)
        ]
    count = stages_per_rank or kind.stages_per_rank
    # All that a schedule needs to know about a stage to order its actions.
    fields: dict[str, Any] = {
        "num_stages": count * num_ranks,
        "group_size": num_ranks,
        "group_rank": 0,
        "submod": None,
    }
    order = get_schedule_class(kind.torch_name)(
        [SimpleNamespace(**fields) for _ in range(count)], micro_batches
    )
    return [
        [
            Action(a.stage_index, a.computation_type.value, a.microbatch_index)
            for a in actions
            if a is not None
        ]
        for _, actions in sorted(order.pipeline_order.items())
    ]


def _one_stage_order(schedule: str, rank: int, num_ranks: int, micro_batches: int) -> list[Action]:
    # The order in which torch's single-stage schedules run; the one they print numbers the last
    # rank's forwards from 1. 1F1B: a rank runs just enough forward passes ahead to fill the
    # pipeline behind it, then one backward per forward. So it keeps the activations of `ahead`
    # micro-batches; gpipe keeps all of them.
    ahead = micro_batches if schedule == "gpipe" else num_ranks - rank
    forward = [Action(rank, "F", i) for i in range(micro_batches)]
    backward = [Action(rank, "B", i) for i in range(micro_batches)]
    steady = [action for pair in zip(backward, forward[ahead:], strict=False) for action in pair]
    return forward[:ahead] + steady + backward[micro_batches - ahead :]
