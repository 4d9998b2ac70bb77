"""``ring_all_reduce``: called on tensors of several shapes; is the sum right, and the traffic?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from learn.checking.calls import RecordedCalls
from learn.checking.finding import Finding

PROMISE = "every rank holds the sum, and none has sent more than a ring needs to"
HANG_HINT = (
    "dist.send waits until the other rank receives: if all ranks send first, none ever receives. And does the rank "
    "that you receive from send to you?"
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
    digits = [(torch.arange(math.prod(shape)) % 9 + 1).double().view(shape) * base**rank for shape in shapes]
    return [*digits, torch.rand(401, generator=torch.Generator().manual_seed(rank))]


def _base(world_size: int) -> int:
    """Rank r holds 1 to 9 times base^r: a sum's digits tell which ranks are in it."""
    return 100 if world_size < 8 else 40  # with 100, the sum of nine ranks would be rounded


def observe(function: Callable[[torch.Tensor], None]) -> list[Seen]:
    seen = []
    for tensor in tensors(dist.get_rank(), dist.get_world_size()):
        with RecordedCalls() as recorded:
            function(tensor)
        sends = [call for call in recorded.calls if call.name == "send"]
        seen.append(
            Seen(
                tensor.clone(),
                sum(call.num_bytes for call in sends),
                sorted({call.peer for call in sends}),
                [call.name for call in recorded.calls if call.name not in ("send", "recv")],
            )
        )
    return seen


def judge(seen: Sequence[Sequence[Seen]]) -> Finding | None:
    num_ranks = len(seen)
    if used := [name for one in seen for call in one for name in call.collectives]:
        hint = "This lesson is about what happens inside a collective: only sends and receives are allowed."
        return Finding(f"calls a collective, {used[0]}", hint)
    own = list(zip(*(tensors(rank, num_ranks) for rank in range(num_ranks)), strict=True))
    held = list(zip(*([call.tensor for call in one] for one in seen), strict=True))
    for case in range(len(own)):
        total = torch.stack(own[case]).sum(0)
        if not all(_close(tensor, total) for tensor in held[case]):
            return _wrong_sum(own, held, case)
    if rank := next((rank for rank, tensor in enumerate(held[-1]) if not torch.equal(tensor, held[-1][0])), None):
        hint = (
            "Rounding depends on the order of the additions. If each rank adds up for itself, replicas drift apart: "
            "let one rank finish a sum, and the others copy it."
        )
        place = (held[-1][rank] != held[-1][0]).nonzero()[0].item()
        values = f"{held[-1][0][place].item():.9g} on rank 0 and {held[-1][rank][place].item():.9g} on rank {rank}"
        return Finding("the ranks hold different bits", hint, f"element {place} of {len(held[-1][0])} is {values}")
    return _wrong_sends([one[-1] for one in seen], own[-1][0])


def _right(tensor: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Which elements are equal: the digits exactly, random numbers except for rounding."""
    return torch.isclose(tensor, expected, rtol=1e-15 if expected.dtype == torch.float64 else 1e-4, atol=0)


def _close(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(_right(tensor, expected).all())


def _wrong_sends(seen: Sequence[Seen], tensor: torch.Tensor) -> Finding | None:
    num_ranks, chunk = len(seen), math.ceil(len(tensor) / len(seen)) * tensor.element_size()
    limit = 2 * (num_ranks - 1) / num_ranks * tensor.nbytes + chunk
    for rank, one in enumerate(seen):
        if one.num_bytes > limit:
            detail = f"{tensor.nbytes} bytes on each of {num_ranks} ranks: at most {limit:.0f} sent, rank {rank} sends "
            hint = "How much of the tensor has to leave a rank in one step, if every rank works at the same time?"
            return Finding("a rank sends too much", hint, f"{detail}{one.num_bytes}")
    for rank, one in enumerate(seen):
        if one.destinations != [(rank + 1) % num_ranks]:
            hint = "In a ring every rank has one neighbour to send to, and one to receive from."
            return Finding(
                f"rank {rank} sends to {', '.join(map(str, one.destinations))}, not only to the next rank", hint
            )
    return None


def _wrong_sum(own: Sequence[Sequence[torch.Tensor]], held: Sequence[Sequence[torch.Tensor]], case: int) -> Finding:
    """The mistake that explains the first case that is wrong."""
    num_ranks, total = len(own[case]), torch.stack(own[case]).sum(0)
    detail = _example(own[case], held[case])
    if case > 0:
        shapes = (str(tuple(own[place][0].shape)).replace(",)", ")") for place in (0, case))
        problem = "right for a tensor of shape {}, wrong for {}".format(*shapes)
        return Finding(problem, f"Print the chunks: does each element belong to one, on all ranks? {WAIT}", detail)
    if all(map(_close, held[case], own[case])):
        hint = f"Nothing has been written into the tensor. Are your chunks views of it, or copies? {WAIT}"
        return Finding("each rank still has its own numbers", hint, detail)
    if all(_close(tensor, total / num_ranks) for tensor in held[case]):
        return Finding("divides by the number of ranks", "An all-reduce sums; it is DDP that divides.", detail)
    right = torch.stack([_right(tensor, total) for tensor in held[case]])
    if complete := [str(rank) for rank, row in enumerate(right) if row.all()]:
        return Finding(f"only rank {', '.join(complete)} has the sum", f"Every rank needs it. {WAIT}", detail)
    times = [_times(value, place, num_ranks) for tensor in held[case] for place, value in enumerate(tensor.tolist())]
    if None in times:
        return Finding("the numbers are not the sum", f"Which chunk does a rank receive in a step? {WAIT}", detail)
    if any(max(counts) > 1 for counts in times):
        hint = f"When is a received chunk added to the rank's own, and when does it replace it? {WAIT}"
        return Finding("a rank's numbers are added more than once", hint, detail)
    if (right.sum(0) == 1).all():
        hint = "Each chunk's sum is on one rank now. How do the other ranks get it?"
        return Finding("stops after the reduce-scatter", hint, detail)
    hint = f"How many steps does a chunk need to visit all ranks, and which chunk does a rank send in each? {WAIT}"
    return Finding("some ranks' numbers are missing from the sum", hint, detail)


def _times(value: float, place: int, num_ranks: int) -> list[int] | None:
    """How often each rank's number is in a sum; None if the sum is made of anything else."""
    base = _base(num_ranks)
    if not 0 <= value < base**num_ranks:
        return None
    counts = [divmod(int(value) // base**rank % base, place % 9 + 1) for rank in range(num_ranks)]
    return None if any(rest for _, rest in counts) else [times for times, _ in counts]


def _example(own: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> str:
    """The first wrong element of the first rank that has one."""
    total = torch.stack(list(own)).sum(0)
    rank = next(rank for rank, tensor in enumerate(held) if not _close(tensor, total))
    place = (~_right(held[rank], total)).flatten().nonzero()[0].item()
    digits = 15 if total.dtype == torch.float64 else 9
    *terms, expected, found = (f"{one.flatten()[place].item():.{digits}g}" for one in (*own, total, held[rank]))
    return f"element {place}: {' + '.join(terms)} = {expected}; rank {rank} has {found}"
