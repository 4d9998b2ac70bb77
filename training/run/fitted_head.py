"""The head before the first step: a linear model, fitted to what the pretrained encoder says of the
training rows.

A new head is random, so the first steps of fine-tuning teach it what a linear model knows in a
second, and push the encoder about meanwhile. With few rows nothing is left after that. So the head
starts from the solution of logistic regression (Kumar et al., "Fine-Tuning can Distort Pretrained
Features", arXiv 2202.10054: linear probing, then fine-tuning), whose penalty cross-validation
chooses.

An encoder can be read in several ways, and what was trained for one says little in another: its
first token or the mean of all (see ``pooling.py``), through the pooler that it was pretrained with
or past it. If its files do not say how it was trained, the way that the linear model likes best is
taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax
from torch import nn

from training.data.batching import pad
from training.data.tokenized import TokenizedRows
from training.distributed.ranks import Ranks
from training.model.classifier import NewsClassifier
from training.model.layers import FAMILY_OF
from training.model.pooling import FIRST, MEAN, POOLER, POOLING_KEY
from training.model.precision import autocast
from training.tasks import MultiLabelClassification, Regression, Task

# Penalties are weak for large numbers: scikit-learn's C, on vectors of length 1.
PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0)
# A label's name counts as so many rows of it. With two rows per label of Banking77 or SIB-200 that
# is worth 10 points.
NAME_WEIGHT = 2.0
# A text without a label counts as this part of a row, times the square of how sure its cluster is.
TEXT_WEIGHT = 0.1
# Of the clusters: how sharply they are told apart, and as how many of their texts a label's name
# and a row of it count.
CONCENTRATION, ANCHOR_OF_NAME, ANCHOR_OF_ROW, ROUNDS_OF_CLUSTERS = 40.0, 20.0, 5.0, 20
# Where nothing says how sure a model may be that knows names alone: less sure than right, on four
# data sets.
SHARPNESS_OF_NAMES = 8.0
MOST_FOLDS, FEWER_FOLDS = 5, 3
# Scores (rows x labels) of a fit: with more of them, fewer folds; rows beyond that do not help to
# choose.
MANY_SCORES, ROWS_TO_CHOOSE = 20_000, 1_500
# From a third to thirty times as sure, in steps of a tenth.
SHARPNESS = tuple(1.1**step for step in range(-12, 37))
ROWS_AT_ONCE = 64
# Larger models stay in their files until a strategy has split them among the ranks.
MOST_WEIGHTS = 500_000_000
# A pooler that shall pass its input on: how large that input is, in standard deviations, where its
# activation bends.
THROUGH_TANH = 0.3
ABOVE_ZERO = 0.5


@dataclass(frozen=True)
class FittedHead:
    """A head for an encoder that is read in one way.

    ``pooling``: mean or first; ``through_pooler``: as the encoder was pretrained; otherwise the
    pooler becomes ``scale`` times the identity plus ``shift``, (hidden,). ``weight``: (labels,
    hidden) and ``bias``: (labels,), of the last layer. ``score``: the linear model's ``metric`` on
    held-out folds, None if there are too few rows; ``folds``: how many; ``loss``: the task's, of
    the rows that it was fitted to. ``agreement``: on which share of the texts without a label it
    answers as rows and names alone do, None without such texts; ``learned_from_texts``: whether it
    did.
    """

    pooling: str
    through_pooler: bool
    scale: float
    shift: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    metric: str
    score: float | None
    folds: int
    loss: float
    agreement: float | None = None
    learned_from_texts: bool = False

    @torch.no_grad()
    def apply_to(self, model: NewsClassifier) -> None:
        """Write it into the model, in place."""
        network = model.network
        if not self.through_pooler:
            pooler = _pooler_of(model)
            assert pooler is not None
            nn.init.eye_(pooler.weight).mul_(self.scale)
            pooler.bias.copy_(torch.from_numpy(self.shift))
            if self.shift.any():
                # What moves all states above zero says nothing, and dropout would make it noise.
                for name in FAMILY_OF[type(network).__name__].head_dropout:
                    network.get_submodule(name).p = 0.0
        head = network.get_submodule(model.head)
        head.weight.copy_(torch.from_numpy(self.weight))
        if head.bias is not None:
            head.bias.copy_(torch.from_numpy(self.bias))


def _pooler_of(model: NewsClassifier) -> nn.Linear | None:
    family = FAMILY_OF.get(type(model.network).__name__)
    pooler = model.network.get_submodule(family.pooler) if family and family.pooler else None
    return pooler if isinstance(pooler, nn.Linear) and pooler.bias is not None else None


def can_be_fitted(model: NewsClassifier) -> bool:
    """Whether a model's last layer can be reached, and every rank can hold the model to read its
    rows.
    """
    # A last layer without a bias belongs to a decoder, which reads each row's last token.
    if not model.head or model.network.get_submodule(model.head).bias is None:
        return False
    return sum(parameter.numel() for parameter in model.parameters()) <= MOST_WEIGHTS


# What the encoder says


@torch.inference_mode()
def read_rows(
    model: NewsClassifier,
    rows: TokenizedRows,
    index: np.ndarray,
    device: torch.device,
    precision: str,
) -> dict[str, np.ndarray]:
    """What the layers before the head say of rows, without dropout: fp32, (rows, hidden) each.

    ``first`` and ``mean`` are what a pooler would get of them, as far as the model has both;
    ``head`` is what its last layer gets, missing if that layer reads all tokens.
    """
    family = FAMILY_OF.get(type(model.network).__name__)
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[torch.Tensor, ...], *result: torch.Tensor) -> None:
            # A hook before a module gets its input, a hook after it its output. Of a block that is
            # (rows, tokens, hidden), or a tuple that begins with it. Heads and poolers mostly get
            # (rows, hidden).
            states = result[0] if result else given[0]
            states = states[0] if isinstance(states, tuple) else states
            if states.dim() == 2:
                seen[name] = states
            elif name == FIRST:  # of a block
                seen[name] = states[:, 0]

        return hook

    hooks = [model.network.get_submodule(model.head).register_forward_pre_hook(keep("head"))]
    has_mean = getattr(model.config, POOLING_KEY, None) == MEAN
    if _pooler_of(model) is not None:
        pooler = model.network.get_submodule(family.pooler)
        hooks.append(pooler.register_forward_pre_hook(keep(MEAN if has_mean else FIRST)))
        if has_mean:  # the block before it says what there would be without
            hooks.append(model.blocks[-2].register_forward_hook(keep(FIRST)))
    # Sorted by length, so that batches have little padding; put back into the given order below.
    order = index[np.argsort(rows.lengths[index], kind="stable")]
    found: dict[str, list[np.ndarray]] = {}
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), ROWS_AT_ONCE):
            batch = order[start : start + ROWS_AT_ONCE]
            ids, mask = pad(rows, batch, int(rows.lengths[batch].max()))
            with autocast(precision, device):
                model(ids.to(device), None if mask is None else mask.to(device))
            for name, states in seen.items():
                found.setdefault(name, []).append(states.float().cpu().numpy())
    finally:
        # The model is trained afterwards: hooks that stayed would keep states of each step alive.
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    # The order of an order is its inverse: at which place of the sorted rows each given one is.
    back = np.argsort(np.argsort(rows.lengths[index], kind="stable"), kind="stable")
    return {name: np.concatenate(parts)[back] for name, parts in found.items()}


def read_on_all_ranks(
    model: NewsClassifier, rows: TokenizedRows, index: np.ndarray, ranks: Ranks, precision: str
) -> dict[str, np.ndarray]:
    """The same, each rank reading its share; a collective call."""
    # Every n-th row, so that each rank gets as many long texts as the others.
    own = index[ranks.rank :: ranks.world_size]
    # The strategy, which comes later, expects the model where it was, so it only visits the device.
    place = next(model.parameters()).device
    model.to(ranks.device)
    parts = ranks.gather(read_rows(model, rows, own, ranks.device, precision) if len(own) else {})
    model.to(place)
    # Of fewer rows than ranks, rank 0 has some in any case, so it knows what was read and how wide.
    found = {
        name: np.zeros((len(index), states.shape[1]), np.float32)
        for name, states in parts[0].items()
    }
    for rank, part in enumerate(parts):
        for name, states in part.items():
            found[name][rank :: ranks.world_size] = states
    return found


# The linear model


@dataclass(frozen=True)
class _Features:
    """One way to read the encoder: what the last layer gets of rows and of the labels' names,
    centred and scaled to a mean length of 1, and how that came about.
    """

    pooling: str
    through_pooler: bool
    rows: np.ndarray
    names: np.ndarray
    unlabelled: np.ndarray
    scale: float = 1.0
    shift: float | np.ndarray = 0.0
    mean: float | np.ndarray = 0.0
    length: float = 1.0


def _ways_to_read(
    model: NewsClassifier, of_all: Sequence[dict[str, np.ndarray]], *, trained: str | None
) -> list[_Features]:
    """The most natural one first. ``of_all``: what was read of rows, names and texts without a
    label.
    """
    pooler = _pooler_of(model)
    if pooler is None:
        return [_normalised(_Features(FIRST, True, *(one["head"] for one in of_all)))]
    ways = _ways_past_pooler(model, of_all, trained)
    if model.has_stored_pooler and trained not in (MEAN, FIRST):
        through = _through_pooler(model, pooler, of_all)
        ways.insert(0 if trained == POOLER else len(ways), through)
    return [_normalised(way) for way in ways]


def _ways_past_pooler(
    model: NewsClassifier, of_all: Sequence[dict[str, np.ndarray]], trained: str | None
) -> list[_Features]:
    rows, names, unlabelled = of_all
    poolings = [pooling for pooling in (MEAN, FIRST) if pooling in rows]
    if trained in (MEAN, FIRST) and MEAN in rows:  # the encoder has both, and was trained for one
        poolings = [trained]
    # The scale is that of texts, and of names only if there is nothing else.
    has_texts = len(rows["head"]) + len(unlabelled["head"]) > 0
    return [
        _past_pooler(
            model,
            pooling,
            of_all,
            np.concatenate([rows[pooling], unlabelled[pooling]]) if has_texts else names[pooling],
        )
        for pooling in poolings
    ]


def _through_pooler(
    model: NewsClassifier, pooler: nn.Linear, of_all: Sequence[dict[str, np.ndarray]]
) -> _Features:
    """As the pooler was trained to be used: on the first token."""
    states = [one["head"] for one in of_all]
    if MEAN in of_all[0]:
        # The block of the mean was there when the rows were read, so what the head got came from
        # the mean. The first token goes through the pooler here, (rows, hidden) @ (hidden, hidden),
        # and the encoder need not run again.
        weight, bias = (
            part.detach().float().cpu().numpy() for part in (pooler.weight, pooler.bias)
        )
        states = [_activation_of(model)(one[FIRST] @ weight.T + bias) for one in of_all]
    return _Features(FIRST, True, *states)


def _past_pooler(
    model: NewsClassifier, pooling: str, of_all: Sequence[dict[str, np.ndarray]], texts: np.ndarray
) -> _Features:
    """As the head reads it if the pooler passes its input on, as far as its activation allows."""
    scale = 1 / max(float(texts.std()), 1e-6)
    shift: np.ndarray = np.zeros(texts.shape[1], np.float32)
    if FAMILY_OF[type(model.network).__name__].pooler_activation == "tanh":
        scale *= THROUGH_TANH
    else:  # which pass on what is above zero, so all of it is moved there
        shift = (np.maximum(0, -(scale * texts).min(axis=0)) + ABOVE_ZERO).astype(np.float32)
    read = [_activation_of(model)(scale * states[pooling] + shift) for states in of_all]
    return _Features(pooling, False, *read, scale=scale, shift=shift)


def _activation_of(model: NewsClassifier) -> Callable[[np.ndarray], np.ndarray]:
    name = FAMILY_OF[type(model.network).__name__].pooler_activation
    return {"tanh": np.tanh, "relu": lambda states: np.maximum(states, 0), "gelu": _gelu}[name]


def _gelu(states: np.ndarray) -> np.ndarray:
    return F.gelu(torch.from_numpy(states)).numpy()


def _normalised(way: _Features) -> _Features:
    texts = np.concatenate([way.rows, way.unlabelled])
    if not len(texts):
        return _normalised_names(way)
    mean = texts.mean(axis=0)
    # The length before the shift, which says nothing about a row.
    length = float(np.sqrt(((texts - way.shift) ** 2).sum(axis=1)).mean()) or 1.0
    rows, unlabelled = ((states - mean) / length for states in (way.rows, way.unlabelled))
    # A name is not written as a text is. What all names have in common tells no label.
    names = way.names
    if len(names):
        names = names - names.mean(axis=0)
        names = names / _mean_length(names)
    return _Features(
        way.pooling, way.through_pooler, rows, names, unlabelled, way.scale, way.shift, mean, length
    )


def _normalised_names(way: _Features) -> _Features:
    """Where there is no text to centre by: sentence encoders are compared by their vectors' angles,
    measured from zero. What a trained pooler says has no such zero, as an activation may let pass
    only what is above it.
    """
    mean = way.names.mean(axis=0) if way.through_pooler else way.shift
    names = way.names - mean
    names = names / _mean_length(names) if way.through_pooler else _unit(names)
    return replace(way, names=names, mean=mean, length=_mean_length(way.names - way.shift))


def _mean_length(vectors: np.ndarray) -> float:
    return float(np.linalg.norm(vectors, axis=1).mean()) or 1.0


@dataclass(frozen=True)
class Linear:
    """Scores are ``rows @ weight.T + bias``."""

    weight: np.ndarray
    bias: np.ndarray

    def scores(self, rows: np.ndarray) -> np.ndarray:
        return rows @ self.weight.T + self.bias


def _anchors(way: _Features, targets: np.ndarray, num_labels: int) -> np.ndarray:
    """Where each label's texts are to be looked for, by its name and its rows: (labels, hidden), of
    any length.
    """
    anchors = np.zeros((num_labels, way.rows.shape[1]))
    np.add.at(anchors, targets, ANCHOR_OF_ROW * _unit(way.rows))
    return anchors + ANCHOR_OF_NAME * way.names if len(way.names) else anchors


def _answers_of_clusters(way: _Features, targets: np.ndarray, num_labels: int) -> np.ndarray:
    """Which label each text without one has, as clusters say it: probabilities, (texts, labels).

    Each label is a direction, at first that of its anchor. Every text is shared out among the
    labels by its angle to them, then each direction becomes the mean of its texts, and so on: a
    mixture of von Mises-Fisher distributions, fitted by expectation maximisation (Banerjee et al.,
    JMLR 6, 2005). Names and rows stay where they are, and keep the clusters at their labels.
    """
    texts, anchors = _unit(way.unlabelled), _anchors(way, targets, num_labels)
    directions = _unit(anchors)
    for _ in range(ROUNDS_OF_CLUSTERS):
        answers = softmax(CONCENTRATION * texts @ directions.T, axis=1)
        directions = _unit(anchors + answers.T @ texts)
    return softmax(CONCENTRATION * texts @ directions.T, axis=1)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


@dataclass(frozen=True)
class _Strength:
    """How a head is fitted: scikit-learn's C, as how many rows the name of a label counts, and as
    which part of a row a text without a label.
    """

    C: float
    of_names: float = 0.0
    of_texts: float = 0.0


def _fit(
    task: Task,
    way: _Features,
    targets: np.ndarray,
    own: np.ndarray,
    strength: _Strength,
    earlier: Linear | None = None,
) -> Linear:
    """The linear model of the task for the rows ``own``, the names of the labels, and the texts
    without a label, each with their weight; a text counts the less, the less sure it is whose it
    is.
    """
    rows, targets = way.rows[own], targets[own]
    if earlier:
        return _fit_from(earlier, rows, targets, len(task.label_names), strength.C)
    if isinstance(task, Regression):
        return _fit_numbers(task, rows, targets, strength.C)
    num_labels = len(task.label_names)
    way = replace(way, rows=rows)  # anchors are of these rows alone, not of those held out
    is_single = not isinstance(task, MultiLabelClassification)
    has_only_names = is_single and len(way.names) and not strength.of_texts
    if has_only_names and len(np.unique(targets)) < num_labels:
        return _towards_anchors(way, targets, num_labels)
    # Names and texts are rows of a smaller weight, so one regression learns from all three.
    parts = [(rows, targets, np.ones(len(rows)))]
    if strength.of_names:
        of_names = np.arange(num_labels) if is_single else np.eye(num_labels)
        parts.append((way.names, of_names, np.full(num_labels, strength.of_names)))
    if strength.of_texts:
        answers = _answers_of_clusters(way, targets, num_labels)
        parts.append(
            (way.unlabelled, answers.argmax(axis=1), strength.of_texts * answers.max(axis=1) ** 2)
        )
    fit = _fit_single if is_single else _fit_several
    return fit(*(np.concatenate(part) for part in zip(*parts, strict=True)), num_labels, strength.C)


def _fit_numbers(task: Regression, rows: np.ndarray, targets: np.ndarray, C: float) -> Linear:
    from sklearn.linear_model import Ridge

    # In standard deviations, as the network is trained.
    model = Ridge(alpha=1 / C).fit(rows, (targets - task.mean) / task.deviation)
    return Linear(model.coef_[None], np.array([model.intercept_]))


def _towards_anchors(way: _Features, targets: np.ndarray, num_labels: int) -> Linear:
    """For labels of which some have a name and no row: the angle to where a label's texts are to be
    looked for.
    """
    # Logistic regression would never answer with a label that it has seen no text of. The angle to
    # a name or to the rows does not ask how many there are.
    has_rows = np.bincount(targets, minlength=num_labels)[:, None] > 0
    directions = np.where(has_rows, _unit(_anchors(way, targets, num_labels)), way.names)
    return Linear(SHARPNESS_OF_NAMES * directions, np.zeros(num_labels))


def _fit_single(
    rows: np.ndarray, targets: np.ndarray, weights: np.ndarray, num_labels: int, C: float
) -> Linear:
    """Multinomial logistic regression: each row has one label."""
    model = _regression(C).fit(rows, targets, sample_weight=weights)
    weight, bias = model.coef_, model.intercept_
    if len(model.classes_) == 2:  # one row of weights stands for both
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    if len(model.classes_) == num_labels:
        return Linear(weight, bias)
    # A label without a row and without a name is as unlikely as the least likely one.
    of_all, bias_of_all = (
        np.zeros((num_labels, weight.shape[1])),
        np.full(num_labels, bias.min() - 1.0),
    )
    of_all[model.classes_], bias_of_all[model.classes_] = weight, bias
    return Linear(of_all, bias_of_all)


def _fit_several(
    rows: np.ndarray, targets: np.ndarray, weights: np.ndarray, num_labels: int, C: float
) -> Linear:
    """A logistic regression for each label, since a row may have several or none."""
    weight, bias = np.zeros((num_labels, rows.shape[1])), np.zeros(num_labels)
    for label in range(num_labels):
        applies = targets[:, label] > 0
        if applies.all() or not applies.any():
            # Nothing to tell apart: its log-odds, as if it had been seen once more and missed once
            # more.
            bias[label] = np.log((applies.sum() + 1) / ((~applies).sum() + 1))
            continue
        model = _regression(C).fit(rows, applies, sample_weight=weights)
        weight[label], bias[label] = model.coef_[0], model.intercept_[0]
    return Linear(weight, bias)


def _regression(C: float) -> Any:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # Training goes on from here, so the last digits do not matter.
    warnings.filterwarnings("ignore", category=ConvergenceWarning)
    return LogisticRegression(C=C, max_iter=200, tol=1e-3)


def _fit_from(
    earlier: Linear, rows: np.ndarray, targets: np.ndarray, num_labels: int, C: float
) -> Linear:
    """Logistic regression whose penalty is on the distance from an earlier head; new labels begin
    at zero.
    """
    before = np.zeros((num_labels, rows.shape[1] + 1))
    before[: len(earlier.weight)] = np.column_stack([earlier.weight, earlier.bias])
    inputs, wanted = np.column_stack([rows, np.ones(len(rows))]), np.eye(num_labels)[targets]

    def loss(moved: np.ndarray) -> tuple[float, np.ndarray]:
        moved = moved.reshape(before.shape)
        scores = inputs @ (before + moved).T
        wrong = softmax(scores, axis=1) - wanted
        costs = (logsumexp(scores, axis=1) - (scores * wanted).sum(axis=1)).sum()
        # As in scikit-learn, C weighs the rows against the penalty, and a bias may move as it
        # likes.
        penalty = (moved[:, :-1] ** 2).sum() / 2
        slope = C * wrong.T @ inputs
        slope[:, :-1] += moved[:, :-1]
        return C * costs + penalty, slope.ravel()

    moved = minimize(loss, np.zeros(before.size), jac=True, method="L-BFGS-B").x
    found = before + moved.reshape(before.shape)
    return Linear(found[:, :-1], found[:, -1])


def metric_of(task: Task) -> str:
    """The name of the figure by which heads are compared, the larger the better."""
    return {MultiLabelClassification: "micro_f1", Regression: "r2"}.get(type(task), "accuracy")


def _score(task: Task, scores: np.ndarray, targets: np.ndarray) -> float:
    return task.metrics(scores, targets, {"thresholds": [0.5] * len(task.label_names)})[
        metric_of(task)
    ]


def _folds(task: Task, targets: np.ndarray, seed: int) -> list[np.ndarray]:
    """Rows to hold out, several times; empty if some label has a single row."""
    strata = task.strata(targets)
    if not len(targets):
        return []
    rng = np.random.default_rng([seed, 7])
    order = rng.permutation(len(targets))[:ROWS_TO_CHOOSE]
    counts = np.bincount(strata[order])
    fewest = counts[counts > 0].min()
    # One rare label among frequent ones hardly changes the score. But where most have a row or two,
    # every fold would ask for labels that the rest has not seen.
    if fewest < 2 and np.median(counts[counts > 0]) < 3:
        return []
    many = len(order) * len(task.label_names) > MANY_SCORES
    folds = FEWER_FOLDS if many else MOST_FOLDS
    # Sorted by label, and a fold takes every so many of them: each fold gets its share of each
    # label.
    order = order[np.argsort(strata[order], kind="stable")]
    return [order[fold::folds] for fold in range(folds)]


def _sharpness(task: Task, scores: np.ndarray, targets: np.ndarray) -> float:
    """What scores are multiplied by so that they are as sure as they are right, on rows that were
    held out.

    A strong penalty keeps scores small, so that nothing is ever sure (Guo et al., arXiv 1706.04599,
    temperature scaling).
    """
    given, wanted = torch.from_numpy(scores), torch.from_numpy(targets)
    return min(
        SHARPNESS, key=lambda factor: float(task.row_losses(factor * given, wanted, 0.0).mean())
    )


@dataclass(frozen=True)
class _Fitting:
    """Fits heads to rows, and judges how strongly by rows that were held out.

    ``targets``: of the rows, as the task takes them; ``folds``: rows to hold out, several times;
    ``earlier``: the head that is extended.
    """

    task: Task
    targets: np.ndarray
    folds: list[np.ndarray]
    earlier: Linear | None

    def fit(self, way: _Features, strength: _Strength) -> Linear:
        every = np.arange(len(self.targets))
        return _fit(self.task, way, self.targets, every, strength, self.earlier)

    def held_out_scores(self, way: _Features, strength: _Strength) -> tuple[np.ndarray, np.ndarray]:
        """The scores of rows by models that did not see them, and their targets."""
        everything = np.concatenate(self.folds)
        scores, wanted = [], []
        for fold in self.folds:
            # Only rows that are in some fold, of which there are at most ROWS_TO_CHOOSE: a choice
            # costs no more with a million rows.
            kept = np.setdiff1d(everything, fold)
            head = _fit(self.task, way, self.targets, kept, strength, self.earlier)
            scores.append(head.scores(way.rows[fold]))
            wanted.append(self.targets[fold])
        return np.concatenate(scores).astype(np.float32), np.concatenate(wanted)

    def judge(self, way: _Features, strength: _Strength) -> float:
        return _score(self.task, *self.held_out_scores(way, strength))

    def choose(self, ways: Sequence[_Features]) -> tuple[_Features, _Strength, float | None]:
        """How to read the encoder, how strongly to fit, and what that is worth; the latter None
        without folds.
        """
        # All ways to read the encoder have the same rows, names and texts, so the first one tells.
        of_names = NAME_WEIGHT if len(ways[0].names) else 0.0
        of_texts = TEXT_WEIGHT if len(ways[0].unlabelled) else 0.0
        usual = _Strength(PENALTIES[2], of_names)
        if not self.folds:
            return ways[0], replace(usual, of_texts=of_texts), None
        # One choice after the other: all combinations of ways, penalties, names and texts would be
        # up to 60 fits per fold, these are about ten.
        way = max(ways, key=lambda one: self.judge(one, usual)) if len(ways) > 1 else ways[0]
        chosen, score = self._best_penalty(way, usual)
        if of_names and self._every_label_has_rows():
            without = replace(chosen, of_names=0.0)
            if (value := self.judge(way, without)) > score:
                chosen, score = without, value
        if of_texts:
            with_texts = replace(chosen, of_texts=of_texts)
            if (value := self.judge(way, with_texts)) >= score:
                chosen, score = with_texts, value
        return way, chosen, score

    def _best_penalty(self, way: _Features, usual: _Strength) -> tuple[_Strength, float]:
        found = {C: self.judge(way, replace(usual, C=C)) for C in PENALTIES}
        # Of equally good ones the strongest, which is the smallest C.
        best = max(found, key=lambda C: (found[C], -C))
        return replace(usual, C=best), found[best]

    def agreement(self, way: _Features, strength: _Strength, linear: Linear) -> float | None:
        """See :class:`FittedHead`."""
        if not len(way.unlabelled):
            return None
        plain = self.fit(way, replace(strength, of_texts=0.0))
        without, with_texts = (one.scores(way.unlabelled).argmax(1) for one in (plain, linear))
        return float((without == with_texts).mean())

    def as_sure_as_right(self, way: _Features, strength: _Strength, linear: Linear) -> Linear:
        """The same answers, but as sure of them as held-out rows allow."""
        if not self.folds or self.earlier or isinstance(self.task, Regression):
            return linear
        sharpness = _sharpness(self.task, *self.held_out_scores(way, strength))
        return Linear(linear.weight * sharpness, linear.bias * sharpness)

    def loss(self, way: _Features, linear: Linear) -> float:
        """The task's mean loss of what was fitted to: the rows, or without them the names."""
        known, wanted = way.rows, self.targets
        if not len(wanted):
            known, wanted = way.names, np.arange(len(way.names))
        scores = torch.from_numpy(linear.scores(known).astype(np.float32))
        return self.task.row_losses(scores, torch.from_numpy(wanted), 0.0).mean().item()

    def _every_label_has_rows(self) -> bool:
        is_several = isinstance(self.task, MultiLabelClassification)
        return is_several or len(np.unique(self.targets)) == len(self.task.label_names)


def fit_head(
    model: NewsClassifier,
    of_all: tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]],
    targets: np.ndarray,
    *,
    trained: str | None,
    is_final: bool,
    seed: int,
    earlier: Linear | None = None,
) -> FittedHead:
    """Choose how to read the encoder, how strong the penalty is and whether the labels' names help;
    then fit.

    Args:
        of_all: what :func:`read_rows` found for the training rows, for the names of the labels,
            which are empty if the names say nothing, and for the texts without a label.
        targets: of the rows, as the task takes them.
        trained: the pooling that the encoder was trained for, if that is known.
        is_final: whether the head is to be used as it is. One that is trained on must not be sure
            of its rows, or they would have nothing left to teach the encoder.
        earlier: the head of the model that is extended, which reads the encoder as it is.
    """
    task = model.task
    if earlier:
        pooling = MEAN if model.has_own_mean_block else FIRST
        way = _normalised(_Features(pooling, True, *(one["head"] for one in of_all)))
        # It reads vectors as they are; fits see them centred and scaled.
        earlier = Linear(earlier.weight * way.length, earlier.bias + earlier.weight @ way.mean)
        ways = [way]
    else:
        ways = _ways_to_read(model, of_all, trained=trained)
    fitting = _Fitting(task, targets, _folds(task, targets, seed), earlier)
    way, strength, score = fitting.choose(ways)
    linear = fitting.fit(way, strength)
    agreement = fitting.agreement(way, strength, linear)
    if is_final:
        linear = fitting.as_sure_as_right(way, strength, linear)
    # The last layer gets vectors as they are, neither centred nor scaled.
    weight = linear.weight / way.length
    return FittedHead(
        pooling=way.pooling,
        through_pooler=way.through_pooler,
        scale=way.scale,
        shift=np.asarray(way.shift, np.float32),
        weight=weight.astype(np.float32),
        bias=(linear.bias - weight @ way.mean).astype(np.float32),
        metric=metric_of(task),
        score=score,
        folds=len(fitting.folds),
        loss=fitting.loss(way, linear),
        agreement=agreement,
        learned_from_texts=bool(strength.of_texts),
    )
