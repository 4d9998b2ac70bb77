"""The functions of ZeRO-1: called on gradients that differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from learn.checking.finding import WAIT, Exercise, Finding
from learn.checking.probe import explanation, first_wrong, numbers_of, same, same_on_all

SHAPES = ((4, 3), (3,), (2, 3), (2,))  # whole parameters make no equal shares
NUM_WEIGHTS = 23  # 2, 3, 4 and 5 ranks all need padding
LEARNING_RATE = 0.25  # so small that no weight comes near zero, where rounding shows
# Two show what a step leaves behind: an old gradient, or moments that start from zero again.
NUM_STEPS = 2
UNEVEN = (
    "A collective needs shares of one size, but 23 weights cannot be divided evenly. What can you "
    "append to them?"
)
NO_RETURN = "Does every path end in a return?"


def weights() -> torch.Tensor:
    """1 to 23, so that a number tells its place."""
    return torch.arange(1.0, NUM_WEIGHTS + 1)


def gradients(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return numbers_of(rank, torch.Size([NUM_WEIGHTS]), generator)


def mean_of(own: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(own)).mean(0)


def padded(flat: torch.Tensor, num_ranks: int) -> torch.Tensor:
    return F.pad(flat, (0, -len(flat) % num_ranks))


def shares_of(flat: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
    return list(padded(flat, num_ranks).chunk(num_ranks))


def create_parameters() -> list[nn.Parameter]:
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    parts = zip(weights().split(sizes), SHAPES, strict=True)
    return [nn.Parameter(part.view(shape).clone()) for part, shape in parts]


def set_gradients(parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter).clone()


def flatten(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def show(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return "[" + ", ".join(f"{value:.4g}" for value in tensor.flatten().tolist()) + "]"


@dataclass(frozen=True)
class Created:
    """One rank's optimizer: the tensors it steps, and how many bytes of memory they keep alive."""

    type_name: str
    held: list[torch.Tensor] = field(default_factory=list)
    bytes_alive: int = 0
    learning_rate: float = 0.0
    own_settings: list[str] = field(default_factory=list)


def observe_created(
    function: Callable[[Sequence[nn.Parameter], float], torch.optim.Adam],
) -> Created:
    optimizer = function(create_parameters(), LEARNING_RATE)
    if type(optimizer) is not torch.optim.Adam:
        return Created(type(optimizer).__name__)
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    # By the memory behind each tensor: a slice of the flat vector keeps all of the vector.
    storages = [tensor.untyped_storage() for tensor in held]
    alive = {storage.data_ptr(): storage.nbytes() for storage in storages}
    (settings, *_), usual = optimizer.param_groups, torch.optim.Adam([torch.zeros(1)]).defaults
    watched = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
    changed = [name for name in watched if settings[name] != usual[name]]
    copies = [tensor.detach().clone() for tensor in held]
    return Created("Adam", copies, sum(alive.values()), float(settings["lr"]), changed)


def judge_created(seen: Sequence[Created]) -> Finding | None:
    if others := [one.type_name for one in seen if one.type_name != "Adam"]:
        return Finding(f"returns {others[0]}, not a torch.optim.Adam", NO_RETURN)
    return (
        _more_than_a_share(seen)
        or _wrong_share([one.held[0] for one in seen])
        or _wrong_settings(seen)
    )


def _more_than_a_share(seen: Sequence[Created]) -> Finding | None:
    # The result is right in both of these, and stays so in training. What is missed is the point:
    # less memory on each rank.
    if all(sum(tensor.numel() for tensor in one.held) >= NUM_WEIGHTS for one in seen):
        hint = (
            "Adam keeps two moments for whatever it holds. Which weights does this rank have to "
            "step?"
        )
        return Finding("the optimizer of each rank holds all weights", hint)
    if several := [len(one.held) for one in seen if len(one.held) != 1]:
        hint = (
            "Whole parameters make uneven shares. Think of them as one flat vector, and cut that."
        )
        return Finding(f"the optimizer holds {several[0]} tensors, not one share", hint)
    return None


def _wrong_share(held: Sequence[torch.Tensor]) -> Finding | None:
    expected = shares_of(weights(), len(held))
    if same_on_all(held, expected):
        return None
    rank = first_wrong(held, expected)
    shown = f"the share of rank {rank} is {show(expected[rank])}"
    detail = f"{shown}; its optimizer holds {show(held[rank])}"
    return Finding(*_suspect_share(held, expected), detail)


def _suspect_share(
    held: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
) -> tuple[str, str]:
    num_ranks, whole = len(held), weights()
    strided = [padded(whole, num_ranks)[rank::num_ranks] for rank in range(num_ranks)]
    mistakes = [
        (
            [expected[0]] * num_ranks,
            "every rank takes rank 0's share",
            "Which call tells a rank who it is?",
        ),
        (expected[::-1], "the shares are assigned in reverse order", "Rank r owns part r."),
        (
            strided,
            f"takes every {num_ranks}th weight",
            "A share is one piece of the flat vector, without gaps.",
        ),
    ]
    if found := explanation(held, mistakes, None):
        return found
    # One after the other, the shares must be the flat vector and then zeros.
    joined, rest = torch.cat([tensor.flatten() for tensor in held]), NUM_WEIGHTS % num_ranks
    if same(joined, whole) and len({len(tensor) for tensor in held}) > 1:
        return "the shares have different sizes", UNEVEN
    if same(joined, whole[: NUM_WEIGHTS - rest]):
        return f"the last {rest} of {NUM_WEIGHTS} weights are in no share", UNEVEN
    if same(joined, F.pad(whole, (len(joined) - NUM_WEIGHTS, 0))):
        return "pads at the front", "Zeros at the end leave every weight at its place."
    hint = "Print the flat vector, its length, and what you cut from it."
    return "an optimizer does not hold its rank's share", hint


def _wrong_settings(seen: Sequence[Created]) -> Finding | None:
    if wrong := [one.learning_rate for one in seen if one.learning_rate != LEARNING_RATE]:
        problem = f"the learning rate is {wrong[0]:g}, not {LEARNING_RATE:g}"
        return Finding(problem, "It is the second argument.")
    if changed := [name for one in seen for name in one.own_settings]:
        hint = "Plain Adam on one process keeps its defaults."
        return Finding(f"Adam's {changed[0]} is not its default", hint)
    size, alive = seen[0].held[0].nbytes, seen[0].bytes_alive
    if alive > size:
        detail = f"a share has {size} bytes; what the optimizer holds keeps {alive} alive"
        hint = (
            "A slice is a view: as long as it lives, so does the memory of the whole tensor. What "
            "makes it a copy?"
        )
        return Finding("the share is a view of all weights", hint, detail)
    return None


def observe_reduced(
    function: Callable[[Sequence[nn.Parameter]], torch.Tensor],
) -> torch.Tensor | str:
    parameters = create_parameters()
    set_gradients(parameters, gradients(dist.get_rank(), 0))
    result = function(parameters)
    # Copied at once: a collective that the solution did not wait for must not get the time to
    # finish.
    return result.detach().clone() if isinstance(result, torch.Tensor) else type(result).__name__


def judge_reduced(seen: Sequence[torch.Tensor | str]) -> Finding | None:
    if names := [one for one in seen if isinstance(one, str)]:
        return Finding(f"returns {names[0]}, not a tensor", NO_RETURN)
    own = [gradients(rank, 0) for rank in range(len(seen))]
    if same_on_all(seen, shares_of(mean_of(own), len(own))):
        return None
    return Finding(*suspect_gradient(seen, own), _example_of_gradient(seen, own))


def suspect_gradient(
    held: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
) -> tuple[str, str]:
    """The mistake that explains these shares of the gradients, and a hint."""
    num_ranks, total = len(own), torch.stack(list(own)).sum(0)
    mean, sums = shares_of(total / num_ranks, num_ranks), shares_of(total, num_ranks)
    # Each rank's own share of its own gradients, which no other rank has added to.
    local = [shares_of(gradient, num_ranks)[rank] for rank, gradient in enumerate(own)]
    no_sum = f"A share is this rank's, but its gradient comes from the rows of all ranks. {WAIT}"
    whole = "A rank steps only its share. Which part of the vector is that?"
    mistakes = [
        (
            sums,
            "sums the gradients instead of averaging them",
            "Adam hides it, because it divides by the gradient's size; clipping and weight decay "
            "would not. What makes a sum a mean?",
        ),
        (
            [part / num_ranks for part in mean],
            "divides twice",
            "Does each rank divide before the sum, too?",
        ),
        (local, "takes only its own gradients", no_sum),
        (
            [part / num_ranks for part in local],
            "divides, but does not sum over the ranks",
            no_sum,
        ),
        (
            [mean[0]] * num_ranks,
            "every rank takes the gradient of rank 0's share",
            "Which part is this rank's?",
        ),
        (mean[::-1], "takes the gradient of another rank's share", "Rank r owns part r."),
        ([torch.cat(mean)] * num_ranks, "returns the whole gradient", whole),
        ([torch.cat(mean)[:NUM_WEIGHTS]] * num_ranks, "returns the whole gradient", whole),
        ([part[: NUM_WEIGHTS // num_ranks] for part in mean], "the padding is missing", UNEVEN),
        (list((total / num_ranks).chunk(num_ranks)), "the padding is missing", UNEVEN),
    ]
    if found := explanation(held, mistakes, None):
        return found
    if same(held[0], mean[0]):
        hint = f"Each rank needs its own part of the mean. {WAIT}"
        return "only rank 0 has the right gradient", hint
    if held[0].shape != mean[0].shape:
        return "the gradient has the wrong shape", "It is as long as the share, and flat."
    hint = f"Print the flat vector before and after the call. {WAIT}"
    return "the gradient is not the mean over the ranks", hint


def _example_of_gradient(held: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> str:
    """The first element of the share, on the first rank that has it wrong."""
    mean = shares_of(mean_of(own), len(own))
    rank = first_wrong(held, mean)
    first = rank * len(mean[0])
    terms = " + ".join(f"{gradient[first]:g}" for gradient in own)
    begins = f"({terms}) / {len(own)} = {mean[rank][0]:.4g}"
    has = f"has {len(mean[rank])} elements; it is {show(held[rank])}"
    return f"rank {rank}'s share begins with {begins} and {has}"


@dataclass(frozen=True)
class Stepped:
    """What one rank's optimizer was given, and the weights after each step.

    Args:
        num_calls: of ``optimizer.step()``, in each step.
        used: the share's gradient at each of them.
        weights: of the whole model, flat, after each step.
        num_moments: elements of Adam's first moments at the end.
    """

    num_calls: list[int]
    used: list[torch.Tensor | None]
    weights: list[torch.Tensor]
    num_moments: int


def observe_stepped(
    function: Callable[[Sequence[nn.Parameter], torch.optim.Adam], None],
) -> Stepped:
    rank, parameters = dist.get_rank(), create_parameters()
    share = nn.Parameter(shares_of(weights(), dist.get_world_size())[rank].clone())
    optimizer = torch.optim.Adam([share], lr=LEARNING_RATE)
    used: list[torch.Tensor | None] = []

    # Noted when the optimizer steps: afterwards a solution may have freed the gradient.
    def note(*_: object) -> None:
        used.append(None if share.grad is None else share.grad.clone())

    optimizer.register_step_pre_hook(note)
    num_calls, after = [], []
    for step in range(NUM_STEPS):
        set_gradients(parameters, gradients(rank, step))
        before = len(used)
        function(list(parameters), optimizer)
        num_calls.append(len(used) - before)
        after.append(flatten(parameters))
    states = optimizer.state.values()
    num_moments = sum(state["exp_avg"].numel() for state in states if "exp_avg" in state)
    return Stepped(num_calls, used, after, num_moments)


def judge_stepped(seen: Sequence[Stepped]) -> Finding | None:
    own = [[gradients(rank, step) for rank in range(len(seen))] for step in range(NUM_STEPS)]
    means = [mean_of(of_step) for of_step in own]
    # In the order of a step: was it stepped, with a gradient, with the right one, and is the
    # result where the next forward pass reads it? What comes first explains what comes later.
    if finding := _not_stepped(seen) or _wrong_gradient(seen, own, means):
        return finding
    size = len(shares_of(weights(), len(seen))[0])
    if too_many := [one.num_moments for one in seen if one.num_moments > size]:
        hint = (
            "Something added more than the share to the optimizer: the memory that ZeRO-1 saves "
            "is gone."
        )
        problem = f"the optimizer keeps moments of {too_many[0]} weights, not of {size}"
        return Finding(problem, hint)
    return _wrong_weights(seen, means)


def _not_stepped(seen: Sequence[Stepped]) -> Finding | None:
    if wrong := [calls for one in seen for calls in one.num_calls if calls != 1]:
        hint = (
            "Plain Adam steps once, with the share's gradient in share.grad: optimizer.step() "
            "does it."
        )
        return Finding(f"the given optimizer stepped {wrong[0]} times, not once", hint)
    if any(gradient is None for one in seen for gradient in one.used):
        hint = "optimizer.step() skips a tensor whose .grad is None."
        return Finding("the share has no gradient", hint)
    return None


def _wrong_gradient(
    seen: Sequence[Stepped],
    own: Sequence[Sequence[torch.Tensor]],
    means: Sequence[torch.Tensor],
) -> Finding | None:
    for step in range(NUM_STEPS):
        held = [one.used[step] for one in seen]
        if same_on_all(held, shares_of(means[step], len(seen))):
            continue
        # As after reduce-scatter into .grad with +=, and no zero_grad in between.
        so_far = shares_of(torch.stack(means[: step + 1]).sum(0), len(seen))
        if step > 0 and same_on_all(held, so_far):
            hint = (
                "The share's .grad still holds the last step's gradient. Do you set it, or add to "
                "it?"
            )
            return Finding("adds the new gradient to the old one", hint)
        problem, hint = suspect_gradient(held, own[step])
        example = _example_of_gradient(held, own[step])
        return Finding(f"the share's gradient is wrong: {problem}", hint, example)
    return None


def _wrong_weights(seen: Sequence[Stepped], means: Sequence[torch.Tensor]) -> Finding | None:
    # The truth: plain Adam on one process, with the mean gradient of all ranks.
    trained = nn.Parameter(weights())
    plain, adam = [weights()], torch.optim.Adam([trained], lr=LEARNING_RATE)
    for mean in means:
        trained.grad = mean
        adam.step()
        plain.append(trained.detach().clone())
    for step in range(1, NUM_STEPS + 1):
        held, right = [one.weights[step - 1] for one in seen], [plain[step]] * len(seen)
        if not same_on_all(held, right):
            rank = first_wrong(held, right)
            close = torch.isclose(held[rank], plain[step], rtol=1e-4)
            at = (~close).nonzero()[0].item()
            was = f"weight {at} of {NUM_WEIGHTS} was {plain[step - 1][at]:.4g}"
            found = f"rank {rank} has {held[rank][at]:.4g}"
            value = f"{plain[step][at]:.4g} with plain Adam"
            detail = f"after step {step}, {was} and is {value}; {found}"
            return Finding(*_suspect_weights(seen, held, plain), detail)
    return None


def _suspect_weights(
    seen: Sequence[Stepped],
    held: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
) -> tuple[str, str]:
    num_ranks, (old, new, *_) = len(seen), plain
    news, olds = shares_of(new, num_ranks), shares_of(old, num_ranks)
    ranks = range(num_ranks)

    # What rank r has if it puts these shares together, without the padding.
    def joined(shares: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(shares))[:NUM_WEIGHTS]

    # Of rank r, only its own share is new.
    own_only = [joined([*olds[:rank], news[rank], *olds[rank + 1 :]]) for rank in ranks]
    if same_on_all([one.weights[1] for one in seen], [new] * num_ranks):
        hint = "Do you collect the shares before or after the optimizer's step?"
        return "the weights are one step behind", hint
    mistakes = [
        (
            [old] * num_ranks,
            "the parameters keep their old weights",
            "The share is a copy. The model computes with its parameters: how do the new values "
            f"get into them? {WAIT}",
        ),
        (
            own_only,
            "each rank has new weights for its own share only",
            f"How do the other ranks' weights get here? {WAIT}",
        ),
        (
            [joined([news[rank]] * num_ranks) for rank in ranks],
            "each rank writes its own share everywhere",
            "Which rank's result belongs to which part?",
        ),
        (
            [joined(news[::-1])] * num_ranks,
            "the shares are put together in reverse order",
            "Part r comes from rank r.",
        ),
    ]
    if found := explanation(held, mistakes, None):
        return found
    if same(held[0], new):
        hint = f"Every rank computes the next gradients with them. {WAIT}"
        return "only rank 0 has the new weights", hint
    if all(torch.allclose(one.sort().values, new.sort().values, rtol=1e-4) for one in held):
        hint = "Flatten and unflatten in the same order of parameters."
        return "the new weights are in the wrong places", hint
    hint = f"Print the flat vector that you collect, and its length. {WAIT}"
    return "the weights are not those of plain Adam", hint


EXERCISES = {
    "create_sharded_adam": Exercise(
        "zero1",
        "each rank's Adam keeps the moments of its own share only",
        observe_created,
        judge_created,
    ),
    "reduce_scatter_gradients": Exercise(
        "zero1",
        "each rank has the mean gradient of its own share",
        observe_reduced,
        judge_reduced,
    ),
    "zero1_step": Exercise(
        "zero1",
        "every rank has the weights of plain Adam",
        observe_stepped,
        judge_stepped,
    ),
}
