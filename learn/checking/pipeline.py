"""The pipeline's functions: orders are played through, and stages run on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from learn.by_hand.pipeline import one_forward_one_backward
from learn.checking.finding import Exercise, Finding
from learn.checking.probe import explanation

Order = list[tuple[str, int]]
BACKWARD_TIME = 2  # of a forward pass; the bubble is the same for any ratio
ROWS, WIDTH = 3, 4


def numbers_of_micro_batches(num_stages: int) -> tuple[int, ...]:
    return 4, 1, 2 * num_stages + 2  # the shortest order that shows all phases comes first


# A pipeline longer than the number of ranks, with fewer micro-batches than it has stages: an order
# needs no communication, so any rank can be asked for all of it.
LONG_PIPELINE = [(5, 2), (5, 3)]


def words(order: Sequence[tuple[str, int]]) -> str:
    return " ".join(f"{kind}{index}" for kind, index in order)


def observe_order(function: Callable[[int, int, int], Order]) -> list[list[Any] | str]:
    """The order for each number of micro-batches, then those of the long pipelines' stages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    orders = [function(rank, size, number) for number in numbers_of_micro_batches(size)]
    for num_stages, number in LONG_PIPELINE:
        orders += [function(stage, num_stages, number) for stage in range(num_stages)]
    # The name of the type in place of an order that is no list.
    return [_plain_order(order) for order in orders]


def _plain_order(order: Any) -> list[Any] | str:
    return list(map(_plain, order)) if isinstance(order, list) else type(order).__name__


def _plain(action: Any) -> tuple[Any, ...] | str:
    """What can be sent to another process: a tuple, or anything else in words."""
    return tuple(action) if isinstance(action, tuple) else repr(action)


def judge_order(seen: Sequence[Sequence[list[Any] | str]]) -> Finding | None:
    numbers = numbers_of_micro_batches(len(seen))
    cases = [(number, [orders[place] for orders in seen]) for place, number in enumerate(numbers)]
    # The long pipelines: all of their orders are rank 0's answers, one after the other.
    rest = iter(seen[0][len(numbers) :])
    for num_stages, number in LONG_PIPELINE:
        cases.append((number, [next(rest) for _ in range(num_stages)]))
    for number, orders in cases:
        if finding := _malformed(orders, number) or _wrong_order(orders, number):
            return finding
    return None


def _malformed(orders: Sequence[Any], number: int) -> Finding | None:
    """What keeps the orders of all stages from being played through."""
    if others := [order for order in orders if isinstance(order, str)]:
        return Finding(f"returns {others[0]}, not a list", "Does every path end in a return?")
    actions = [(kind, index) for kind in "FB" for index in range(number)]
    micro_batches = f"{number} micro-batch{'es' * (number > 1)}"
    found = (
        _wrong_actions(
            order, actions, stage, f"stage {stage} of {len(orders)} with {micro_batches}"
        )
        for stage, order in enumerate(orders)
    )
    return next(filter(None, found), None)


def _wrong_actions(order: Sequence[Any], actions: Order, stage: int, where: str) -> Finding | None:
    """Each action must be in the order of this stage, once, and nothing else."""
    if strange := [action for action in order if action not in actions]:
        hint = f'("F", i) and ("B", i) are the actions, with i from 0 to {len(actions) // 2 - 1}.'
        return Finding(f"{strange[0]} is not an action of {where}", hint)
    detail = f"stage {stage}: {words(order)}"
    if missing := [action for action in actions if action not in order]:
        hint = (
            "Every micro-batch passes each stage forward and backward. Which of its phases ends "
            "too early?"
        )
        return Finding(f"{words(missing[:1])} is missing on {where}", hint, detail)
    if twice := [action for action in actions if order.count(action) > 1]:
        hint = "How many forward passes are left when forward and backward begin to alternate?"
        return Finding(f"{words(twice[:1])} comes twice on {where}", hint, detail)
    return None


def _wrong_order(orders: Sequence[Order], number: int) -> Finding | None:
    detail = "\n".join(f"stage {stage}: {words(order)}" for stage, order in enumerate(orders))
    if finding := _backward_first(orders, number, detail):
        return finding
    if any(_of_kind(order, kind) != _of_kind(orders[0], kind) for order in orders for kind in "FB"):
        hint = (
            "Messages arrive in the order in which they were sent: two neighbours must agree on it."
        )
        return Finding("the stages take the micro-batches in different orders", hint, detail)
    # By here each stage's order is possible on its own. Together they can still wait in a circle.
    ends, waits = play(orders)
    if waits:
        hint = (
            "Follow the first actions of each stage on paper: who can begin, and what does "
            "it need from its neighbours?"
        )
        return Finding("the stages wait for each other forever", hint, "\n".join([detail, *waits]))
    return _keeps_too_much(orders, number, detail) or _waits_too_long(ends, number, detail)


def _backward_first(orders: Sequence[Order], number: int, detail: str) -> Finding | None:
    for stage, order in enumerate(orders):
        places = {action: place for place, action in enumerate(order)}
        early = [index for index in range(number) if places["B", index] < places["F", index]]
        if early:
            hint = "A backward pass needs the activations of its own forward pass."
            return Finding(f"B{early[0]} comes before F{early[0]} on stage {stage}", hint, detail)
    return None


def _keeps_too_much(orders: Sequence[Order], number: int, detail: str) -> Finding | None:
    for stage, order in enumerate(orders):
        # Until the first gradient has come back from the last stage, this one can do N - stage
        # forward passes; to start any more buys no time and costs the memory of their activations.
        most, limit = most_kept(order), min(len(orders) - stage, number)
        if most <= limit:
            continue
        micro_batches = f"{most} micro-batches, not of at most {limit}"
        problem = f"stage {stage} keeps the activations of {micro_batches}"
        if all(other[:number] == _of_kind(other, "F") for other in orders):
            hint = (
                "This is the order of GPipe. When does the first gradient arrive that a stage "
                "could work on?"
            )
            return Finding(f"all forward passes come first: {problem}", hint, detail)
        hint = (
            "How many forward passes does a stage make before its first backward pass? Later "
            "stages need fewer."
        )
        return Finding(problem, hint, detail)
    return None


def _waits_too_long(ends: Sequence[float], number: int, detail: str) -> Finding | None:
    # A stage works for M forwards and backwards, and waits while the pipeline fills and drains: the
    # time of N - 1 more of both. What is beyond that comes from a stage that keeps too little.
    least = (len(ends) - 1) / (number + len(ends) - 1)
    bubble = 1 - number * (1 + BACKWARD_TIME) / max(ends)
    if bubble <= least + 1e-9:
        return None
    problem = f"the stages wait {bubble:.1%} of the time, not {least:.1%}"
    hint = (
        "A stage that waits could start another forward pass. How many may it have under way at "
        "once?"
    )
    return Finding(problem, hint, detail)


def _of_kind(order: Sequence[tuple[str, int]], kind: str) -> Order:
    return [action for action in order if action[0] == kind]


def most_kept(order: Sequence[tuple[str, int]]) -> int:
    kept = most = 0
    for kind, _ in order:
        kept += 1 if kind == "F" else -1
        most = max(most, kept)
    return most


def play(orders: Sequence[Order]) -> tuple[list[float], list[str]]:
    """When each stage has finished; and, if that never happens, what each stage waits for."""
    # When each stage's action was done; None stands for what needs nothing from a neighbour.
    done: dict[tuple[int, str, int] | None, float] = {None: 0.0}
    # By stage: the actions that are left, and the time at which it has ended its last one.
    rest, free = [list(order) for order in orders], [0.0] * len(orders)

    # What a stage's next action takes from a neighbour: activations from the stage before it, or a
    # gradient from the one after it. None at the two ends of the pipeline.
    def need(stage: int) -> tuple[int, str, int] | None:
        kind, index = rest[stage][0]
        neighbour = stage - 1 if kind == "F" else stage + 1
        return (neighbour, kind, index) if 0 <= neighbour < len(orders) else None

    while able := [stage for stage, left in enumerate(rest) if left and need(stage) in done]:
        for stage in able:
            # It begins when the stage is free and what it needs is there.
            begins = max(free[stage], done[need(stage)])
            kind, index = rest[stage].pop(0)
            free[stage] = begins + (1 if kind == "F" else BACKWARD_TIME)
            done[stage, kind, index] = free[stage]
    # No rank can continue: all have finished, or those that have not wait for each other.
    waits = [
        f"stage {stage} cannot begin {words(left[:1])}: stage {need(stage)[0]} has not done it"
        for stage, left in enumerate(rest)
        if left
    ]
    return free, waits


@dataclass(frozen=True)
class Ran:
    """One rank's stage after the call.

    Args:
        gradients: of its parameters; None if there is none.
        actions: in the order in which autograd saw them.
        outputs_alive: outputs of its module that are still in memory at the last forward pass.
    """

    gradients: list[torch.Tensor | None]
    actions: Order = field(default_factory=list)
    outputs_alive: int = 0


def create_stages(num_stages: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]
    model = nn.Sequential(*stages).double()
    for parameter in model.parameters():
        parameter.detach().normal_(generator=generator)
    return model


def create_batch(num_stages: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The micro-batches, and their targets."""
    number = numbers_of_micro_batches(num_stages)[-1]
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(2, number, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    inputs, targets = both.unbind(0)
    return list(inputs.unbind(0)), list(targets.unbind(0))


def observe_run(
    function: Callable[[nn.Module, list[torch.Tensor], list[torch.Tensor], Order], None],
) -> Ran:
    rank, size = dist.get_rank(), dist.get_world_size()
    module, (inputs, targets) = create_stages(size)[rank], create_batch(size)
    actions, alive, outputs = [], [], []

    # Nothing of the solution is wrapped: the module reports its forward passes, and its outputs
    # report when a gradient reaches them.
    def record(_: nn.Module, __: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        index = len(outputs)
        # Weak, so that the checker itself keeps nothing alive. By storage and not by tensor,
        # because y.detach() is another tensor of the same memory.
        outputs.append(StorageWeakRef(output.untyped_storage()))
        actions.append(("F", index))
        alive.append(sum(not one.expired() for one in outputs))
        if output.requires_grad:
            output.register_hook(lambda _: actions.append(("B", index)))

    module.register_forward_hook(record)
    function(module, inputs, targets, one_forward_one_backward(rank, size, len(inputs)))
    return Ran(_gradients_of(module), actions, alive[-1] if alive else 0)


def judge_run(seen: Sequence[Ran]) -> Finding | None:
    for stage, one in enumerate(seen):
        if None in one.gradients:
            hint = (
                "A backward pass leaves its gradients in the parameters. Who calls it, and on what?"
            )
            return Finding(f"stage {stage} has no gradients", hint)
    return _wrong_gradients([one.gradients for one in seen]) or _wrong_run(seen)


def _wrong_gradients(held: Sequence[Sequence[torch.Tensor]]) -> Finding | None:
    inputs, targets = create_batch(len(held))
    per_micro_batch = _gradients_by_stage(len(held), inputs, targets)
    # By stage: the gradients of the batch's mean loss, which is the mean of the micro-batches'.
    by_parameter = [zip(*of_stage, strict=True) for of_stage in per_micro_batch]
    right = [[sum(parts) / len(inputs) for parts in of_stage] for of_stage in by_parameter]
    wrong = [stage for stage, one in enumerate(held) if not _close(one, right[stage])]
    if not wrong:
        return None
    problem, hint = _suspect_gradients(held, right, per_micro_batch)
    found, expected = held[wrong[0]][0][0, 0], right[wrong[0]][0][0, 0]
    numbers = f"its gradient must be {expected:.4g} and is {found:.4g}"
    return Finding(problem, hint, f"stage {wrong[0]}, first weight: {numbers}")


def _wrong_run(seen: Sequence[Ran]) -> Finding | None:
    number = numbers_of_micro_batches(len(seen))[-1]
    # Only once the gradients are right: an order means nothing if something else was computed.
    for stage, one in enumerate(seen):
        order = one_forward_one_backward(stage, len(seen), number)
        if one.actions and one.actions != order:
            given, ran = words(order), words(one.actions)
            detail = f"stage {stage} was given: {given}\nstage {stage} ran:       {ran}"
            hint = "The gradients are right, but the order decides how much memory it takes."
            return Finding("runs in another order than it was given", hint, detail)
        # In this order at least one backward pass comes before the last forward pass, so fewer
        # outputs than micro-batches must be left.
        if one.outputs_alive == number:
            holds = f"stage {stage} still holds the outputs of all {number} micro-batches"
            hint = (
                "After a backward pass nobody needs the activations of its micro-batch. Who still "
                "holds them? The handle of an isend does, too."
            )
            detail = f"at its last forward pass {holds}"
            return Finding("the activations are never freed", hint, detail)
    return None


def _gradients_by_stage(
    num_stages: int,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> list[list[list[torch.Tensor]]]:
    """By stage and micro-batch, computed in one process."""
    found: list[list[list[torch.Tensor]]] = [[] for _ in range(num_stages)]
    for x, target in zip(inputs, targets, strict=True):
        stages = create_stages(num_stages)
        F.mse_loss(stages(x), target).backward()
        for of_stage, stage in zip(found, stages, strict=True):
            of_stage.append(_gradients_of(stage))
    return found


OfStages = Sequence[Sequence[torch.Tensor]]  # by stage, of each of its parameters


def _suspect_gradients(
    held: OfStages,
    right: OfStages,
    per_micro_batch: Sequence[OfStages],
) -> tuple[str, str]:
    """The mistake that explains these gradients, and a hint."""
    num_stages, number = len(held), len(per_micro_batch[0])
    first, last = ([of_stage[index] for of_stage in per_micro_batch] for index in (0, -1))
    overwritten = "backward() adds to .grad. What becomes of the other micro-batches' gradients?"
    mistakes = [
        (
            _scaled(right, number),
            "the loss is not divided by the number of micro-batches",
            "The batch's loss is a mean of theirs.",
        ),
        (
            _scaled(right, 1 / number),
            "divides by the number of micro-batches twice",
            "mse_loss is a mean over rows already.",
        ),
    ]
    for which, only in (("last", last), ("first", first)):
        problem = f"has the gradients of the {which} micro-batch only"
        mistakes += [(_scaled(only, factor), problem, overwritten) for factor in (1, 1 / number)]
    if found := explanation(held, mistakes, None, _all_close):
        return found
    inputs, targets = map(torch.cat, create_batch(num_stages))
    module = create_stages(num_stages)[-1]
    F.mse_loss(module(inputs), targets).backward()
    if _close(held[-1], _gradients_of(module)):
        hint = "Its input is what the stage before it has sent."
        return "the last stage computes with the batch's inputs", hint
    if (stage := _backward_without_gradient(held, inputs)) is not None:
        hint = (
            "The loss depends on its output through the later stages: y.backward() takes the "
            "gradient of y."
        )
        return f"stage {stage} does not use the gradient that the next stage sends", hint
    if _close(held[-1], right[-1]):
        hint = (
            "The last stage is right. Does each gradient belong to the micro-batch whose backward "
            "pass it starts?"
        )
        return "a stage before the last has wrong gradients", hint
    hint = "Try it with one micro-batch. Does every received micro-batch have a tensor of its own?"
    return "the gradients are not those of one process", hint


def _backward_without_gradient(held: OfStages, inputs: torch.Tensor) -> int | None:
    """The first stage that called backward() on its output without the next stage's gradient."""
    # That is as if the loss were the sum, or the mean, of its outputs.
    number, x = numbers_of_micro_batches(len(held))[-1], inputs
    for stage, module in enumerate(create_stages(len(held))[:-1]):
        x = module(x.detach())
        x.sum().backward()
        of_sum = _gradients_of(module)
        factors = (1, 1 / number, 1 / x.numel())
        if any(_close(held[stage], [factor * one for one in of_sum]) for factor in factors):
            return stage
    return None


def _gradients_of(module: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def _scaled(by_stage: OfStages, factor: float) -> OfStages:
    return [[factor * tensor for tensor in of_stage] for of_stage in by_stage]


def _all_close(held: OfStages, expected: OfStages) -> bool:
    return all(map(_close, held, expected))


def _close(held: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor]) -> bool:
    pairs = zip(held, expected, strict=True)
    return all(one is not None and torch.allclose(one, other) for one, other in pairs)


EXERCISES = {
    "one_forward_one_backward": Exercise(
        "pipeline",
        "no stage waits or keeps more than it has to",
        observe_order,
        judge_order,
    ),
    "run_stage": Exercise(
        "pipeline",
        "every stage has the gradients of one process",
        observe_run,
        judge_run,
    ),
}
