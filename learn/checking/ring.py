"""``ring_all_reduce``: called on tensors of several shapes; is the sum right, and the traffic?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from learn.checking.calls import RecordedCalls
from learn.checking.finding import Exercise, Finding, first_mistake

PROMISE = "every rank holds the sum, and none has sent more than a ring needs to"
HANG_HINT = (
    "dist.send waits until the other rank receives: if all ranks send first, none ever receives. "
    "And does the rank that you receive from send to you?"
)
WAIT = "And: isend and irecv are done only after wait()."


@dataclass(frozen=True)
class Seen:
    """One rank's tensor after a call, and what the rank sent in it."""

    tensor: torch.Tensor
    num_bytes: int
    destinations: list[int]
    collectives: list[str]


def tensors(rank: int, world_size: int) -> list[torch.Tensor]:
    """One rank's tensors: sizes that N divides and not, a single element, random numbers."""
    shapes = ((3 * world_size,), (2, 2 * world_size), (2 * world_size + 1,), (1,))
    base = _base(world_size)
    ones = [(torch.arange(math.prod(shape)) % 9 + 1).double().view(shape) for shape in shapes]
    digits = [one * base**rank for one in ones]
    # Random numbers last, because their sums are rounded: they show whether all ranks add in the
    # same order, and a tensor of this size shows how much is sent.
    return [*digits, torch.rand(401, generator=torch.Generator().manual_seed(rank))]


def _base(world_size: int) -> int:
    """Rank r holds 1 to 9 times base^r: a sum's digits tell which ranks are in it."""
    # A digit holds a sum up to base - 1. On 2 to 7 ranks a rank's number may even be in it 11 times
    # before digits run into each other. With 100, the sum of nine ranks would be rounded.
    return 100 if world_size < 8 else 40


def observe(function: Callable[[torch.Tensor], None]) -> list[Seen]:
    seen = []
    for tensor in tensors(dist.get_rank(), dist.get_world_size()):
        with RecordedCalls() as recorded:
            function(tensor)
        sends = [call for call in recorded.calls if call.name == "send"]
        others = [call.name for call in recorded.calls if call.name not in ("send", "recv")]
        destinations = sorted({call.peer for call in sends})
        sent = sum(call.num_bytes for call in sends)
        seen.append(Seen(tensor.clone(), sent, destinations, others))
    return seen


def judge(seen: Sequence[Sequence[Seen]]) -> Finding | None:
    num_ranks = len(seen)
    if used := [name for call in chain(*seen) for name in call.collectives]:
        hint = (
            "This lesson is about what happens inside a collective: only sends and receives are "
            "allowed."
        )
        return Finding(f"calls a collective, {used[0]}", hint)
    # By case, then by rank: what the ranks had, and what they hold now.
    own = list(zip(*(tensors(rank, num_ranks) for rank in range(num_ranks)), strict=True))
    held = list(zip(*([call.tensor for call in one] for one in seen), strict=True))
    return (
        _wrong_sum(own, held)
        or _different_bits(held[-1])
        or _wrong_sends([one[-1] for one in seen], own[-1][0])
    )


def _different_bits(held: Sequence[torch.Tensor]) -> Finding | None:
    first = held[0]
    for rank, other in enumerate(held):
        if torch.equal(first, other):
            continue
        hint = (
            "Rounding depends on the order of the additions. If each rank adds up for itself, "
            "replicas drift apart: let one rank finish a sum, and the others copy it."
        )
        index = (other != first).nonzero()[0].item()
        values = f"{first[index].item():.9g} on rank 0 and {other[index].item():.9g} on rank {rank}"
        detail = f"element {index} of {len(first)} is {values}"
        return Finding("the ranks hold different bits", hint, detail)
    return None


def _right(tensor: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Which elements are equal: the digits exactly, random numbers except for rounding."""
    rtol = 1e-15 if expected.dtype == torch.float64 else 1e-4
    return torch.isclose(tensor, expected, rtol=rtol, atol=0)


def _close(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(_right(tensor, expected).all())


def _wrong_sends(seen: Sequence[Seen], tensor: torch.Tensor) -> Finding | None:
    num_ranks, chunk = len(seen), math.ceil(len(tensor) / len(seen)) * tensor.element_size()
    # What a ring sends, and one chunk more: chunks may be padded to one size.
    limit = 2 * (num_ranks - 1) / num_ranks * tensor.nbytes + chunk
    for rank, one in enumerate(seen):
        if one.num_bytes > limit:
            size = f"{tensor.nbytes} bytes on each of {num_ranks} ranks"
            hint = (
                "How much of the tensor has to leave a rank in one step, if every rank works at "
                "the same time?"
            )
            detail = f"{size}: at most {limit:.0f} sent, rank {rank} sends {one.num_bytes}"
            return Finding("a rank sends too much", hint, detail)
    for rank, one in enumerate(seen):
        if one.destinations != [(rank + 1) % num_ranks]:
            hint = "In a ring every rank has one neighbour to send to, and one to receive from."
            others = ", ".join(map(str, one.destinations))
            return Finding(f"rank {rank} sends to {others}, not only to the next rank", hint)
    return None


def _wrong_sum(
    own: Sequence[Sequence[torch.Tensor]],
    held: Sequence[Sequence[torch.Tensor]],
) -> Finding | None:
    """The mistake that explains the first case that is wrong."""
    for case, (before, after) in enumerate(zip(own, held, strict=True)):
        total = torch.stack(before).sum(0)
        if all(_close(tensor, total) for tensor in after):
            continue
        detail = _example(before, after)
        # The first case is the easiest, a vector that N divides. If it is right, the cutting is
        # wrong.
        if case == 0:
            return _wrong_numbers(before, after, total, detail)
        shapes = (str(tuple(own[index][0].shape)).replace(",)", ")") for index in (0, case))
        problem = "right for a tensor of shape {}, wrong for {}".format(*shapes)
        hint = f"Print the chunks: does each element belong to one, on all ranks? {WAIT}"
        return Finding(problem, hint, detail)
    return None


def _wrong_numbers(
    own: Sequence[torch.Tensor], held: Sequence[torch.Tensor], total: torch.Tensor, detail: str
) -> Finding:
    num_ranks = len(own)
    # By element, because a rank may have the right sum in some chunks and not in others.
    right = torch.stack([_right(tensor, total) for tensor in held])  # (ranks, elements)
    complete = [str(rank) for rank, row in enumerate(right) if row.all()]
    mistakes = [
        (
            all(map(_close, held, own)),
            "each rank still has its own numbers",
            "Nothing has been written into the tensor. Are your chunks views of it, or copies? "
            f"{WAIT}",
        ),
        (
            all(_close(tensor, total / num_ranks) for tensor in held),
            "divides by the number of ranks",
            "An all-reduce sums; it is DDP that divides.",
        ),
        (complete, f"only rank {', '.join(complete)} has the sum", f"Every rank needs it. {WAIT}"),
    ]
    return first_mistake(mistakes, detail) or Finding(*_wrong_terms(held, right), detail)


def _wrong_terms(held: Sequence[torch.Tensor], right: torch.Tensor) -> tuple[str, str]:
    # Of each element on each rank, how often each rank's number is in it.
    values = [pair for tensor in held for pair in enumerate(tensor.tolist())]
    times = [_times(value, index, len(held)) for index, value in values]
    if None in times:
        hint = f"Which chunk does a rank receive in a step? {WAIT}"
        return "the numbers are not the sum", hint
    if any(max(counts) > 1 for counts in times):
        hint = (
            f"When is a received chunk added to the rank's own, and when does it replace it? {WAIT}"
        )
        return "a rank's numbers are added more than once", hint
    # Each element is right on exactly one rank.
    if (right.sum(0) == 1).all():
        hint = "Each chunk's sum is on one rank now. How do the other ranks get it?"
        return "stops after the reduce-scatter", hint
    hint = (
        "How many steps does a chunk need to visit all ranks, and which chunk does a rank send "
        f"in each? {WAIT}"
    )
    return "some ranks' numbers are missing from the sum", hint


def _times(value: float, index: int, num_ranks: int) -> list[int] | None:
    """How often each rank's number is in a sum; None if the sum is made of anything else."""
    base = _base(num_ranks)
    if not 0 <= value < base**num_ranks:
        return None
    # Rank r's digit of the sum, divided by the number that rank r had at this place.
    counts = [divmod(int(value) // base**rank % base, index % 9 + 1) for rank in range(num_ranks)]
    return None if any(rest for _, rest in counts) else [times for times, _ in counts]


def _example(own: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> str:
    """The first wrong element of the first rank that has one."""
    total = torch.stack(list(own)).sum(0)
    rank = next(rank for rank, tensor in enumerate(held) if not _close(tensor, total))
    index = (~_right(held[rank], total)).flatten().nonzero()[0].item()
    digits = 15 if total.dtype == torch.float64 else 9
    shown = (*own, total, held[rank])
    *terms, expected, found = (f"{one.flatten()[index].item():.{digits}g}" for one in shown)
    return f"element {index}: {' + '.join(terms)} = {expected}; rank {rank} has {found}"


EXERCISES = {
    "ring_all_reduce": Exercise("ring", PROMISE, observe, judge, HANG_HINT),
}
