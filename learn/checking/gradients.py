"""``average_gradients``: called on gradients that differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from learn.checking.finding import WAIT, Exercise, Finding, names_are_not
from learn.checking.probe import Probe, same, same_on_all

PROMISE = "every gradient is the mean over the ranks"

Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Seen:
    """One rank's model after the call: gradients by name, and the weights that were changed."""

    gradients: Gradients
    changed: list[str]


def observe(function: Callable[[nn.Module], None]) -> Seen:
    model = Probe(0)  # equal on all ranks, as after the broadcast; only the gradients differ
    before = model.tensors()
    for name, gradient in model.gradients(dist.get_rank()).items():
        model.get_parameter(name).grad = gradient
    function(model)
    # Copied at once: a collective that the solution did not wait for must not get the time to
    # finish.
    gradients = {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }
    after = model.tensors()
    changed = [name for name, tensor in before.items() if not same(after.get(name), tensor)]
    return Seen(gradients, changed)


def judge(seen: Sequence[Seen]) -> Finding | None:
    if changed := [name for one in seen for name in one.changed]:
        hint = (
            "The gradients are in each parameter's .grad; the optimizer then changes the weights."
        )
        return Finding(f"changes the weights themselves ({changed[0]})", hint)
    own = [Probe(0).gradients(rank) for rank in range(len(seen))]
    # Each parameter is judged on its own: which are wrong, and whether all in the same way, shows
    # whether the loop or what is done in it is wrong.
    kinds = {name: _kind(name, seen, own) for name in own[0]}
    wrong = [name for name, kind in kinds.items() if kind != "right"]
    if wrong:
        return _wrong(kinds, len(seen), _example(wrong[0], seen, own))
    return _invented(seen, own)


def _kind(name: str, seen: Sequence[Seen], all_own: Sequence[dict[str, torch.Tensor]]) -> str:
    """How the ranks' gradients were made; ``sum / K``: K is not the number of ranks."""
    held = [one.gradients.get(name) for one in seen]
    own = [gradients[name] for gradients in all_own]
    num_ranks, total = len(own), torch.stack(list(own)).sum(0)
    right = [total / num_ranks] * num_ranks
    # As by a solution that divides first, and whose collective did not write into .grad.
    divided = [gradient / num_ranks for gradient in own]
    suspects = {
        "right": right,
        "own": own,
        "own, divided": divided,
        "rank 0's": [own[0]] * num_ranks,
    }
    for kind, expected in suspects.items():
        if same_on_all(held, expected):
            return kind
    if any(gradient is None for gradient in held):
        return "gone"
    factor = _factor(held, total)
    if factor > 0:
        return f"sum / {1 / factor:.4g}"
    return "right on rank 0" if same(held[0], right[0]) else "other"


def _factor(held: Sequence[torch.Tensor], total: torch.Tensor) -> float:
    """What the sum was multiplied by on all ranks; 0 if the gradients are no such thing."""
    # By least squares: the factor that fits best, and if it fits everywhere, that was the mistake.
    factor = (held[0] * total).sum() / total.square().sum()
    fits = all(same(gradient, factor * total) for gradient in held)
    return factor.item() if fits else 0.0


def _wrong(kinds: dict[str, str], num_ranks: int, detail: str) -> Finding:
    left = [name for name, kind in kinds.items() if kind == "own"]
    if left and len(left) < len(kinds):
        hint = "Which parameters does your loop visit? Each that has a gradient needs its mean."
        problem = f"only some gradients are averaged, {names_are_not(left)}"
        return Finding(problem, hint, detail)
    mistakes = set(kinds.values()) - {"right"}
    kind = mistakes.pop() if len(mistakes) == 1 else "other"
    if kind.startswith("sum / "):
        return _wrong_divisor(kind.removeprefix("sum / "), num_ranks, detail)
    problem, hint = _EXPLAINED[kind]
    return Finding(problem, hint, detail)


def _wrong_divisor(divisor: str, num_ranks: int, detail: str) -> Finding:
    if divisor == "1":
        hint = (
            f"The sum over {num_ranks} ranks makes a step {num_ranks} times too long. What makes "
            "it a mean?"
        )
        return Finding("forgot to divide", hint, detail)
    if divisor == f"{num_ranks**2:.4g}":
        hint = "Does the collective divide already, or each rank before it?"
        return Finding("divided twice", hint, detail)
    hint = (
        "The process group knows how many ranks there are; the checker tries more than one number."
    )
    return Finding(f"divides by {divisor}, but there are {num_ranks} ranks", hint, detail)


_EXPLAINED = {
    "own": (
        "each rank still has its own gradients",
        "Nothing was written into .grad. Does the call work in place, or return what you have to "
        f"keep? {WAIT}",
    ),
    "own, divided": (
        "divides, but does not sum over the ranks",
        "Each rank has its own gradient divided by the number of ranks: where do the others come "
        f"in? {WAIT}",
    ),
    "rank 0's": (
        "every rank has rank 0's gradients",
        "A broadcast throws away the gradients of the other ranks' rows.",
    ),
    "right on rank 0": (
        "only rank 0 has the mean",
        "Some collectives give their result to one rank, others to all of them; every rank has "
        f"to step. {WAIT}",
    ),
    "gone": (
        "a gradient is gone: .grad is None",
        "The optimizer reads each parameter's .grad after your function has returned.",
    ),
    "other": (
        "the gradients are not the mean over the ranks",
        f"Print one gradient before and after. {WAIT}",
    ),
}


def _invented(seen: Sequence[Seen], own: Sequence[dict[str, torch.Tensor]]) -> Finding | None:
    """A parameter without gradient may stay without, or get zeros, but nothing else."""
    for one in seen:
        for name, gradient in one.gradients.items():
            if name not in own[0] and gradient is not None and gradient.any():
                hint = "No rank had a gradient for it: where does this one come from?"
                return Finding(f"{name} took no part in the loss and has a gradient now", hint)
    return None


def _example(name: str, seen: Sequence[Seen], own: Sequence[dict[str, torch.Tensor]]) -> str:
    """The first element of the gradient, on the first rank that has it wrong."""
    numbers = torch.stack([gradients[name].flatten() for gradients in own])
    mean = numbers.mean(0)
    for rank, one in enumerate(seen):
        held = one.gradients.get(name)
        right = mean.view_as(own[0][name])
        if same(held, right):
            continue
        found = "None" if held is None else f"{held.flatten()[0].item():g}"
        terms = " + ".join(f"{number:g}" for number in numbers[:, 0].tolist())
        value = f"({terms}) / {len(own)} = {mean[0].item():g}"
        return f"{name}.grad, first element: {value}; rank {rank} has {found}"
    return ""


EXERCISES = {
    "average_gradients": Exercise("data_parallel", PROMISE, observe, judge),
}
