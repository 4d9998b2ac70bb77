"""``average_in_buckets``: called on parameters of several sizes; when were buckets averaged?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import nn

from learn.checking.calls import Call, RecordedCalls
from learn.checking.finding import WAIT, Exercise, Finding, Mistake, first_mistake
from learn.checking.probe import first_wrong, numbers_of, same, same_on_all

PROMISE = "all gradients are averaged in buckets, launched before the backward pass has ended"
HANG_HINT = (
    "The checker lets rank 0 finish its backward pass before the other ranks begin theirs. A hook "
    "that waits for an all-reduce then never returns. And do all ranks launch every bucket?"
)
# In the order of the backward pass; in float64, because a parameter's bytes are not always 4 per
# element.
SHAPES = [torch.Size(shape) for shape in ((3,), (2, 2), (5,), (4, 5), (2,), (7, 1), (3,), (1, 2))]
BUCKET_BYTES = 96
# Parameters in each: 96 bytes, 160 (a single one that is larger than a bucket), 96 and 16.
BUCKETS = (3, 1, 3, 1)
STEPS = 2
LATE_SECONDS = 0.1  # in which a finish() of rank 0 that does not wait has returned
GRADIENT = "gradient"  # the name under which a computed gradient is recorded among the calls

# Of one step: whether each gradient is the mean is judged from these.
Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class Seen:
    """One rank's gradients after each step, and what was recorded in it: gradients and calls."""

    gradients: list[Gradients]
    recorded: list[list[Call]]


def own_gradients(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [numbers_of(rank, shape, generator).double() for shape in SHAPES]


def observe(function: Callable[[list[nn.Parameter], int], Callable[[], None]]) -> Seen:
    rank = dist.get_rank()
    # torchrun's kind of store, for the checker's own signals: a collective would be recorded, and
    # would be one more that a solution could get out of step with.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    recorder = RecordedCalls()
    for parameter in parameters:
        # Before the learner's hooks, so that a gradient is recorded before its all-reduce.
        parameter.register_post_accumulate_grad_hook(partial(_record, recorder))
    finish = function(parameters, BUCKET_BYTES)
    seen = Seen([], [])
    for step in range(STEPS):
        # The backward pass goes through this sum from its end, so the first parameters must come
        # last in it. d(parameter * gradient)/d(parameter) is that gradient.
        loss = torch.zeros(())
        pairs = list(zip(parameters, own_gradients(rank, step), strict=True))
        for parameter, gradient in reversed(pairs):
            loss = loss + (parameter * gradient).sum()
        # The others begin when rank 0 is through its backward pass. No all-reduce can be complete
        # before that, so a hook that waits for one never returns.
        if rank > 0:
            store.wait([f"backward pass {step}"])
            time.sleep(LATE_SECONDS)
        recorder.calls.clear()
        with recorder:
            loss.backward()
            if rank == 0:
                store.set(f"backward pass {step}", "has ended")
            finish()
        # Copied at once: a collective that the solution did not wait for must not get the time to
        # finish.
        gradients = [None if one.grad is None else one.grad.detach().clone() for one in parameters]
        seen.gradients.append(gradients)
        seen.recorded.append(list(recorder.calls))
        for parameter in parameters:
            parameter.grad = None
    return seen


def _record(recorder: RecordedCalls, parameter: torch.Tensor) -> None:
    recorder.calls.append(Call(GRADIENT))


def judge(seen: Sequence[Seen]) -> Finding | None:
    # The values before the order of the calls: a wrong result is the more important news.
    if finding := _wrong_means(seen):
        return finding
    # The first launch that is wrong, of the earlier step: later ones may only follow from it.
    cases = [(step, rank) for step in range(STEPS) for rank in range(len(seen))]
    found = (_wrong_launches(seen[rank].recorded[step], step, rank) for step, rank in cases)
    return next(filter(None, found), None)


def _wrong_means(seen: Sequence[Seen]) -> Finding | None:
    for step in range(STEPS):
        own = [own_gradients(rank, step) for rank in range(len(seen))]
        held = [one.gradients[step] for one in seen]
        wrong = [index for index in range(len(SHAPES)) if not _is_mean(index, held, own)]
        # The second step catches a solution that is right by its initial state: counters that are
        # not set back, or a list of launched buckets that is never emptied.
        if wrong and step > 0:
            hint = (
                "What have the hooks counted or collected in the first step, and what resets it? "
                f"{WAIT}"
            )
            problem = f"right in step 1, wrong in step {step + 1}"
            return Finding(problem, hint, _example(wrong[0], held, own))
        if wrong:
            return _wrong_values(wrong, held, own)
    return None


def _is_mean(index: int, held: Sequence[Gradients], own: Sequence[Gradients]) -> bool:
    mean = torch.stack(_at(index, own)).mean(0)
    return same_on_all(_at(index, held), [mean] * len(held))


def _at(index: int, by_rank: Sequence[Gradients]) -> Gradients:
    """One parameter's gradient on each rank."""
    return [gradients[index] for gradients in by_rank]


def _wrong_values(
    wrong: Sequence[int],
    held: Sequence[Gradients],
    own: Sequence[Gradients],
) -> Finding:
    num_ranks = len(own)
    total = [torch.stack(parts).sum(0) for parts in zip(*own, strict=True)]
    left = [str(index) for index in wrong if same_on_all(_at(index, held), _at(index, own))]
    mistakes = [
        (
            len(left) == len(SHAPES),
            "each rank still has its own gradients",
            f"Does what the all-reduce computes get into each .grad? {WAIT}",
        ),
        (
            left,
            f"only some gradients are averaged, those of parameters {', '.join(left)} are not",
            "When do you launch a bucket that never becomes full, and one whose last gradient "
            f"comes last? {WAIT}",
        ),
        (
            all(same(gradients[index], total[index]) for gradients in held for index in wrong),
            "forgot to divide",
            f"The sum over {num_ranks} ranks makes a step {num_ranks} times too long. What makes "
            "it a mean?",
        ),
        # Rank 0 is the first to call finish(), so if nobody waits, it has its own gradients, and
        # others may be lucky.
        (
            all(same(held[0][index], own[0][index] / num_ranks) for index in wrong),
            "the sums of the all-reduces are not in .grad when finish returns",
            f"Each gradient is divided, but not summed over the ranks. {WAIT}",
        ),
        (
            True,
            "the gradients are not the mean over the ranks",
            "Is each gradient computed when its bucket is launched, and written back to where it "
            f"came from? {WAIT}",
        ),
    ]
    return first_mistake(mistakes, _example(wrong[0], held, own))


def _wrong_launches(recorded: Sequence[Call], step: int, rank: int) -> Finding | None:
    """Compare one step's all-reduces, each with the gradients so far, with what was asked for."""
    # Of each all-reduce: how many gradients were computed when it was launched, and its bytes.
    launches, num_computed = [], 0
    for call in recorded:
        num_computed += call.name == GRADIENT
        if call.name == "allreduce":
            launches.append((num_computed, call.num_bytes))
    # What was asked for: the number of the gradient that completes each bucket, and its bytes.
    ends = list(accumulate(BUCKETS))
    num_bytes = [8 * shape.numel() for shape in SHAPES]
    sizes = [sum(num_bytes[start:end]) for start, end in pairwise([0, *ends])]
    when, counts = [computed for computed, _ in launches], [sent for _, sent in launches]
    where = f"step {step + 1}, rank {rank}"
    sent = f"{len(SHAPES)} gradients, all-reduces of {counts} bytes; expected: {sizes}"
    complete = f"complete after {ends} of {len(SHAPES)} gradients, and launched after {when}"
    # Sizes first: with other buckets than those asked for, their moments mean nothing.
    return first_mistake(_cut_wrongly(counts, sizes), f"{where}: {sent}") or first_mistake(
        _launched_late(when, ends, in_order=counts == sizes),
        f"{where}: the buckets are {complete}",
    )


def _cut_wrongly(counts: Sequence[int], sizes: Sequence[int]) -> list[Mistake]:
    is_large = any(count > BUCKET_BYTES and count not in sizes for count in counts)
    return [
        (
            len(counts) == len(SHAPES),
            "makes one all-reduce per gradient",
            "Each call has a fixed cost. What can be sent together?",
        ),
        (
            len(counts) == 1,
            "makes one all-reduce for all gradients",
            "It cannot begin before the last gradient is computed.",
        ),
        (
            sorted(counts) != sorted(sizes),
            "a bucket is too large" if is_large else "the buckets are not those asked for",
            "When does the next gradient still fit, and when does a new bucket begin?",
        ),
    ]


def _launched_late(when: Sequence[int], ends: Sequence[int], *, in_order: bool) -> list[Mistake]:
    order = "not filled in the order of the parameters"
    # In DDP's order: as soon as the gradient that completes a bucket is there, and not one later.
    return [
        (
            min(when) == len(SHAPES),
            "no all-reduce is launched before the backward pass has ended",
            "While a bucket is being sent, the backward pass could compute the next gradients. "
            "Who knows that one is ready?",
        ),
        (
            not in_order or when != ends,
            f"a bucket is {'launched too late' if in_order else order}",
            "At which gradient do you know that a bucket is complete: its last one, or the next "
            "bucket's first one?",
        ),
    ]


def _example(index: int, held: Sequence[Gradients], own: Sequence[Gradients]) -> str:
    """The first element of a gradient, on the first rank that has it wrong."""
    mean = torch.stack(_at(index, own)).mean(0)
    rank = first_wrong(_at(index, held), [mean] * len(held))
    found, element = held[rank][index], 0
    if found is not None and found.shape == mean.shape:
        element = (found != mean).flatten().nonzero()[0].item()
    terms = " + ".join(f"{gradient.flatten()[element].item():g}" for gradient in _at(index, own))
    now = "None" if found is None else f"{found.flatten()[element].item():g}"
    where = f"parameter {index}, element {element} of its gradient"
    value = f"({terms}) / {len(own)} = {mean.flatten()[element].item():g}"
    return f"{where}: {value}; rank {rank} has {now}"


EXERCISES = {
    "average_in_buckets": Exercise("buckets", PROMISE, observe, judge, HANG_HINT),
}
