"""``training_rows`` and ``evaluation_rows``: which rows are missing, repeated or misplaced?"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from learn.checking.calls import RecordedCalls
from learn.checking.finding import Exercise, Finding

TRAINING_PROMISE = "each row once per epoch, in the same global batches on any number of ranks"
EVALUATION_PROMISE = "every row counts once, and all ranks have the same number of rows"

EPOCH, SEED, BATCH = 3, 7, 10
NUM_ROWS = 47  # four full batches and one of 7 rows; few numbers of ranks divide any of them
# A last batch that is full, and one that is smaller than the number of ranks.
OTHER_NUMS_OF_ROWS = 50, 41
ENOUGH = "Which of the arguments may the order of the rows depend on, and which may it not?"


@dataclass(frozen=True)
class Asked:
    """One rank's answers, and whether it drew global random numbers or communicated for them.

    Args:
        answers: by what was asked; None if an answer is not of the type that was asked for.
        collective: the first call that was made, or none.
        reseeded: the global generators are not as they were.
    """

    answers: dict[str, Any]
    collective: str
    reseeded: bool


def _ask(function: Callable[..., Any], questions: dict[str, tuple[int, ...]]) -> Asked:
    """Ask on a rank whose global random numbers differ from those of the others."""
    rank = dist.get_rank()
    # Different numbers on each rank: an order that is drawn from them differs from rank to rank.
    _seed_all(rank)
    with RecordedCalls() as recorded:
        answers = {name: function(*arguments) for name, arguments in questions.items()}
    # What the generators would give next, now and untouched: equal if nobody drew or seeded.
    states = _next_numbers()
    _seed_all(rank)
    collective = recorded.calls[0].name if recorded.calls else ""
    return Asked(answers, collective, states != _next_numbers())


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _next_numbers() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(()).item()


def observe_training(function: Callable[..., list[list[int]]]) -> Asked:
    rank, size = dist.get_rank(), dist.get_world_size()
    others = {
        f"{name} of {num_rows}": (EPOCH, *whose, num_rows, BATCH, SEED)
        for num_rows in OTHER_NUMS_OF_ROWS
        for name, whose in (("own", (rank, size)), ("one rank", (0, 1)))
    }
    # Each question is for one promise: asked again, for another rank, on one rank, in another
    # epoch, with another seed.
    own = {
        "own": (EPOCH, rank, size, NUM_ROWS, BATCH, SEED),
        "again": (EPOCH, rank, size, NUM_ROWS, BATCH, SEED),
        "first rank's": (EPOCH, 0, size, NUM_ROWS, BATCH, SEED),
        "one rank": (EPOCH, 0, 1, NUM_ROWS, BATCH, SEED),
        "next epoch": (EPOCH + 1, 0, 1, NUM_ROWS, BATCH, SEED),
        "other seed": (EPOCH, 0, 1, NUM_ROWS, BATCH, SEED + 100),
    }
    asked = _ask(function, own | others)
    answers = {name: _steps(answer) for name, answer in asked.answers.items()}
    return Asked(answers, asked.collective, asked.reseeded)


def _steps(answer: Any) -> list[list[int]] | None:
    try:
        return [[_whole(row) for row in step] for step in answer]
    except (TypeError, ValueError):
        return None


def _whole(row: Any) -> int:
    if int(row) != row:
        raise ValueError
    return int(row)


def judge_training(asked: Sequence[Asked]) -> Finding | None:
    if any(None in one.answers.values() for one in asked):
        hint = "One list per step: [[4, 1], [0, 5], ...]."
        return Finding("does not return a list of lists of rows", hint)
    return (
        _not_a_function(asked)
        or _wrong_rows_trained(asked)
        or _wrong_order(asked[0])
        or _side_effect(asked)
    )


def _wrong_rows_trained(asked: Sequence[Asked]) -> Finding | None:
    others = [(num_rows, f" of {num_rows}") for num_rows in OTHER_NUMS_OF_ROWS]
    for num_rows, which in ((NUM_ROWS, ""), *others):
        own = [one.answers[f"own{which}"] for one in asked]
        single = asked[0].answers[f"one rank{which}"]
        if finding := (
            _wrong_epoch(num_rows, own)
            or _wrong_sizes(num_rows, own, single)
            or _wrong_batches(own, single)
        ):
            return finding
    return None


def _not_a_function(asked: Sequence[Asked]) -> Finding | None:
    """Equal arguments must give equal rows, today and on each rank."""
    for rank, one in enumerate(asked):
        if one.answers["own"] != one.answers["again"]:
            first, second = (one.answers[name][:1] for name in ("own", "again"))
            hint = (
                "A run that is resumed asks again and must get the same rows. What do random "
                "numbers start from?"
            )
            detail = f"rank {rank}, first step: {first}, then {second}"
            return Finding("the same arguments give different rows", hint, detail)
    for rank, one in enumerate(asked):
        # Every rank was asked for rank 0's rows. Ranks that shuffle differently answer differently,
        # and in training some rows would be on two ranks and others on none.
        if one.answers["first rank's"] != asked[0].answers["first rank's"]:
            theirs, ours = (found.answers["first rank's"][:1] for found in (asked[0], one))
            found = f"rank {rank}, asked for rank 0's rows, returns {ours}"
            detail = f"rank 0's first step: {theirs}; {found}"
            hint = f"Nobody tells them. {ENOUGH}"
            return Finding("the ranks do not agree on one rank's rows", hint, detail)
    return None


def _wrong_epoch(num_rows: int, own: Sequence[list[list[int]]]) -> Finding | None:
    """The rows of all ranks and steps must be all rows, once."""
    rows = [list(chain.from_iterable(steps)) for steps in own]
    counts = Counter(chain.from_iterable(rows))
    missing = [row for row in range(num_rows) if row not in counts]
    repeated = sorted(row for row, times in counts.items() if times > 1)
    found = f"{len(missing)} are missing, {len(repeated)} are there more than once"
    detail = f"{num_rows} rows on {len(own)} ranks: {found}"
    if strange := sorted(row for row in counts if not 0 <= row < num_rows):
        hint = f"The rows are 0 to {num_rows - 1}."
        return Finding(f"there is no row {strange[0]}", hint, detail)
    if all(len(set(one)) == num_rows for one in rows):
        hint = (
            "All ranks compute the same gradients, and more of them are no faster. What does each "
            "rank leave out?"
        )
        return Finding("every rank sees all rows", hint, detail)
    return _not_once(rows, missing, repeated, detail)


def _not_once(
    rows: Sequence[list[int]], missing: Sequence[int], repeated: Sequence[int], detail: str
) -> Finding | None:
    # Both at once is what ranks do that shuffle differently; one of them alone is a decision about
    # the last batch.
    if missing and repeated:
        twice = f"row {repeated[0]} on several, or more than once on one"
        detail += f", for example row {missing[0]} on no rank, and {twice}"
        hint = f"Do all ranks shuffle in the same way? {ENOUGH}"
        return Finding("the ranks' shares overlap", hint, detail)
    # As DistributedSampler does by default: it fills up the epoch with rows from its start.
    if repeated:
        ranks = [str(rank) for rank, one in enumerate(rows) if repeated[0] in one]
        places = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        detail += f", for example row {repeated[0]} on {places}"
        hint = "The last batch may be smaller than the others."
        return Finding("rows are trained on more than once", hint, detail)
    # As with drop_last=True.
    if missing:
        hint = (
            "The last batch may be smaller than the others, and the ranks need not have the same "
            "number of its rows."
        )
        return Finding("rows are left out", hint, f"{detail}, for example row {missing[0]}")
    return None


def _wrong_sizes(
    num_rows: int, own: Sequence[list[list[int]]], single: list[list[int]]
) -> Finding | None:
    # The number of steps first: with different ones, training would not even end.
    lengths = [len(steps) for steps in own]
    if len(set(lengths)) > 1:
        hint = (
            "A rank that is still training waits for the others' gradients forever. What can a "
            "step's list also be?"
        )
        detail = f"{num_rows} rows, batch_size {BATCH}: the ranks have {lengths} steps"
        return Finding("the ranks have different numbers of steps", hint, detail)
    # On one rank a step is a whole global batch: what the ranks have together is compared with it.
    sizes = [len(step) for step in single]
    if sizes != [min(BATCH, num_rows - start) for start in range(0, num_rows, BATCH)]:
        detail = f"{num_rows} rows, batch_size {BATCH}: on one rank the steps have {sizes} rows"
        hint = "Only the last batch may be smaller, and none is empty."
        return Finding("the steps have the wrong numbers of rows", hint, detail)
    together = [sum(counts) for counts in _rows_by_step(own)]
    if together != sizes:
        ranks = f"on {len(own)} ranks together"
        detail = f"batch_size {BATCH}: step 0 has {together[0]} rows {ranks}"
        hint = "Is batch_size the rows of one rank, or of all?"
        return Finding("a global batch has another size", hint, detail)
    return None


def _rows_by_step(own: Sequence[list[list[int]]]) -> list[list[int]]:
    """(steps, ranks): how many rows each rank has in each step."""
    return [list(map(len, step)) for step in zip(*own, strict=True)]


def _wrong_batches(own: Sequence[list[list[int]]], single: list[list[int]]) -> Finding | None:
    # In any order within the batch: the mean of its gradients is the same.
    for number, step in enumerate(zip(*own, strict=True)):
        batch, alone = sorted(chain.from_iterable(step)), sorted(single[number])
        if batch != alone:
            detail = f"step {number} on {len(own)} ranks: rows {batch}; on one rank: {alone}"
            hint = (
                "Which is cut first, the order of the whole epoch into batches, or the rows into "
                "shares of the ranks?"
            )
            problem = "a different number of ranks sees different global batches"
            return Finding(problem, hint, detail)
    # Last, because it is about speed and not about what is learned.
    for number, counts in enumerate(_rows_by_step(own)):
        if max(counts) - min(counts) > 1:
            detail = f"step {number}: {counts} rows, by rank"
            hint = "The slowest rank sets the pace of all."
            return Finding("the rows of a step are not divided evenly", hint, detail)
    return None


def _wrong_order(asked: Asked) -> Finding | None:
    names = ("one rank", "next epoch", "other seed")
    single, later, other = (list(chain.from_iterable(asked.answers[name])) for name in names)
    # Rows are shuffled because gradients of neighbours are alike: a batch of one kind is a poor
    # sample of all rows. Each check is for a way to shuffle that leaves something in order.
    if single == list(range(NUM_ROWS)):
        hint = "Rows of one kind are often neighbours in a data set."
        return Finding("the rows are not shuffled", hint)
    if single == later:
        hint = (
            "A model that sees the same batches in each epoch learns less. DistributedSampler has "
            "set_epoch for it."
        )
        detail = f"epochs {EPOCH} and {EPOCH + 1} begin {single[:6]}"
        return Finding("every epoch has the same order", hint, detail)
    if sum(following == row + 1 for row, following in pairwise(single)) > NUM_ROWS // 2:
        hint = (
            "Rows of one kind are often neighbours in a data set: each row needs a place of its "
            "own."
        )
        detail = f"the epoch begins {single[:12]}"
        return Finding("the batches are shuffled, but not the rows in them", hint, detail)
    if _batches(asked, "one rank") == _batches(asked, "next epoch"):
        hint = (
            "Is the order drawn again before it is cut into batches, or only the order of the "
            "batches?"
        )
        detail = f"one of them has the rows {sorted(single[:BATCH])}"
        return Finding("every epoch has the same batches", hint, detail)
    if single == other:
        detail = f"seeds {SEED} and {SEED + 100} begin {single[:6]}"
        hint = "Two runs should be able to differ."
        return Finding("the seed does not change the order", hint, detail)
    return None


def _batches(asked: Asked, name: str) -> set[frozenset[int]]:
    return set(map(frozenset, asked.answers[name]))


def _side_effect(asked: Sequence[Asked]) -> Finding | None:
    if used := [one.collective for one in asked if one.collective]:
        hint = (
            "All ranks can compute the same order on their own. What do they need to have in "
            "common?"
        )
        return Finding(f"the rows are right, but the ranks communicate ({used[0]})", hint)
    if any(one.reseeded for one in asked):
        hint = (
            "From then on, dropout draws the same numbers in every epoch. Can a generator be a "
            "variable of its own?"
        )
        return Finding("the rows are right, but a global random generator is changed", hint)
    return None


def observe_evaluation(function: Callable[..., list[tuple[int, bool]]]) -> Asked:
    rank, size = dist.get_rank(), dist.get_world_size()
    questions = {str(num_rows): (rank, size, num_rows) for num_rows in _nums_of_rows(size)}
    asked = _ask(function, questions)
    answers = {name: _pairs(answer) for name, answer in asked.answers.items()}
    return Asked(answers, asked.collective, asked.reseeded)


def _nums_of_rows(world_size: int) -> list[int]:
    # The ranks divide the rows; all but one of the ranks have to fill up; most have nothing else.
    return [4 * world_size, 4 * world_size + 1, 1]


def _pairs(answer: Any) -> list[tuple[int, bool]] | None:
    try:
        return [(_whole(row), bool(counts)) for row, counts in answer]
    except (TypeError, ValueError):
        return None


def judge_evaluation(asked: Sequence[Asked]) -> Finding | None:
    for num_rows in _nums_of_rows(len(asked)):
        answers = [one.answers[str(num_rows)] for one in asked]
        if any(answer is None for answer in answers):
            hint = "For example [(0, True), (2, True), (0, False)]."
            return Finding("does not return a list of pairs", hint)
        if finding := _wrong_evaluation(num_rows, answers):
            return finding
    return _side_effect(asked)


Answers = Sequence[list[tuple[int, bool]]]  # by rank


def _wrong_evaluation(num_rows: int, answers: Answers) -> Finding | None:
    size = f"{num_rows} rows on {len(answers)} ranks"
    detail = "\n".join(f"{size}, rank {rank}: {one}" for rank, one in enumerate(answers))
    # Which rows are there, then how many on each rank, then which of them count.
    for judged in (_wrong_rows, _wrong_lengths, _wrong_counts):
        if found := judged(num_rows, answers):
            return Finding(*found, detail)
    return None


def _wrong_rows(num_rows: int, answers: Answers) -> tuple[str, str] | None:
    rows = [{row for row, _ in one} for one in answers]
    strange = [row for row, _ in chain(*answers) if not 0 <= row < num_rows]
    missing = set(range(num_rows)).difference(*rows)
    if strange:
        hint = "Fill up with rows that exist: the model must read them."
        return f"there is no row {strange[0]}", hint
    if missing:
        hint = "The number of rows need not be a multiple of the number of ranks."
        return f"row {min(missing)} is on no rank", hint
    if min(len(answers), num_rows) > 1 and all(len(one) == num_rows for one in rows):
        return "every rank evaluates all rows", "What does each rank leave out?"
    return None


def _wrong_lengths(num_rows: int, answers: Answers) -> tuple[str, str] | None:
    lengths, needed = [len(one) for one in answers], -(-num_rows // len(answers))  # rounded up
    if len(set(lengths)) > 1:
        hint = (
            "A rank with one batch more waits for the others in each collective of its forward "
            "pass, as in FSDP."
        )
        return "the ranks have different numbers of rows", hint
    if lengths[0] > needed:
        problem = f"{lengths[0]} rows per rank, {needed} would be enough"
        return problem, "Fill up only what is missing."
    return None


def _wrong_counts(num_rows: int, answers: Answers) -> tuple[str, str] | None:
    counted = Counter(row for one in answers for row, counts in one if counts)
    if twice := [row for row, times in counted.items() if times > 1]:
        hint = (
            "The accuracy would be that of another test set. Which of the rows are there only to "
            "fill up?"
        )
        return f"row {twice[0]} counts {counted[twice[0]]} times", hint
    if len(counted) < num_rows:
        missing = min(set(range(num_rows)) - counted.keys())
        hint = "One of its places has to count; only the repeats do not."
        return f"row {missing} does not count", hint
    return None


EXERCISES = {
    "training_rows": Exercise("rows", TRAINING_PROMISE, observe_training, judge_training),
    "evaluation_rows": Exercise("rows", EVALUATION_PROMISE, observe_evaluation, judge_evaluation),
}
