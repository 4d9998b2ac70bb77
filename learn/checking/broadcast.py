"""``broadcast_parameters``: called on models that differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from learn.checking.finding import WAIT, Exercise, Finding, first_mistake, names_are_not
from learn.checking.probe import Probe, first_wrong, same_on_all

PROMISE = "every rank starts with rank 0's weights and buffers"


@dataclass(frozen=True)
class Seen:
    """One rank's model after the call.

    Args:
        tensors: weights and buffers by name.
        replaced: parameters that are no longer the same object.
        switched: parameters whose ``requires_grad`` changed.
    """

    tensors: dict[str, torch.Tensor]
    replaced: list[str]
    switched: list[str]


def observe(function: Callable[[nn.Module], None]) -> Seen:
    # Each rank starts with numbers of its own, so a value tells which rank it comes from.
    model = Probe(dist.get_rank())
    before = dict(model.named_parameters())
    required = {name: parameter.requires_grad for name, parameter in before.items()}
    function(model)
    after = dict(model.named_parameters())
    # The same object, not just an equal one: an optimizer holds the object.
    replaced = [name for name in before if after.get(name) is not before[name]]
    both = [name for name in after if name in required]
    switched = [name for name in both if after[name].requires_grad != required[name]]
    return Seen(model.tensors(), replaced, switched)


def judge(seen: Sequence[Seen]) -> Finding | None:
    own = [Probe(rank).tensors() for rank in range(len(seen))]
    kinds = {name: _kind(name, seen, own) for name in own[0]}
    wrong = [name for name, kind in kinds.items() if kind != "right"]
    if wrong:
        return _wrong_values(kinds, wrong, seen, own)
    mistakes = [
        (
            list(chain.from_iterable(one.replaced for one in seen)),
            "{} is a new object",
            "The values are right, but an optimizer, or DDP, that was given the parameters before "
            "still holds the old ones and would step those: what you broadcast after wrapping is "
            "lost. Can you write into the existing tensor?",
        ),
        (
            list(chain.from_iterable(one.switched for one in seen)),
            "requires_grad of {} has changed",
            "The values are right, but autograd treats the weight differently now: what was "
            "trained must still be trained, and what was frozen must stay frozen. Change only the "
            "values.",
        ),
    ]
    return first_mistake(mistakes)


def _kind(name: str, seen: Sequence[Seen], own: Sequence[dict[str, torch.Tensor]]) -> str:
    """Which rank's values all ranks hold now: ``right`` for rank 0's."""
    held = [one.tensors.get(name) for one in seen]
    for source, of_source in enumerate(own):
        if same_on_all(held, [of_source[name]] * len(held)):
            return "right" if source == 0 else f"rank {source}"
    if same_on_all(held, [tensors[name] for tensors in own]):
        return "own"
    # Averaged in float64 and back: the count of batches is a whole number.
    mean = torch.stack([tensors[name] for tensors in own]).double().mean(0).to(own[0][name].dtype)
    return "mean" if same_on_all(held, [mean] * len(held)) else "other"


def _wrong_values(
    kinds: dict[str, str],
    wrong: Sequence[str],
    seen: Sequence[Seen],
    own: Sequence[dict[str, torch.Tensor]],
) -> Finding:
    parameters = {name for name, _ in Probe(0).named_parameters()}
    # Of all wrong tensors together, because a collective in a loop goes wrong in one way: which
    # tensors have whose values tells more than any one of them.
    found = {kinds[name] for name in wrong}
    mistakes = [
        (
            sorted(kind for kind in found if kind.startswith("rank")),
            "broadcasts from {}, not from rank 0",
            "Which argument names the source?",
        ),
        (
            "mean" in found,
            "averages the ranks' weights",
            "A mean also gives all ranks one model, but not rank 0's, which all of them must "
            "start with.",
        ),
        (
            found == {"own"} and len(wrong) == len(kinds),
            "each rank keeps its own weights",
            "Nothing has been written into the model. Does the call work in place, on its own "
            f"tensors? {WAIT}",
        ),
        # From here on some tensors are right, and the ones that are not show which loop was
        # written: over the state_dict, over parameters only, or over what has a gradient.
        (
            wrong == ["norm.table"],
            "norm.table is not broadcast",
            "A buffer registered with persistent=False is not in state_dict(), but the model "
            "computes with it.",
        ),
        (
            found == {"own"} and not parameters & set(wrong),
            "forgot the buffers",
            "BatchNorm's running mean is not a parameter, but the model uses it to answer. Where "
            "does a module keep such state?",
        ),
        (
            found == {"own"},
            f"only part of the model is broadcast, {names_are_not(wrong)}",
            "Which parameters does your loop visit? A frozen one, or one without gradient, is "
            "part of the model.",
        ),
        (
            True,
            "not all ranks hold rank 0's values",
            "Every rank makes the same calls, in the same order.",
        ),
    ]
    return first_mistake(mistakes, _example(wrong[0], seen, own))


def _example(name: str, seen: Sequence[Seen], own: Sequence[dict[str, torch.Tensor]]) -> str:
    """A tensor on the first rank that does not hold rank 0's original values."""
    tensors = [one.tensors.get(name) for one in seen]
    rank = first_wrong(tensors, [own[0][name]] * len(seen))
    held = tensors[rank]
    now = "is gone" if held is None else f"is {held.flatten().tolist()}"
    return f"{name} was {own[0][name].flatten().tolist()} on rank 0; on rank {rank} it {now}"


EXERCISES = {
    "broadcast_parameters": Exercise("data_parallel", PROMISE, observe, judge),
}
