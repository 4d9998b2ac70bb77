"""The functions of tensor parallelism: called forward and backward on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from learn.checking.finding import WAIT, Exercise, Finding
from learn.checking.probe import ByRank, explanation, first_wrong, numbers_of, same, same_on_all

ROWS, OUT_FEATURES = 5, 4
SHAPE = torch.Size([2, 3])
GRAPH = (
    "autograd found no path from the result back to x: was x detached, or written to under "
    "torch.no_grad()?"
)


@dataclass(frozen=True)
class Passed:
    """One rank's result of f or g, x's gradient, and what was overwritten."""

    type_name: str
    result: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    wrote: list[str] = field(default_factory=list)


def value_of(rank: int) -> torch.Tensor:
    return numbers_of(rank, SHAPE, torch.Generator().manual_seed(rank))


def gradient_of(rank: int) -> torch.Tensor:
    return numbers_of(rank, SHAPE, torch.Generator().manual_seed(50 + rank))


def observe_passed(function: Callable[[torch.Tensor], torch.Tensor], *, summed: bool) -> Passed:
    # As in a model: what is the same on every rank there is the same here, too. That is x for f,
    # and the arriving gradient for g, since all ranks compute the same loss from the sum.
    rank = dist.get_rank()
    x, arriving = value_of(rank if summed else 0), gradient_of(0 if summed else rank)
    leaf, given = x.clone().requires_grad_(), arriving.clone()
    y = function(leaf)
    if not isinstance(y, torch.Tensor):
        return Passed(type(y).__name__)
    # Copied at once: a collective that the solution did not wait for must not get the time to
    # finish.
    result = y.detach().clone()
    if y.requires_grad and y.shape == given.shape:
        y.backward(given)
    gradient = None if leaf.grad is None else leaf.grad.clone()
    pairs = {"x": (leaf.detach(), x), "the arriving gradient": (given, arriving)}
    wrote = [name for name, (now, before) in pairs.items() if not same(now, before)]
    return Passed("Tensor", result, gradient, wrote)


def judge_copied(seen: Sequence[Passed]) -> Finding | None:
    num_ranks, x = len(seen), value_of(0)
    own = [gradient_of(rank) for rank in range(num_ranks)]
    if finding := _wrong_type(seen):
        return finding
    results = [one.result for one in seen]
    if not same_on_all(results, [x] * num_ranks):
        detail = _example("the result", results, [x] * num_ranks)
        if same_on_all(results, [num_ranks * x] * num_ranks):
            hint = (
                "All ranks have the same x already. In which direction do they have different "
                "things?"
            )
            return Finding("sums x in the forward pass", hint, detail)
        hint = "In the forward pass, f changes nothing and sends nothing."
        return Finding("the result is not x", hint, detail)
    total = torch.stack(own).sum(0)
    held, right = [one.gradient for one in seen], [total] * num_ranks
    if same_on_all(held, right):
        return _overwritten(seen)
    mistakes = [
        (
            own,
            "the backward pass does not sum over the ranks",
            f"Which ranks' parts does x feed into? {WAIT}",
        ),
        ([total / num_ranks] * num_ranks, "averages the gradients", _PARTS),
        (
            [num_ranks * total] * num_ranks,
            "sums the gradients twice",
            "How often is the collective called?",
        ),
        (
            [own[0]] * num_ranks,
            "every rank has rank 0's gradient",
            "A broadcast throws away what the others found.",
        ),
    ]
    return _explained(held, right, mistakes, own)


def judge_summed(seen: Sequence[Passed]) -> Finding | None:
    num_ranks, arriving = len(seen), gradient_of(0)
    own = [value_of(rank) for rank in range(num_ranks)]
    if finding := _wrong_type(seen):
        return finding
    total, held = torch.stack(own).sum(0), [one.result for one in seen]
    if not same_on_all(held, [total] * num_ranks):
        problem, hint = _suspect_sum(held, own, total)
        return Finding(problem, hint, _example("the sum", held, [total] * num_ranks, own))
    gradients, right = [one.gradient for one in seen], [arriving] * num_ranks
    if same_on_all(gradients, right):
        return _overwritten(seen)
    mistakes = [
        (
            [num_ranks * arriving] * num_ranks,
            "the backward pass sums over the ranks too",
            f"The same gradient arrives on each of the {num_ranks} ranks. If x on one rank grows "
            "by 1, by how much does the sum grow?",
        ),
        (
            [arriving / num_ranks] * num_ranks,
            "the backward pass divides by the number of ranks",
            _PARTS,
        ),
    ]
    return _explained(gradients, right, mistakes)


def _suspect_sum(
    held: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    total: torch.Tensor,
) -> tuple[str, str]:
    num_ranks = len(own)
    if held[0].shape != SHAPE:
        hint = "Every rank holds a summand of the full size, not a piece of the result."
        return f"the result has the shape {tuple(held[0].shape)}, not that of x", hint
    mistakes = [
        (
            own,
            "the result is this rank's x, not the sum",
            f"Does the call work in place, or return what you have to keep? {WAIT}",
        ),
        ([total / num_ranks] * num_ranks, "averages instead of summing", _PARTS),
    ]
    if found := explanation(held, mistakes, None):
        return found
    if same(held[0], total):
        hint = f"Some collectives give their result to one rank, others to all. {WAIT}"
        return "only rank 0 has the sum", hint
    return "the result is not the sum over the ranks", f"Print x and the result. {WAIT}"


_PARTS = (
    "The parts of a model that is cut are summands: nothing was computed N times, so nothing is "
    "averaged."
)


def _wrong_type(seen: Sequence[Passed]) -> Finding | None:
    others = [one.type_name for one in seen if one.result is None]
    hint = "Does every path end in a return? Is it .apply(x) that you return?"
    return Finding(f"returns {others[0]}, not a tensor", hint) if others else None


def _explained(
    held: ByRank,
    right: ByRank,
    mistakes: Sequence[tuple[ByRank, str, str]],
    terms: Sequence[torch.Tensor] = (),
) -> Finding:
    detail = _example("the gradient of x", held, right, terms)
    if any(gradient is None for gradient in held):
        return Finding("x gets no gradient", GRAPH, detail)
    hint = f"Print what arrives in backward and what you return. {WAIT}"
    otherwise = "the gradient of x is wrong", hint
    if same(held[0], right[0]):
        hint = f"Which ranks continue with the backward pass? {WAIT}"
        otherwise = "only rank 0 has the right gradient", hint
    return Finding(*explanation(held, mistakes, otherwise), detail)


def _overwritten(seen: Sequence[Passed]) -> Finding | None:
    wrote = [name for one in seen for name in one.wrote]
    hint = (
        "A collective works in place, but others may still need that tensor: autograd keeps it. "
        "What makes a copy?"
    )
    return Finding(f"overwrites {wrote[0]}", hint) if wrote else None


def _example(
    what: str,
    held: ByRank,
    right: ByRank,
    terms: Sequence[torch.Tensor] = (),
) -> str:
    """The first element that is wrong, on the first rank that has it wrong."""
    rank = first_wrong(held, right)
    tensor, expected = held[rank], right[rank]
    if tensor is None or tensor.shape != expected.shape:
        now = "None" if tensor is None else f"of shape {tuple(tensor.shape)}"
        return f"{what} must be of shape {tuple(expected.shape)}; on rank {rank} it is {now}"
    at = (~torch.isclose(tensor, expected, rtol=1e-4, atol=0)).flatten().nonzero()[0].item()
    sum_of = " + ".join(f"{term.flatten()[at]:g}" for term in terms)
    value = f"{sum_of} = {expected.flatten()[at]:.4g}" if terms else f"{expected.flatten()[at]:.4g}"
    return f"{what}, element {at}, must be {value}; on rank {rank} it is {tensor.flatten()[at]:.4g}"


@dataclass(frozen=True)
class Fed:
    """One rank's output, and the gradients by name: ``x``'s and the layers'; None if missing."""

    type_name: str
    output: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)


def create_layers(num_ranks: int) -> tuple[torch.Tensor, nn.Linear, nn.Linear, torch.Tensor]:
    """x, the two layers, and the gradient of the output, the same on every rank, in fp64."""
    # The ranks divide the hidden features, two for each. As many inputs as hidden features, so that
    # a first weight that is cut along the wrong dimension has the right shape, too.
    hidden, generator = 2 * num_ranks, torch.Generator().manual_seed(0)
    first, second = nn.Linear(hidden, hidden).double(), nn.Linear(hidden, OUT_FEATURES).double()
    x, arriving = torch.empty(ROWS, hidden).double(), torch.empty(ROWS, OUT_FEATURES).double()
    for tensor in (x, arriving, *first.parameters(), *second.parameters()):
        tensor.detach().normal_(generator=generator)
    return x.requires_grad_(), first, second, arriving


def observe_fed(function: Callable[[torch.Tensor, nn.Linear, nn.Linear], torch.Tensor]) -> Fed:
    x, first, second, arriving = create_layers(dist.get_world_size())
    output = function(x, first, second)
    if not isinstance(output, torch.Tensor):
        return Fed(type(output).__name__)
    result = output.detach().clone()
    if output.requires_grad and output.shape == arriving.shape:
        output.backward(arriving)
    return Fed("Tensor", result, _gradients(x, first, second))


def judge_fed(seen: Sequence[Fed]) -> Finding | None:
    if others := [one.type_name for one in seen if one.output is None]:
        return Finding(f"returns {others[0]}, not a tensor", "Does every path end in a return?")
    x, first, second, arriving = create_layers(len(seen))
    output = second(torch.relu(first(x)))
    output.backward(arriving)
    held, right = [one.output for one in seen], [output.detach()] * len(seen)
    if not same_on_all(held, right):
        with torch.no_grad():
            problem, hint = _suspect_output(held, x, first, second)
        return Finding(problem, hint, _example("the output", held, right))
    return _wrong_gradients(seen, _gradients(x, first, second))


def _gradients(
    x: torch.Tensor,
    first: nn.Linear,
    second: nn.Linear,
) -> dict[str, torch.Tensor | None]:
    found = {"x": x.grad}
    for layer, module in (("first", first), ("second", second)):
        found |= {f"{layer}.{name}": one.grad for name, one in module.named_parameters()}
    return found


def _suspect_output(
    held: Sequence[torch.Tensor],
    x: torch.Tensor,
    first: nn.Linear,
    second: nn.Linear,
) -> tuple[str, str]:
    """The mistake that explains these outputs, and a hint."""
    num_ranks, bias = len(held), second.bias
    parts = [features @ columns.T for features, columns in _pieces(x, first, second, num_ranks)]
    total = torch.stack(parts).sum(0)
    mistakes = []
    for outputs, problem, hint in _on_every_rank(x, first, second, num_ranks):
        mistakes += [([output] * num_ranks, problem, hint) for output in outputs]
    problem = "each rank returns only its own part"
    hint = f"The output is the sum of all ranks' parts. {WAIT}"
    for by_rank in ([part + bias for part in parts], parts):
        mistakes += [(by_rank, problem, hint)]
    if found := explanation(held, mistakes, None):
        return found
    if held[0].shape != total.shape:
        hint = f"It must be {tuple(total.shape)}, on every rank."
        return f"the output has the shape {tuple(held[0].shape)}", hint
    if same(held[0], total + bias):
        hint = f"Every rank continues with the whole output. {WAIT}"
        return "only rank 0 has the right output", hint
    hint = f"Try it without biases, or without the activation, first. {WAIT}"
    return "the output is not that of one process", hint


def _pieces(
    x: torch.Tensor, first: nn.Linear, second: nn.Linear, num_ranks: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By rank: its hidden features, (rows, hidden / ranks), and the columns that read them."""
    hidden = torch.relu(first(x))
    columns = second.weight.chunk(num_ranks, 1)
    return list(zip(hidden.chunk(num_ranks, 1), columns, strict=True))


def _on_every_rank(
    x: torch.Tensor, first: nn.Linear, second: nn.Linear, num_ranks: int
) -> list[tuple[list[torch.Tensor], str, str]]:
    """Mistakes that leave the same wrong output on every rank: their outputs, problem and hint."""
    bias, pieces = second.bias, _pieces(x, first, second, num_ranks)
    parts = [features @ columns.T for features, columns in pieces]
    total = torch.stack(parts).sum(0)
    # Each rank's features with another rank's columns.
    pairs = zip(pieces, pieces[::-1], strict=True)
    crossed = sum(features @ columns.T for (features, _), (_, columns) in pairs)
    unbiased = torch.relu(x @ first.weight.T) @ second.weight.T
    # The first weight cut along its inputs: each rank has a summand of every hidden feature, and
    # relu of a summand is not a summand of relu.
    halves = zip(x.chunk(num_ranks, 1), first.weight.chunk(num_ranks, 1), strict=True)
    sums = [part @ weight.T for part, weight in halves]
    early = sum(torch.relu(part + first.bias) @ second.weight.T for part in sums)
    early_bias_later = sum(torch.relu(part) @ second.weight.T for part in sums)
    # Of some mistakes there are several forms, for example with and without the bias.
    return [
        (
            [total + num_ranks * bias],
            "adds the second bias on every rank",
            "What is in the sum is added once per rank. Where must the bias be added?",
        ),
        (
            [total],
            "forgets the second bias",
            "Every rank has the whole bias of the second layer. Where in the sum does it belong?",
        ),
        ([total / num_ranks + bias, total / num_ranks], "averages the parts", _PARTS),
        (
            [second(first(x))],
            "forgets the activation",
            "What comes between the two layers?",
        ),
        (
            [torch.relu(total + bias), torch.relu(second(first(x)))],
            "applies the activation to the output",
            "relu belongs between the layers, to the hidden features.",
        ),
        (
            [unbiased + bias],
            "forgets the first bias",
            "Each hidden feature has a bias of its own; which of them are this rank's?",
        ),
        (
            [num_ranks * parts[0] + bias],
            "every rank computes rank 0's part",
            "Which call tells a rank who it is?",
        ),
        (
            [crossed + bias],
            "the parts of the two layers do not fit together",
            "Which columns of the second weight read the hidden features that this rank computed?",
        ),
        (
            [num_ranks * (total + bias), num_ranks * total + bias],
            "sums whole outputs",
            "Each rank must compute with its own part of both weights, and only then sum.",
        ),
        (
            [early + bias, early + num_ranks * bias, early_bias_later + bias],
            "applies the activation to parts of a sum",
            "relu(a) + relu(b) is not relu(a + b). Along which dimension must the first weight be "
            "cut, so that a rank has whole hidden features?",
        ),
    ]


# The dimension along which each tensor is cut; x and the second bias are whole on every rank.
_CUT_ALONG = {"first.weight": 0, "first.bias": 0, "second.weight": 1}


def _wrong_gradients(seen: Sequence[Fed], whole: dict[str, torch.Tensor]) -> Finding | None:
    num_ranks = len(seen)
    held = {name: [one.gradients.get(name) for one in seen] for name in whole}
    right = {name: _own_parts(name, tensor, num_ranks) for name, tensor in whole.items()}
    wrong = [name for name in whole if not _all_close(held[name], right[name])]
    if not wrong:
        return None
    all_of_it = {name: [tensor] * num_ranks for name, tensor in whole.items()}
    problem, hint = _suspect_gradients(wrong, held, right, all_of_it)
    detail = _example(f"the gradient of {wrong[0]}", held[wrong[0]], right[wrong[0]])
    return Finding(problem, hint, detail)


def _suspect_gradients(
    wrong: Sequence[str],
    held: dict[str, ByRank],
    right: dict[str, ByRank],
    all_of_it: dict[str, ByRank],
) -> tuple[str, str]:
    """The mistake that explains the ``wrong`` ones of these gradients, and a hint."""
    num_ranks = len(held["x"])
    if missing := [name for name in wrong if None in held[name]]:
        hint = (
            "The output is right, but autograd found no path back to it. Was it detached, or "
            "copied by hand?"
        )
        return f"{missing[0]} gets no gradient", hint
    # The gradient is that of the whole tensor, where a rank may use only its part of it.
    if uncut := [
        name for name in _CUT_ALONG if name in wrong and _all_close(held[name], all_of_it[name])
    ]:
        hint = (
            "The output is right, but each rank must use only its 1/N of this tensor, or it saves "
            "no memory."
        )
        name = "both layers" if {"first.weight", "second.weight"} <= set(uncut) else uncut[0]
        return f"every rank computes with all of {name}", hint
    # As without f: the parameters' gradients are right, and x has only this rank's contribution.
    if wrong == ["x"]:
        hint = "Each rank finds only what its own hidden features contribute. Who adds that up?"
        return "the gradient of x is incomplete", hint
    sums = "Which collectives run in the backward pass, and is what they sum the same on all ranks?"
    # All wrong ones by one factor: a collective too many or too few in f or g reaches them all.
    large, small = (_scaled(right, wrong, factor) for factor in (num_ranks, 1 / num_ranks))
    mistakes = [
        (large, f"the gradient of {wrong[0]} is {num_ranks} times too large", sums),
        (small, f"the gradient of {wrong[0]} is 1/{num_ranks} of what it must be", sums),
    ]
    hint = (
        "The output is right, and the backward pass is not: what must f and g do there, and where "
        "do they belong?"
    )
    otherwise = f"the gradient of {' and '.join(wrong[:2])} is wrong", hint
    return explanation(held, mistakes, otherwise, _all_close_by_name)


def _scaled(gradients: dict[str, ByRank], names: Sequence[str], factor: float) -> dict[str, ByRank]:
    return {name: [factor * one for one in gradients[name]] for name in names}


def _all_close_by_name(held: dict[str, ByRank], expected: dict[str, ByRank]) -> bool:
    return all(_all_close(held[name], tensors) for name, tensors in expected.items())


def _own_parts(name: str, whole: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
    """The gradients that the ranks may have: zero outside of its part of a tensor that is cut."""
    if name not in _CUT_ALONG:
        return [whole] * num_ranks
    parts = whole.chunk(num_ranks, _CUT_ALONG[name])
    return [
        torch.cat(
            [part if owner == rank else 0 * part for owner, part in enumerate(parts)],
            _CUT_ALONG[name],
        )
        for rank in range(num_ranks)
    ]


def _all_close(held: ByRank, expected: Sequence[torch.Tensor]) -> bool:
    """As ``same_on_all``, but for sums of fp64 that may cancel each other."""
    return all(
        one is not None and one.shape == other.shape and torch.allclose(one, other)
        for one, other in zip(held, expected, strict=True)
    )


EXERCISES = {
    "copy_to_ranks": Exercise(
        "tensor_parallel",
        "x forward, the sum of the ranks' gradients backward",
        partial(observe_passed, summed=False),
        judge_copied,
    ),
    "sum_over_ranks": Exercise(
        "tensor_parallel",
        "the sum forward, the gradient as it is backward",
        partial(observe_passed, summed=True),
        judge_summed,
    ),
    "parallel_feed_forward": Exercise(
        "tensor_parallel",
        "output and gradients of one process, with 1/N of the weights",
        observe_fed,
        judge_fed,
    ),
}
